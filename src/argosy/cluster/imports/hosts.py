"""Read host files and Slurm's topology: the hosts, the devices of each, and the switches above
them.

A host file has a host per line: ``node1 slots=8`` (MPI, DeepSpeed), ``node1:8`` or just ``node1``.
Slurm writes many hosts as one, ``gpu[01-04,7],login``; its ``topology.conf`` has a switch per line,
with ``Nodes=`` or ``Switches=``. Neither states the device kinds or the speeds of links; the user
has to give them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from argosy.cluster.imports.found import FoundMedium, FoundNode, FoundSwitch
from argosy.cluster.imports.kinds import Kinds
from argosy.errors import InputError, Problem, invalid, raise_any, refused

HOST = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
"""Pattern of a host's name."""
# Largest number of hosts of a list, to bound time and memory.
_MOST_HOSTS = 100_000


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """A set of facts that the user gives about the hosts."""

    kinds: Kinds
    per_host: int
    intra: float | None
    """Bytes/s between devices of a host."""
    nic: float
    """Bytes/s of a host's NIC."""

    def nodes(self, counts: Mapping[str, int]) -> list[FoundNode]:
        """Return an entry for each group of hosts with the same kind and number of devices.

        Entries are in the order of their first hosts.
        """
        self.kinds.check_used((host, "") for host in counts)
        groups: dict[tuple[str, int], list[str]] = {}
        for host, count in counts.items():
            groups.setdefault((self.kinds.of(host), count), []).append(host)
        return [
            self.node(tuple(hosts), ((kind, count),)) for (kind, count), hosts in groups.items()
        ]

    def node(self, hosts: tuple[str, ...], devices: tuple[tuple[str, int], ...]) -> FoundNode:
        """Return an entry for hosts with these devices."""
        media: tuple[FoundMedium, ...] = ()
        if sum(count for _, count in devices) > 1:
            if self.intra is None:
                raise refused("--intra is needed: the file does not contain the bandwidth")
            media = (FoundMedium(name="intra", bandwidth=self.intra),)
        return FoundNode(
            hosts=hosts, devices=devices, intra=media, nic=(self.nic, 1), is_named=True
        )


def read_hostfile(text: str, file: str, given: HostFacts) -> list[FoundNode]:
    """Return an entry for each group of hosts with equally many devices, in the order of the
    file."""
    slots: dict[str, int] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = re.fullmatch(
            f"({HOST})"
            + r"(?::([0-9]{1,9})|\s+(?:slots|max_slots|gpus)\s*=\s*([0-9]{1,9}))?"
            + r"(?:\s+\w+\s*=\s*\w+)*",
            content,
        )
        if match is None:
            expected = 'a host, "host slots=8" or "host:8"'
            problems.append(_wrong(content, expected, file, number))
            continue
        count = int(match[2] or match[3] or given.per_host)
        if match[1] in slots or count < 1:
            expected = "each host once, with at least one slot"
            problems.append(_wrong(content, expected, file, number))
            continue
        slots[match[1]] = count
    if not slots and not problems:
        problems.append(Problem(file=file, expected="at least one host", found="none"))
    raise_any(problems)
    return given.nodes(slots)


def _wrong(content: str, expected: str, file: str, line: int) -> Problem:
    """Return the problem of a line that is none of a host file."""
    return Problem(file=file, line=line, found=f'"{content[:40]}"', expected=expected)


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a Slurm host list.

    >>> expand_hosts("gpu[01-03,7],login")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']
    """
    if re.sub(r"[^\[\]]+", "", text).replace("[]", ""):
        raise invalid(
            found=f'"{text[:40]}"', expected='a "]" after every "[", and none inside another'
        )
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.strip()):
        hosts += _expanded(part.strip(), room=_MOST_HOSTS - len(hosts))
    return hosts


def _expanded(part: str, *, room: int) -> Iterator[str]:
    """Yield the hosts of ``gpu[01-04,7]rack[1-2]``; raise an ``InputError`` before expanding more
    than ``room`` hosts."""
    pieces = re.split(r"\[([^\]]*)\]", part)
    ranges = [[_range(text, part) for text in inside.split(",")] for inside in pieces[1::2]]
    count = math.prod(sum(last - first + 1 for first, last, _ in choices) for choices in ranges)
    if count > room:
        raise invalid(found=f'"{part[:40]}"', expected=f"at most {_MOST_HOSTS} hosts in all")
    numbers = [
        [
            f"{number:0{digits}d}"
            for first, last, digits in choices
            for number in range(first, last + 1)
        ]
        for choices in ranges
    ]
    for chosen in itertools.product(*numbers):
        yield "".join(
            itertools.chain.from_iterable(itertools.zip_longest(pieces[::2], chosen, fillvalue=""))
        )


def _range(text: str, part: str) -> tuple[int, int, int]:
    """Return the first and last number, and the number of digits they are written with."""
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
    if match is None or last < first:
        expected = 'numbers and rising ranges in brackets, such as "gpu[01-04,7]"'
        raise invalid(found=f'"{part[:40]}"', expected=expected)
    return first, last, len(match[1])


def read_topology(
    text: str, file: str, given: HostFacts, uplink: float
) -> tuple[list[FoundNode], list[FoundSwitch]]:
    """Return nodes and switches of a ``topology.conf``; ``uplink`` is every switch's bandwidth
    upwards in bytes/s."""
    hosts: dict[str, tuple[str, ...]] = {}
    below: dict[str, tuple[str, ...]] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        fields = {
            key.lower(): value for key, value in re.findall(r"\b(\w++)\s*+=\s*+(\S+)", content)
        }
        if not content:
            continue
        if "switchname" not in fields or not {"nodes", "switches"} & fields.keys():
            expected = "SwitchName= with Nodes= or Switches="
            problems.append(_wrong(content, expected, file, number))
            continue
        for name in expand_hosts(fields["switchname"]):
            hosts[name] = tuple(expand_hosts(fields.get("nodes", "")))
            below[name] = tuple(expand_hosts(fields.get("switches", "")))
    if problems or not hosts:
        raise InputError(
            problems or [Problem(file=file, expected="at least one switch", found="none")]
        )
    parent = {child: name for name, children in below.items() for child in children}
    all_hosts = tuple(dict.fromkeys(host for members in hosts.values() for host in members if host))
    top = [name for name in hosts if name not in parent]
    switches = [
        FoundSwitch(
            name=name,
            hosts=tuple(host for host in members if host),
            parent=parent.get(name) if parent.get(name) not in top else None,
            uplink=uplink,
        )
        for name, members in hosts.items()
        if name not in top or len(top) > 1
    ]
    return given.nodes(dict.fromkeys(all_hosts, given.per_host)), switches
