"""Run ``argosy init``: write a cluster file from a short conversation, or from options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from argosy.cli.inputs import parse_rate, whole_number
from argosy.cli.options import Json
from argosy.cli.terminal import STDOUT, check_output, print_json, say_written, write_file
from argosy.cluster.catalogue import device_kind
from argosy.cluster.device import DeviceKind
from argosy.cluster.file import build_cluster
from argosy.document import parse_toml
from argosy.errors import InputError, Mismatch, bad_input, impossible
from argosy.units import RATE, SIZE

# The type of an answer.
_Answer = TypeVar("_Answer")
# The default output file.
_FILE = Path("cluster.toml")
# The form of --node: nodes x devices kind, links.
_NODE = re.compile(r"\s*(?:(\d+)\s*[xX]\s*)?(\d+)\s+(\S+?)\s*((?:,[^,]+)*)")
# The form of --node in words.
_FORM = (
    "such as '2 x 4 A100-80GB, intra 300 GB/s, nic 100 Gbit/s': nodes x devices of a kind, and "
    "their links"
)


@dataclass(frozen=True, kw_only=True)
class NodeAnswer:
    """A group of equal nodes that a user described; rates are text with units."""

    count: int
    devices: int
    kind: DeviceKind
    intra: str | None
    nic: str | None


def init(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The cluster file to write; - is stdout.")
    ] = _FILE,
    name: Annotated[str | None, typer.Option("--name", help="What the cluster is called.")] = None,
    node: Annotated[
        list[str] | None, typer.Option("--node", metavar="NODES", help=f"{_FORM}. Repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    json: Json = False,
) -> None:
    """Write a cluster file, by a short conversation or by options.

    Without --node it asks: how many nodes of each kind, with which devices, links and network.

    \b
    Examples:
        argosy init
        argosy init --node "2 x 4 A100-80GB, intra 300 GB/s, nic 100 Gbit/s" \\
            --node "1 x 2 V100-32GB" --name lab
    """
    if output == STDOUT:
        check_output(output, json=json)
    elif output.exists() and not force:
        check_output(output)
        remedy = "another name, or --force to overwrite it"
        raise impossible(f"write {output}", "a file of this name exists", remedy)
    if node:
        answers = [parse_node(text) for text in node]
        title = name or "mine"
    else:
        title = name or _asked("What is the cluster called?", "mine", _name)
        answers = _conversation()
    text = cluster_text(title, answers, _FILE if output == STDOUT else output)
    cluster = build_cluster(parse_toml(text, file=str(output)), folder=Path())
    write_file(output, text.encode())
    if json:
        counts = {"devices": len(cluster.devices), "nodes": len(cluster.nodes)}
        print_json("init", {"file": str(output), "name": cluster.name, **counts})
    else:
        say_written(
            f"wrote {output}: {cluster!r}\nsee it:  argosy cluster show {shlex.quote(str(output))}",
            output,
        )


def parse_node(text: str) -> NodeAnswer:
    """Parse the value of ``--node``."""
    match = _NODE.fullmatch(text)
    if match is None:
        raise bad_input(_FORM, text, "--node")
    rates: dict[str, str] = {}
    for part in match[4].split(",")[1:]:
        medium, _, rate = part.strip().partition(" ")
        if medium not in ("intra", "nic") or medium in rates:
            raise bad_input("intra or nic and a rate, each once", part.strip(), "--node")
        parse_rate("--node", rate)
        rates[medium] = rate.strip()
    count, devices = whole_number(match[1] or "1"), whole_number(match[2])
    if not count or not devices:
        raise bad_input("at least 1 node and 1 device", text, "--node")
    kind = _kind("--node", match[3])
    return NodeAnswer(
        count=count, devices=devices, kind=kind, intra=rates.get("intra"), nic=rates.get("nic")
    )


def _kind(where: str, name: str) -> DeviceKind:
    """Return a device kind by name; raise ``InputError`` if it is unknown."""
    try:
        return device_kind(name)
    except Mismatch as error:
        raise InputError([error.at(path=where)]) from None


def _conversation() -> list[NodeAnswer]:
    """Ask for the nodes of a cluster until there are no more."""

    def rate(text: str) -> str:
        """Check that an answer is a rate."""
        parse_rate("your answer", text)
        return text

    def kind_of(text: str) -> DeviceKind:
        """Return the device kind that an answer names."""
        return _kind("your answer", text)

    answers: list[NodeAnswer] = []
    while not answers or _asked("Nodes of another kind?", "no", _yes_or_no):
        kind = _asked(
            "Which devices do they have? (argosy devices lists kinds)", "A100-80GB", kind_of
        )
        devices = _asked("How many devices has each node?", "8", _count)
        count = _asked("How many such nodes are there?", "1", _count)
        intra = (
            _asked("How fast are two devices of a node linked?", "300 GB/s", rate)
            if devices > 1
            else None
        )
        nic = _asked("How fast is a node's network?", "100 Gbit/s", rate)
        answers.append(NodeAnswer(count=count, devices=devices, kind=kind, intra=intra, nic=nic))
    return answers


def _asked(question: str, default: str, read: Callable[[str], _Answer]) -> _Answer:
    """Return the answer to a question; report an invalid answer and ask again."""
    import sys

    while True:
        sys.stderr.write(f"{question} [{default}] ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            remedy = "--node and --name in place of answers"
            raise impossible("describe the cluster", "the input ended", remedy)
        try:
            return read(line.strip() or default)
        except InputError as error:
            sys.stderr.write(f"{error}\n")


def _name(text: str) -> str:
    """Check that an answer is a valid name."""
    if re.fullmatch(r"[A-Za-z0-9_-]+", text) is None:
        raise bad_input("a name of letters, digits, - and _", text)
    return text


def _count(text: str) -> int:
    """Return an answer as a whole number of at least 1."""
    count = whole_number(text)
    if not count:
        raise bad_input("a whole number of at least 1", text)
    return count


def _yes_or_no(text: str) -> bool:
    """Return whether an answer is yes."""
    if text.lower() not in ("y", "yes", "n", "no"):
        raise bad_input("yes or no", text)
    return text.lower().startswith("y")


def cluster_text(name: str, answers: list[NodeAnswer], output: Path) -> str:
    """Return the cluster file, with a comment for everything in it."""
    import json

    lines = [
        f"# A cluster for Argosy. See what it says: argosy cluster show {output}",
        "# Everything that a cluster file can say is in docs/clusters.md.",
        f"name = {json.dumps(name)}",
    ]
    for index, answer in enumerate(answers):
        lines += ["", *_node_lines(chr(ord("a") + index) if index < 26 else f"n{index}x", answer)]
    lines += [
        "",
        "# A slower way between two groups of nodes than their networks:",
        '# [[links]]\n# between = ["a*", "b*"]\n# bandwidth = "10 Gbit/s"\n# latency = "2 ms"',
        "",
        '# What changes over time (also trace = "file.csv", or a generator):',
        (
            '# [[changes]]\n# link = "a0.nic"\n# steps = [["0 s", "100 Gbit/s"], ["30 s", "10 '
            'Gbit/s"]]'
        ),
    ]
    return "\n".join(lines) + "\n"


def _node_lines(letter: str, answer: NodeAnswer) -> list[str]:
    """Return the lines of one group of nodes."""
    kind = answer.kind
    names = f"{letter}0" + (f" to {letter}{answer.count - 1}" if answer.count > 1 else "")
    facts = f"{SIZE.short(kind.memory)}, {RATE.short(kind.memory_bandwidth)}"
    lines = [
        f"[[nodes]]  # {names}",
        f'name = "{letter}"',
        f"count = {answer.count}",
        (
            f'devices = {{ kind = "{kind.name}", count = {answer.devices} }}  # {facts}; '
            "efficiency = 0.9 for slower ones"
        ),
    ]
    if answer.devices > 1:
        lines += [
            (
                "# Between devices of a node: of each device, each way; add shared = true where "
                "all share it."
            ),
            (
                f'intra = [{{ medium = "local", bandwidth = "{answer.intra or "25 GB/s"}", '
                f'latency = "5 us" }}]'
            )
            + ("" if answer.intra else "  # a guess: PCIe"),
        ]
    lines += [
        "# The node's network card: each way, shared by its devices.",
        f'nic = {{ bandwidth = "{answer.nic or "100 Gbit/s"}", latency = "20 us" }}'
        + ("" if answer.nic else "  # a guess"),
    ]
    return lines
