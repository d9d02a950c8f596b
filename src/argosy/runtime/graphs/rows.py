"""Recognise the number of each sample, where a program uses it to read the sample's own row.

``hidden[torch.arange(n), last]`` reads row i for sample i. On a part of k samples it becomes
``hidden[torch.arange(k), last]``, so it keeps samples apart, although indices in general do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from argosy.runtime.graphs.calls import RESHAPES
from argosy.space.operations.families import Pattern
from argosy.workload.graph import Graph, GraphNode, Ref

if TYPE_CHECKING:
    from argosy.runtime.graphs.samples import SampleDim

INDEX = "aten.index.Tensor"
_COPIES = RESHAPES | {
    f"aten.{name}.default"
    for name in ("unsqueeze", "squeeze", "expand", "detach", "clone", "alias", "_to_copy")
}
"""Operations whose results have the elements of their first operand, in the same order."""


def row_numbers(graph: Graph, count: int) -> frozenset[int]:
    """Return the values that are 0, 1, ... up to ``count`` and that only index dims of this size,
    with their reshaped copies."""
    numbers: set[int] = set()
    for node in graph.nodes:
        if node.op.startswith("aten.arange.") and _counts_from_zero(node):
            (value,) = node.outputs
            if value is not None and graph.values[value].shape == (count,):
                numbers |= _copies_that_index(graph, value, count)
    return frozenset(numbers)


def by_own_row(
    node: GraphNode, pattern: Pattern, numbers: frozenset[int], places: Mapping[int, SampleDim]
) -> Pattern:
    """Return the pattern of an index operation in which a dim of samples that row numbers index
    has the same label as these."""
    source, indices = node.inputs[0], node.arguments[1]
    assert isinstance(indices, tuple)
    at = [(dim, index.value) for dim, index in enumerate(indices) if isinstance(index, Ref)]
    labels, place = list(pattern.inputs[0]), places.get(source)
    for (dim, value), own in zip(at, pattern.inputs[1:], strict=True):
        is_row = place is not None and place.is_alone and place.dim == dim
        if is_row and value in numbers and value in places:
            labels[dim] = own[places[value].dim]
    return replace(pattern, inputs=(tuple(labels), *pattern.inputs[1:]))


def _counts_from_zero(node: GraphNode) -> bool:
    """Return whether ``aten.arange`` starts at 0 and adds 1."""
    overload = node.op.rpartition(".")[2]
    start = 0 if overload == "default" else node.arguments[0]
    step = node.arguments[2] if overload == "start_step" and len(node.arguments) > 2 else 1
    return start == 0 and step == 1


def _copies_that_index(graph: Graph, value: int, count: int) -> set[int]:
    """Return a value and its copies if nothing but indices of dims of size ``count`` reads them,
    else nothing."""
    copies, todo = {value}, [value]
    while todo:
        copy = todo.pop()
        for reader in graph.consumers[copy]:
            node = graph.nodes[reader]
            if node.op in _COPIES and node.outputs[0] is not None:
                copies.add(node.outputs[0])
                todo.append(node.outputs[0])
            elif not _indexes_rows(graph, node, copy, count):
                return set()
    return copies


def _indexes_rows(graph: Graph, node: GraphNode, value: int, count: int) -> bool:
    """Return whether an operation reads a value only as the index of a dim of size ``count``."""
    if node.op != INDEX or node.inputs[0] == value:
        return False
    shape, indices = graph.values[node.inputs[0]].shape, node.arguments[1]
    assert isinstance(indices, tuple)
    return all(
        shape[dim] == count
        for dim, index in enumerate(indices)
        if isinstance(index, Ref) and index.value == value
    )
