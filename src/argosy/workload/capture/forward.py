"""Capture the forward alone, for callers that differentiate it themselves, and for any number of
samples.

A capture holds sizes as numbers. ``capture_forward`` traces at three numbers of samples n and finds
how each number of the graph depends on n:

    (1)  a size or count     a + b n
    (2)  a factor            a, a n, a / n, or m / (m - 1) with m = a n (the correction of a
                             variance)

It fits them to two of the captures; the third must agree. What the user detached stays detached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from argosy.errors import InputError, invalid
from argosy.workload.capture.initial import FakeModel, Recording
from argosy.workload.capture.modules import OpaqueModules
from argosy.workload.capture.trace import trace
from argosy.workload.graph import Argument, Graph, GraphNode

# Numbers of samples that are traced. None is 1, which would make different sizes look equal.
COUNTS = (2, 3, 5)


@dataclass(frozen=True)
class Forward:
    """A captured forward that can be resized to any number of samples."""

    graph: Graph
    """The graph at ``COUNTS[0]`` samples."""
    others: tuple[Graph, ...]
    """The graphs at the other counts."""
    _resized: dict[tuple[int, int, int], tuple[GraphNode, ...]] = field(
        default_factory=dict, compare=False
    )

    def nodes(self, samples: int, total: int | None = None) -> tuple[GraphNode, ...]:
        """Return the operations for ``samples`` of a batch of ``total``: sizes follow the former,
        factors the latter."""
        return self._sized(-1, samples, total or samples)

    def own_gradient(self, number: int, samples: int, total: int) -> tuple[GraphNode, ...]:
        """Return the operations of an ``OwnGradient``."""
        return self._sized(number, samples, total)

    def _sized(self, number: int, samples: int, total: int) -> tuple[GraphNode, ...]:
        key = (number, samples, total)
        if key not in self._resized:
            graphs = (self.graph, *self.others)
            columns = (
                graph.nodes if number < 0 else graph.own_gradients[number].nodes for graph in graphs
            )
            rows = zip(*columns, strict=True)
            self._resized[key] = tuple(_resized_node(row, samples, total) for row in rows)
        return self._resized[key]

    def shape(self, value: int, samples: int) -> tuple[int, ...]:
        shapes = zip(
            *(graph.values[value].shape for graph in (self.graph, *self.others)), strict=True
        )
        return tuple(_size(sizes, samples, self.graph.values[value].name) for sizes in shapes)

    def slopes(self, value: int) -> tuple[int, ...]:
        """Return, per dim, by how much it grows with each sample."""
        fewer, more = self.graph.values[value].shape, self.others[0].values[value].shape
        return tuple((b - a) // (COUNTS[1] - COUNTS[0]) for a, b in zip(fewer, more, strict=True))


def capture_forward(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Any,
    *,
    device: torch.device,
    autocast: torch.dtype | None = None,
    recording: Recording | None = None,
    name: str = "program",
    opaque: OpaqueModules | None = None,
) -> Forward:
    """Return the forward of ``loss(model, batch)``; the model may be on any device.

    The trace is that of a CPU, so that a plan and its run have the same operations. Only
    ``autocast`` needs the device that will run it: torch casts for other operations on a CPU.
    """
    device = device if autocast is not None else torch.device("cpu")
    fake = FakeModel(
        model=model,
        loss=loss,
        batch=batch,
        recording=recording or Recording(),
        opaque=opaque or OpaqueModules(),
    )

    def traced(count: int) -> Graph:
        written = trace(
            fake, name=name, forward_only=True, samples=count, device=device, autocast=autocast
        )
        return _alive(written.graph())

    first, *others = map(traced, COUNTS)
    for graph in others:
        if [node.op for node in graph.nodes] != [node.op for node in first.nodes]:
            actual = f"{len(first.nodes)} operations with {COUNTS[0]} samples, other ones with more"
            raise invalid(name, actual, "a step that does the same for any batch")
    forward = Forward(first, tuple(others))
    forward.nodes(1)
    return forward


def _alive(graph: Graph) -> Graph:
    """Return the graph without nodes that neither the loss nor a buffer needs, such as copies that
    only a backward would read."""
    wanted = {graph.loss, *(after for _, after in graph.updates)}
    kept = []
    for node in reversed(graph.nodes):
        if any(value in wanted for value in node.outputs if value is not None):
            kept.append(node)
            wanted.update(node.inputs)
    return replace(graph, nodes=tuple(reversed(kept)))


def _resized_node(row: Sequence[GraphNode], samples: int, total: int) -> GraphNode:
    where = f"{row[0].name} ({row[0].op}{', ' + row[0].source if row[0].source else ''})"
    numbers = _numbers(row[0].op)
    arguments = [
        _fitted(parts, total if place in numbers else samples, total, where)
        for place, parts in enumerate(zip(*(node.arguments for node in row), strict=True))
    ]
    keywords = [
        (key, _fitted(parts, total if key in numbers else samples, total, where))
        for (key, _), *parts in zip(
            row[0].keywords, *((v for _, v in node.keywords) for node in row), strict=True
        )
    ]
    return replace(row[0], arguments=tuple(arguments), keywords=tuple(keywords))


@cache
def _numbers(op: str) -> frozenset[int | str]:
    """Return the arguments of an operation, by place and name, that are numbers to compute with and
    no sizes; those of ``arange`` decide the size of its result."""
    namespace, name, overload = op.split(".")
    if name == "arange":
        return frozenset()
    schema = getattr(getattr(getattr(torch.ops, namespace), name), overload)._schema
    kinds = [str(argument.type).removeprefix("Optional[") for argument in schema.arguments]
    places = [place for place, kind in enumerate(kinds) if kind.startswith(("Tensor", "number"))]
    return frozenset([*places, *(schema.arguments[place].name for place in places)])


def _fitted(parts: Sequence[Argument], samples: int, total: int, where: str) -> Argument:
    """Return one argument for ``samples``, by (1) and (2) from the three captures."""
    first = parts[0]
    if isinstance(first, tuple):
        columns = zip(*parts, strict=True)
        return tuple(_fitted(column, samples, total, where) for column in columns)
    if all(part == first for part in parts):
        return first
    if all(type(part) is int for part in parts):
        return _size(parts, samples, where)  # type: ignore[arg-type]
    if all(type(part) is float for part in parts):
        return _factor(parts, total, where)  # type: ignore[arg-type]
    raise _unknown(parts, where)


def _size(sizes: Sequence[int], samples: int, where: str) -> int:
    """Return a size (1)."""
    slope, rest = divmod(sizes[1] - sizes[0], COUNTS[1] - COUNTS[0])
    constant = sizes[0] - slope * COUNTS[0]
    if rest or any(constant + slope * n != size for n, size in zip(COUNTS, sizes, strict=True)):
        raise _unknown(sizes, where)
    return constant + slope * samples


def _factor(values: Sequence[float], samples: int, where: str) -> float:
    """Return a factor (2)."""
    for power in (1, -1):
        unit = [value / n**power for n, value in zip(COUNTS, values, strict=True)]
        if max(unit) - min(unit) <= 1e-12 * abs(unit[0]):
            return unit[0] * samples**power
    if all(value > 1 for value in values):
        counts = [value / (value - 1) / n for n, value in zip(COUNTS, values, strict=True)]
        if max(counts) - min(counts) <= 1e-6 * counts[0]:
            count = round(counts[0]) * samples
            return count / (count - 1) if count > 1 else math.inf
    raise _unknown(values, where)


def _unknown(values: Sequence[Any], where: str) -> InputError:
    actual = f"{', '.join(map(str, values))} with {', '.join(map(str, COUNTS))} samples"
    return invalid(where, actual, "numbers in proportion to the samples, or constant")
