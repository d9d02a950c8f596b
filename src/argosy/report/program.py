"""A distributed program for people: shares of the devices, collectives, and where every parameter is, with reasons."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.table import Table

from argosy.cluster.topology import Cluster
from argosy.report.marks import names_in_short
from argosy.report.tables import plain_table
from argosy.solve.placement import Pricing
from argosy.solve.spmd import Alternative, Program, alternatives
from argosy.units import SIZE, TIME


def program_title(program: Program, cluster: Cluster) -> str:
    graph = program.graph
    size = f"{graph.num_parameters():,} parameters, {len(graph.nodes):,} operations"
    proven = program.seconds / program.bound - 1 if program.bound else 0.0
    best = f"none is more than {100 * proven:.2f} % faster" if proven >= 5e-5 else "none is faster"
    lines = [
        f"{graph.name} ({size}) shared by {len(program.group)} devices of {cluster.name}",
        f"step {TIME.format(program.seconds)}: compute {TIME.format(program.compute_seconds)}, "
        f"collectives {TIME.format(program.transfer_seconds)}; at these shares {best}",
    ]
    if not any(row.units for row in program.rows):
        lines.append(
            "nothing is split: every device does the whole step, since sharing it would cost more than it saves"
        )
    return "\n".join(lines)


def share_table(program: Program, cluster: Cluster) -> Table:
    """Devices with the same shares on one line; a column per segment."""
    segments = program.segments.ratios
    columns = ["share"] if len(segments) == 1 else [f"share {number}" for number in range(len(segments))]
    table = plain_table("devices", "kind", *columns, "memory", right=(*columns, "memory"))
    rows = [
        (
            cluster.device(name).kind.name,
            *(f"{100 * ratio:.2f} %" for ratio in ratios),
            SIZE.format(held, digits=3),
            name,
        )
        for name, ratios, held in zip(
            program.group.names, zip(*segments, strict=True), program.device_bytes, strict=True
        )
    ]
    for (kind, *rest), alike in groupby(rows, key=lambda row: row[:-1]):
        table.add_row(names_in_short(row[-1] for row in alike), kind, *rest)
    return table


def segment_lines(program: Program) -> list[str]:
    """Where the segments of a program begin, in the forward."""
    segments, lines = program.segments, []
    for number in range(1, len(segments.ratios)):
        first = next(node for index, node in enumerate(program.graph.nodes) if segments.at(index) == number)
        where = first.module or first.source or first.name
        lines.append(f"share {number} from {where} on, and in the backward of what follows")
    return lines


def collective_table(program: Program) -> Table:
    """Collectives by when they run, kind and way."""
    table = plain_table("when", "collective", "way", "count", "bytes", "time", right=("count", "bytes", "time"))
    found: dict[tuple[str, str, str], list[float]] = {}
    for move in program.moves:
        if move.seconds > 0:
            total = found.setdefault((program.phase(move), move.step.kind, move.way), [0, 0.0, 0.0])
            total[0] += 1
            total[1] += program.graph.values[move.value].num_bytes
            total[2] += move.seconds
    for (when, kind, way), (count, size, seconds) in sorted(found.items(), key=lambda item: -item[1][2]):
        table.add_row(when, kind, way, f"{count:.0f}", SIZE.format(size, digits=3), TIME.format(seconds))
    return table


def placements(program: Program) -> Iterator[tuple[str, list[int]]]:
    """Parameters that differ in numbers only and are placed alike, the largest first."""
    groups: dict[tuple[str, str], list[int]] = {}
    for value in program.graph.parameters:
        name = re.sub(r"\b\d+\b", "*", program.graph.values[value].name, count=1)
        groups.setdefault((name, str(program.deliveries[value])), []).append(value)

    def weight(item: tuple[tuple[str, str], list[int]]) -> int:
        return -sum(program.graph.values[value].elements for value in item[1])

    for (name, _), values in sorted(groups.items(), key=weight):
        yield name if len(values) > 1 else program.graph.values[values[0]].name, values


def parameter_table(program: Program, *, most: int = 12) -> Table:
    """Where parameters are stored, and as what they are used."""
    table = plain_table("parameter", "count", "shape", "stored", "used as", right=("count",))
    for name, values in list(placements(program))[:most]:
        described, delivery = program.graph.values[values[0]], program.deliveries[values[0]]
        shape = " x ".join(map(str, described.shape))
        table.add_row(name, str(len(values)), shape, str(delivery.stored), " and ".join(map(str, delivery.states)))
    return table


def reason_table(program: Program, pricing: Pricing, *, most: int = 6) -> Table:
    """For the largest parameters, what the best program with another placement would cost."""
    table = plain_table("parameter", "placed", "otherwise", "step", right=("step",))
    for name, values in list(placements(program))[:most]:
        chosen = program.deliveries[values[0]]
        others = [a for a in alternatives(program, pricing, values[0]) if a.delivery != chosen]
        for place, other in enumerate(others[:3]):
            first = (name, str(chosen)) if place == 0 else ("", "")
            table.add_row(*first, str(other.delivery), _more(program, other))
    return table


def _more(program: Program, other: Alternative) -> str:
    more = other.seconds / program.seconds - 1
    return "the same" if more < 5e-5 else f"+{100 * more:.2f} %"


def program_to_dict(program: Program) -> dict[str, Any]:
    """What ``--json`` prints."""
    graph = program.graph
    return {
        "name": graph.name,
        "operations": len(graph.nodes),
        "parameters": graph.num_parameters(),
        "step_seconds": program.seconds,
        "compute_seconds": program.compute_seconds,
        "bound_seconds": program.bound,
        "devices": [
            {"device": name, "share": ratio, "bytes": held}
            for name, ratio, held in zip(program.group.names, program.ratios, program.device_bytes, strict=True)
        ],
        "segments": [
            {
                "operations": sum(program.segments.at(i) == number for i in range(len(graph.nodes))),
                "shares": list(ratios),
            }
            for number, ratios in enumerate(program.segments.ratios)
        ],
        "collectives": [
            {
                "tensor": graph.values[move.value].name,
                "kind": str(move.step.kind),
                "when": str(program.phase(move)),
                "way": str(move.way),
                "bytes": graph.values[move.value].num_bytes,
                "seconds": move.seconds,
            }
            for move in program.moves
            if move.seconds > 0
        ],
        "placements": {graph.values[v].name: str(program.deliveries[v].stored) for v in graph.parameters},
        "without_rule": list(program.unknown),
    }


def without_rule(op: str) -> str:
    """The warning for an operation that the rules do not know."""
    return f"no rule knows {op}: every device does it in full"
