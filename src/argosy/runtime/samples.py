"""Where the samples of a captured value are, so that stages with different replicas can divide it.

A value of n samples has a dim of size outer * n * inner, its samples one after another in the middle. An input has
(1, n, 1) in its first dim; every result has what the values that it is made of have, and

    (1)  a reshape keeps the number of elements from one sample to the next in flat order, and with it finds the dim
    (2)  any other operation keeps outer and inner, and moves the dim at most

A value that depends on the batch and has no such dim mixes samples: a statistic over the batch, or the loss itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from argosy.runtime.calls import RESHAPES
from argosy.workload.capture.forward import COUNTS, Forward
from argosy.workload.graph import Node, Role


@dataclass(frozen=True)
class Place:
    """The dim of the samples, and what is outside and inside of them in it."""

    dim: int
    outer: int
    inner: int

    def to_front(self, tensor: Tensor) -> Tensor:
        """The samples as the first dim."""
        if self == FRONT:
            return tensor
        opened: Tensor = tensor.unflatten(self.dim, (self.outer, -1, self.inner))
        return opened.movedim(self.dim + 1, 0)

    def back(self, tensor: Tensor) -> Tensor:
        """Undo ``to_front``."""
        if self == FRONT:
            return tensor
        return tensor.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)


FRONT = Place(0, 1, 1)


def depending(forward: Forward) -> frozenset[int]:
    """Values that depend on the batch."""
    graph = forward.graph
    found = set(graph.with_role(Role.INPUT))
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(value for value in node.outputs if value is not None)
    return frozenset(found)


def places(forward: Forward) -> dict[int, Place]:
    """The samples of every value that has them in a known order."""
    graph = forward.graph
    found = dict.fromkeys(graph.with_role(Role.INPUT), FRONT)
    for node in graph.nodes:
        sources = [value for value in node.inputs if value in found]
        for value in node.outputs:
            if value is not None and sources:
                place = _place(forward, node, value, sources, found)
                if place is not None:
                    found[value] = place
    return found


def place_of_mask(forward: Forward, value: int, known: dict[int, Place]) -> Place | None:
    """A mask is made of nothing but its shape: its samples are where those of what it masks are."""
    shape, todo, seen = forward.graph.values[value].shape, [value], {value}
    while todo:
        for reader in forward.graph.consumers[todo.pop(0)]:
            made = [v for v in forward.graph.nodes[reader].outputs if v is not None and v not in seen]
            same = [v for v in made if forward.graph.values[v].shape == shape]
            found = next((known[v] for v in same if v in known), None)
            if found is not None:
                return found
            seen.update(same)
            todo += same
    return None


def _place(forward: Forward, node: Node, value: int, sources: list[int], known: dict[int, Place]) -> Place | None:
    slopes, shape = forward.slopes(value), forward.graph.values[value].shape
    growing = [dim for dim, slope in enumerate(slopes) if slope]
    if len(growing) != 1:
        return None
    dim, slope = growing[0], slopes[growing[0]]
    if shape[dim] != slope * COUNTS[0]:
        return None
    if slope == 1:
        return Place(dim, 1, 1)
    if node.op in RESHAPES:
        source = sources[0]
        before, place = forward.graph.values[source].shape, known[source]
        step, rest = divmod(place.inner * prod(before[place.dim + 1 :]), prod(shape[dim + 1 :]))
        return None if rest or slope % max(step, 1) else Place(dim, slope // step, step)
    same = [known[source] for source in sources if known[source].outer * known[source].inner == slope]
    return Place(dim, same[0].outer, same[0].inner) if same else None
