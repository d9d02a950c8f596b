"""Read Slurm's own listings of nodes: ``scontrol show node``, ``sinfo`` with GRES, and lists of
hosts.

``scontrol`` writes ``Key=Value`` words; every ``NodeName=`` begins a node. ``sinfo -N -o "%N %G"``
writes a table with the columns NODELIST and GRES, or with ``-h`` the rows alone. A list of hosts
(``$SLURM_JOB_NODELIST``) has neither devices nor kinds, so the user gives them. Any other text is
rejected. Generic resources look like ``gpu:a100:8(S:0-1),nvme:2``: name, optional type, count,
sockets in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from argosy.cluster.imports.found import FoundNode
from argosy.cluster.imports.hosts import HOST, HostFacts, expand_hosts
from argosy.errors import bad_input, invalid

_UNAVAILABLE = ("DOWN", "DRAIN", "DRNG", "FAIL", "FUT", "INVAL", "NOT_RESPONDING", "UNK")
"""Beginnings of states in which a node takes no jobs, in full and as ``sinfo`` shortens them."""
_HEADINGS = frozenset({"GRES", "HOSTNAMES", "NODELIST", "NODE_ADDR", "PARTITION", "STATE"})
"""The words at the head of columns of ``sinfo`` and ``squeue``, which are no hosts."""
_HOSTS = frozenset({"HOSTNAMES", "NODELIST"})
"""Heads of the columns that contain hosts."""
_RESOURCE = r"[\w.]+(?::[\w./-]+)+(?:\([^()]*\))?"
"""Pattern of one generic resource; a column that is too narrow cuts the last one."""
# Largest number of nodes that a comment names.
_SHOWN = 8
# Texts that can be read, for error messages.
_EXPECTED = (
    'what `scontrol show node` or `sinfo -N -o "%N %G"` prints, '
    "or a list of hosts such as gpu[01-04]"
)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A node that Slurm lists."""

    name: str
    gres: str
    address: str | None = None
    cpus: int | None = None
    state: str = ""


def read_slurm(text: str, file: str, given: HostFacts) -> list[FoundNode]:
    """Return the nodes with GPUs that take jobs; the others are named in a comment."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if text.lstrip().startswith("{"):
        raise invalid(file=file, found="JSON", expected=f"text without --json: {_EXPECTED}")
    is_list = lines and all(re.fullmatch(r"[^\s=|]+", line) for line in lines)
    if is_list and _HEADINGS.isdisjoint(re.split(r"[,;:]", lines[0])):
        hosts = expand_hosts(",".join(lines))
        _check_hosts(hosts, file)
        return given.nodes(dict.fromkeys(hosts, given.per_host))
    listed = _by_name(
        _shown(text, file) if re.search(r"^[^\S\n]*NodeName=", text, re.M) else _table(lines, file)
    )
    _check_hosts(list(listed), file)
    return _grouped(listed, file, given)


def _check_hosts(hosts: list[str], file: str) -> None:
    wrong = next((host for host in hosts if re.fullmatch(HOST, host) is None), None)
    if wrong is not None or not hosts:
        actual = "no host" if wrong is None else f'"{wrong[:40]}"'
        raise invalid(file=file, found=actual, expected=_EXPECTED)


def _by_name(nodes: Iterator[Listed]) -> dict[str, Listed]:
    """Return each node once; nodes in several partitions are listed several times."""
    by_name: dict[str, Listed] = {}
    for node in nodes:
        by_name.setdefault(node.name, node)
    return by_name


def _shown(text: str, file: str) -> Iterator[Listed]:
    """Yield the nodes of ``scontrol show node``, with or without ``-o``."""
    before, *blocks = re.split(r"^[^\S\n]*NodeName=", text, flags=re.M)
    if before.strip():
        raise invalid(file=file, found=f'"{before.strip()[:40]}"', expected=_EXPECTED)
    for block in blocks:
        name = block.split(None, 1)[0] if block.strip() else ""
        # Free text such as Comment= comes last and may contain words like Gres=.
        words = re.findall(r"(?:^|(?<=\s))(\w{1,40})=(\S*)", block)
        fields = dict(reversed(words))
        if "Gres" not in fields:
            expected = "Gres= for every node, as `scontrol show node` prints"
            raise invalid(name[:40], "none", expected, file=file)
        address, cpus = fields.get("NodeAddr", name), fields.get("CPUTot", "")
        yield Listed(
            name=name,
            gres=fields["Gres"],
            address=address if address != name else None,
            cpus=int(cpus) if re.fullmatch(r"[1-9][0-9]{0,3}", cpus) else None,
            state=fields.get("State", ""),
        )


def _table(lines: list[str], file: str) -> Iterator[Listed]:
    """Yield the nodes of ``sinfo`` with the columns NODELIST or HOSTNAMES, and GRES; other columns
    are ignored, except STATE."""
    rows = [re.split(r"\s*\|\s*|\s+", line) for line in lines]
    head = next((row for row in rows if _HOSTS.intersection(row)), None)
    if head is not None and "GRES" not in head:
        actual = f"a table with {' '.join(head)[:60]}"
        expected = 'a column GRES, as of `sinfo -N -o "%N %G"`'
        raise invalid(file=file, found=actual, expected=expected)
    host_at, gres_at = 0, 1
    if head is not None:
        host_at, gres_at = head.index(next(filter(_HOSTS.__contains__, head))), head.index("GRES")
    begin = rows.index(head) + 1 if head is not None else 0
    for row in rows[begin:]:
        is_row = len(row) == (2 if head is None else len(head))
        if (
            not is_row
            or re.fullmatch(rf"\(null\)|{_RESOURCE}(,{_RESOURCE})*", row[gres_at]) is None
        ):
            raise invalid(file=file, found=f'"{" ".join(row)[:60]}"', expected=_EXPECTED)
        state = row[head.index("STATE")].upper() if head is not None and "STATE" in head else ""
        for name in expand_hosts(row[host_at]):
            yield Listed(name=name, gres=row[gres_at], state=state)


def _grouped(listed: dict[str, Listed], file: str, given: HostFacts) -> list[FoundNode]:
    """Return an entry for each group of nodes with the same devices and CPUs."""
    groups: dict[tuple[tuple[tuple[str, int], ...], tuple[str, ...], int | None], list[Listed]] = {}
    without, gone = [], []
    cards_of = {name: gpus_of(node.gres, file) for name, node in listed.items()}
    given.kinds.check_used((name, card) for name, cards in cards_of.items() for card, _ in cards)
    for node in listed.values():
        cards = cards_of[node.name]
        if not _takes_jobs(node.state.upper()):
            gone.append(node.name)
        elif not cards:
            without.append(node.name)
        else:
            devices = tuple((given.kinds.of(node.name, card), count) for card, count in cards)
            resources = tuple(f"gpu:{card}" if card else "gpu" for card, _ in cards)
            groups.setdefault((devices, resources, node.cpus), []).append(node)
    if not groups:
        rejected = f"{len(without)} nodes without GPUs and {len(gone)} that take no jobs"
        raise invalid(file=file, found=rejected, expected="at least one node with GPUs")
    notes = [_note("without GPUs", without), _note("takes no jobs", gone)]
    entries: list[FoundNode] = []
    for (devices, resources, cpus), members in groups.items():
        entry = given.node(tuple(member.name for member in members), devices)
        addresses = tuple(member.address for member in members)
        note = "; ".join(filter(None, notes)) if not entries else ""
        entries.append(replace(entry, addresses=addresses, cpus=cpus, gres=resources, note=note))
    return entries


def _takes_jobs(state: str) -> bool:
    """Return whether a node in this state can be given a job, if not now then later; ``*`` marks
    nodes that do not respond."""
    flags = re.split(r"[+~#!%$@^-]", state)
    return "*" not in state and not any(flag.startswith(_UNAVAILABLE) for flag in flags)


def _note(why: str, names: list[str]) -> str:
    more = f", ... {len(names)} in all" if len(names) > _SHOWN else ""
    return f"left out ({why}): {', '.join(names[:_SHOWN])}{more}" if names else ""


def gpus_of(gres: str, file: str = "") -> tuple[tuple[str, int], ...]:
    """Return the GPUs among generic resources, each type with its count; the type is empty if none
    is stated.

    >>> gpus_of("gpu:a100:8(S:0-1),nvme:2"), gpus_of("gpu:4"), gpus_of("(null)")
    ((('a100', 8),), (('', 4),), ())
    """
    counts: dict[str, int] = {}
    for part in re.sub(r"\([^()]*\)", "", gres).split(","):
        name, *rest = part.split(":")
        if name != "gpu":
            continue
        rest = [word for word in rest if word != "no_consume"]
        match = re.fullmatch(r"[0-9]{1,4}", rest[-1]) if rest else None
        if match is None or len(rest) > 2 or int(match[0]) > 10_000:
            raise bad_input('GPUs such as "gpu:a100:8(S:0-1)"', gres[:60], file or "Gres")
        card = rest[0] if len(rest) == 2 else ""
        counts[card] = counts.get(card, 0) + int(match[0])
    return tuple((card, count) for card, count in counts.items() if count)
