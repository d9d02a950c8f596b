"""Describe the operations of a graph for the sharding rules: calls with shapes, patterns from the
table, and the tensors that have each index.

Nodes that run one operation with the same constants on tensors of the same shapes and dtypes share
all of these.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from argosy.space.operations.families import FAMILIES, OperationCall, Pattern, parsed, whole
from argosy.workload.graph import Argument, Graph, GraphNode, OwnGradient, Ref


@cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """Return the entries of the data file, one per operation."""
    text = files("argosy.data").joinpath("sharding.toml").read_text(encoding="utf-8")
    return {op: entry for section in tomllib.loads(text).values() for op, entry in section.items()}


def is_known(op: str) -> bool:
    return op in table()


def call_of(graph: Graph, node: GraphNode) -> OperationCall:
    """Return a node with its shapes; an output without readers gets the shape of the first output
    that has one."""
    shapes = [None if value is None else graph.values[value].shape for value in node.outputs]
    used_shape = next(shape for shape in shapes if shape is not None)
    return OperationCall(
        node=node,
        inputs=tuple(graph.values[value].shape for value in node.inputs),
        outputs=tuple(used_shape if shape is None else shape for shape in shapes),
        entry=table().get(node.op, {}),
    )


def _linear(entry: Mapping[str, Any], count: int) -> tuple[frozenset[int], ...]:
    """Return the sets of an operation's inputs in which it is linear."""
    linear = entry.get("linear", ())
    sets = [range(count)] if linear == "all" else [s for s in linear if max(s) < count]
    return tuple(frozenset(s) for s in sets)


def is_linear(own: OwnGradient) -> bool:
    """Return whether a program's own backward is known to be linear in the gradients it is given,
    so that it can be applied to partial sums of them."""
    dependent = set(own.given)
    for node in own.nodes:
        places = frozenset(at for at, value in enumerate(node.inputs) if value in dependent)
        if not places:
            continue
        if places not in _linear(table().get(node.op, {}), len(node.inputs)):
            return False
        dependent.update(value for value in node.outputs if value is not None)
    return dependent.issuperset(own.gradients)


def pattern_of(call: OperationCall) -> Pattern:
    """Return the labels of an operation; a reshape gets none, because ``from_flat_cut`` maps it."""
    entry = call.entry
    if not entry or entry.get("family") == "view":
        pattern = whole(call)
    elif "labels" in entry:
        pattern = parsed(entry["labels"])
    else:
        pattern = FAMILIES[entry["family"]](call)
    inexact = any(e.startswith("c:") for e in entry.get("whole", ()))
    return replace(
        pattern,
        linear=_linear(entry, len(call.inputs)),
        additive=frozenset(entry.get("additive", ())),
        whole=frozenset((e.split(":")[0], int(e.split(":")[1])) for e in entry["whole"])
        if inexact
        else frozenset(),
    )


@dataclass(frozen=True, kw_only=True)
class Label:
    """An index that tensors of an operation may share."""

    places: tuple[tuple[int, int, int], ...]
    """(end, dim, factor) of every tensor, inputs first, that has the index; results without readers
    are omitted."""
    sizes: tuple[int, ...]


def shared_calls(
    graph: Graph, all_ends: Sequence[tuple[int | None, ...]], fold: bool
) -> tuple[list[OperationCall], list[Pattern], list[dict[str, Label]]]:
    """Return the call, pattern and labels of each node; nodes that do the same to equal tensors
    share them."""
    known: dict[object, tuple[OperationCall, Pattern, dict[str, Label]]] = {}
    numbers: dict[object, int] = {}
    looks = [numbers.setdefault((value.shape, value.dtype), len(numbers)) for value in graph.values]
    described = []
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
        described.append(known[key])
    return (
        [call for call, _, _ in described],
        [pattern for _, pattern, _ in described],
        [labels for _, _, labels in described],
    )


def same_ends(ends: tuple[int | None, ...]) -> tuple[int, ...] | None:
    """Return which of a node's ends are one value, or None if all differ."""
    return tuple([ends.index(value) for value in ends]) if len(set(ends)) < len(ends) else None


def _without_values(argument: Argument) -> object:
    """Return an argument without the values that it names."""
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
    """Return for each label the tensors and dims that have it."""
    places: dict[str, list[tuple[int, int, int]]] = {}
    sizes: dict[str, set[int]] = {}
    stretched = pattern.stretched or {}
    ends = zip(
        all_ends, (*call.inputs, *call.outputs), (*pattern.inputs, *pattern.outputs), strict=True
    )
    for end, (value, shape, labels) in enumerate(ends):
        for dim, label in enumerate(labels):
            if label and value is not None:
                factor = stretched.get((end, label), 1)
                places.setdefault(label, []).append((end, dim, factor))
                sizes.setdefault(label, set()).add(shape[dim] // factor)
    return {
        label: Label(places=tuple(label_places), sizes=tuple(sizes[label]))
        for label, label_places in places.items()
    }
