"""The operations of a graph as the rules see them: calls with shapes, patterns from the table,
where each index stands.

Nodes that run the same operation with the same constants on tensors of the same shapes and dtypes
share all of it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from argosy.space.operations.families import FAMILIES, OperationCall, Pattern, whole
from argosy.workload.graph import Argument, Graph, GraphNode, Ref


@cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """The data file: an entry per operation."""
    text = files("argosy.data").joinpath("sharding.toml").read_text(encoding="utf-8")
    return {op: entry for section in tomllib.loads(text).values() for op, entry in section.items()}


def is_known(op: str) -> bool:
    return op in table()


def call_of(graph: Graph, node: GraphNode) -> OperationCall:
    """A node with shapes; an output that nobody reads has the shape of the first one that somebody
    does."""
    shown = [None if value is None else graph.values[value].shape for value in node.outputs]
    some = next(shape for shape in shown if shape is not None)
    return OperationCall(
        node=node,
        inputs=tuple(graph.values[value].shape for value in node.inputs),
        outputs=tuple(some if shape is None else shape for shape in shown),
        entry=table().get(node.op, {}),
    )


def pattern_of(call: OperationCall) -> Pattern:
    """The labels of an operation; for a reshape those of nothing, because it is mapped by
    ``from_flat_cut``."""
    entry = call.entry
    if not entry or entry.get("family") == "view":
        found = whole(call)
    elif "labels" in entry:
        found = _parsed(entry["labels"])
    else:
        found = FAMILIES[entry["family"]](call)
    count = len(call.inputs)
    linear = entry.get("linear", ())
    sets = [range(count)] if linear == "all" else [s for s in linear if max(s) < count]
    inexact = any(e.startswith("c:") for e in entry.get("whole", ()))
    return Pattern(
        inputs=found.inputs,
        outputs=found.outputs,
        linear=tuple(frozenset(s) for s in sets),
        additive=frozenset(entry.get("additive", ())),
        whole=frozenset((e.split(":")[0], int(e.split(":")[1])) for e in entry["whole"])
        if inexact
        else frozenset(),
        stretched=found.stretched,
        by_rows=found.by_rows,
    )


@cache
def _parsed(text: str) -> Pattern:
    left, right = text.split("->")

    def side(part: str) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple("" if letter == "." else letter for letter in word) for word in part.split(",")
        )

    return Pattern(inputs=side(left), outputs=side(right))


@dataclass(frozen=True, kw_only=True)
class Label:
    """An index of an operation."""

    places: tuple[tuple[int, int, int], ...]
    """(end, dim, factor): the tensors, inputs first, that have it; results that nobody reads
    apart."""
    sizes: tuple[int, ...]


def shared_calls(
    graph: Graph, all_ends: Sequence[tuple[int | None, ...]], fold: bool
) -> tuple[list[OperationCall], list[Pattern], list[dict[str, Label]]]:
    """Per node its call, pattern and labels; nodes that do the same to tensors of the same looks
    share them."""
    known: dict[object, tuple[OperationCall, Pattern, dict[str, Label]]] = {}
    numbers: dict[object, int] = {}
    looks = [numbers.setdefault((value.shape, value.dtype), len(numbers)) for value in graph.values]
    found = []
    for index, (node, ends) in enumerate(zip(graph.nodes, all_ends, strict=True)):
        arguments = tuple(
            [Ref if type(part) is Ref else _without_values(part) for part in node.arguments]
        )
        key: object = (
            node.op,
            arguments,
            tuple([-1 if value is None else looks[value] for value in ends]),
        )
        key = key if fold else index
        if key not in known:
            call = call_of(graph, node)
            pattern = pattern_of(call)
            known[key] = (call, pattern, _occurrences(ends, call, pattern))
        found.append(known[key])
    return (
        [call for call, _, _ in found],
        [pattern for _, pattern, _ in found],
        [labels for _, _, labels in found],
    )


def same_ends(ends: tuple[int | None, ...]) -> tuple[int, ...] | None:
    """Which of a node's ends are one value; None where none are."""
    return tuple([ends.index(value) for value in ends]) if len(set(ends)) < len(ends) else None


def _without_values(argument: Argument) -> object:
    """An argument but for which values it names."""
    if isinstance(argument, Ref):
        return Ref
    return (
        tuple([_without_values(part) for part in argument])
        if isinstance(argument, tuple)
        else argument
    )


def _occurrences(
    all_ends: tuple[int | None, ...], call: OperationCall, pattern: Pattern
) -> dict[str, Label]:
    """Per label, where it stands."""
    places: dict[str, list[tuple[int, int, int]]] = {}
    sizes: dict[str, set[int]] = {}
    stretched = pattern.stretched or {}
    ends = zip(
        all_ends,
        (*call.inputs, *call.outputs),
        (*pattern.inputs, *pattern.outputs),
        strict=True,
    )
    for end, (value, shape, labels) in enumerate(ends):
        for dim, label in enumerate(labels):
            if label and value is not None:
                factor = stretched.get((end, label), 1)
                places.setdefault(label, []).append((end, dim, factor))
                sizes.setdefault(label, set()).add(shape[dim] // factor)
    return {
        label: Label(places=tuple(found), sizes=tuple(sizes[label]))
        for label, found in places.items()
    }
