"""The forward alone, for whoever differentiates it himself, and for any number of samples.

A capture holds sizes as numbers. ``capture_forward`` traces at three numbers of samples n and finds how each number of
the graph depends on n:

    (1)  a size or count     a + b n
    (2)  a factor            a, a n, a / n, or m / (m - 1) with m = a n (what a variance is corrected by)

from two of the captures; the third must agree. What the user detached stays detached.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map

from argosy.errors import InputError, Problem
from argosy.workload.capture.blame import blamed
from argosy.workload.capture.initial import FakeModel, Recording
from argosy.workload.capture.trace import (
    ALONE,
    RUNS,
    GraphWriter,
    ModuleStack,
    StepRoot,
    trace_step,
    tracing_flags,
)
from argosy.workload.graph import Argument, Graph, Node, Role

COUNTS = (2, 3, 5)
"""Numbers of samples that are traced. None is 1, which would make sizes look alike that are not."""


@dataclass(frozen=True)
class Forward:
    """A captured forward; numbers that depend on the samples are known for every number of them."""

    graph: Graph
    """At ``COUNTS[0]`` samples."""
    others: tuple[Graph, ...]
    """At the other counts."""
    _resized: dict[int, tuple[Node, ...]] = field(default_factory=dict, compare=False)

    def nodes(self, samples: int) -> tuple[Node, ...]:
        """The operations for so many samples."""
        if samples not in self._resized:
            graphs = (self.graph, *self.others)
            rows = zip(*(graph.nodes for graph in graphs), strict=True)
            self._resized[samples] = tuple(_resized_node(row, samples) for row in rows)
        return self._resized[samples]

    def shape(self, value: int, samples: int) -> tuple[int, ...]:
        shapes = zip(*(graph.values[value].shape for graph in (self.graph, *self.others)), strict=True)
        return tuple(_size(sizes, samples, self.graph.values[value].name) for sizes in shapes)

    def slopes(self, value: int) -> tuple[int, ...]:
        """Per dim, by how much it grows with each sample."""
        one, other = self.graph.values[value].shape, self.others[0].values[value].shape
        return tuple((b - a) // (COUNTS[1] - COUNTS[0]) for a, b in zip(one, other, strict=True))


def capture_forward(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Any,
    *,
    device: torch.device,
    autocast: torch.dtype | None = None,
    name: str = "program",
) -> Forward:
    """The forward of ``loss(model, batch)``, whatever device the model is on."""
    first, *others = (_traced(model, loss, batch, count, device, autocast, name) for count in COUNTS)
    for other in others:
        if [node.op for node in other.nodes] != [node.op for node in first.nodes]:
            found = f"{len(first.nodes)} operations with {COUNTS[0]} samples, other ones with more"
            raise InputError([Problem(path=name, found=found, expected="a step that does the same for any batch")])
    forward = Forward(first, tuple(others))
    forward.nodes(1)
    return forward


def _traced(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Any,
    samples: int,
    device: torch.device,
    autocast: torch.dtype | None,
    name: str,
) -> Graph:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def sized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty((samples, *leaf.shape[1:]), dtype=leaf.dtype, device=device)

    def fake(pairs: Any) -> list[tuple[str, Tensor]]:
        return [(name, torch.empty(t.shape, dtype=t.dtype, device=device)) for name, t in pairs]

    with mode:
        batch = tree_map(sized, batch)
        weights, buffers = fake(model.named_parameters()), fake(model.named_buffers())
    trained = {name: weight.requires_grad for name, weight in model.named_parameters()}
    leaves, spec = tree_flatten(batch)
    tensors = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(batch)[0] if isinstance(leaf, Tensor)]
    whole = FakeModel(model=model, loss=loss, batch=batch, mode=mode, recording=Recording())
    root = StepRoot(whole, leaves, spec)

    def step(given: list[Tensor], state: list[Tensor], rows: list[Tensor]) -> Any:
        own = [w.detach().requires_grad_(trained[n]) for w, (n, _) in zip(given, weights, strict=True)]
        held = [value.clone() for value in state]
        names = [name for name, _ in (*weights, *buffers)]
        named = {f"model.{n}": value for n, value in zip(names, [*own, *held], strict=True)}
        with _precision(device, autocast):
            result = torch.func.functional_call(root, named, tuple(rows))
        return result, [None] * len(own), held

    modules = ModuleStack(model)
    with tracing_flags(), modules, blamed(name, expected=RUNS, suggestion=ALONE):
        fx = trace_step(whole, step, [t for _, t in weights], [t for _, t in buffers], [t for _, t in tensors])
    roles = [(n, Role.PARAMETER) for n, _ in weights] + [(n, Role.BUFFER) for n, _ in buffers]
    roles += [(n, Role.INPUT) for n, _ in tensors]
    graph = GraphWriter(name, fx, roles, len(weights), len(buffers), modules.of, detaches=True).graph()
    return _alive(graph)


def _precision(device: torch.device, autocast: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    if autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, autocast, cache_enabled=False)


def _alive(graph: Graph) -> Graph:
    """Without what neither the loss nor a buffer needs, such as copies that only a backward would read."""
    wanted = {graph.loss, *(after for _, after in graph.updates)}
    kept = []
    for node in reversed(graph.nodes):
        if any(value in wanted for value in node.outputs if value is not None):
            kept.append(node)
            wanted.update(node.inputs)
    return replace(graph, nodes=tuple(reversed(kept)))


def _resized_node(row: Sequence[Node], samples: int) -> Node:
    where = f"{row[0].name} ({row[0].op}{', ' + row[0].source if row[0].source else ''})"
    arguments = _fitted([node.arguments for node in row], samples, where)
    keywords = tuple(
        (key, _fitted([dict(node.keywords)[key] for node in row], samples, where)) for key, _ in row[0].keywords
    )
    assert isinstance(arguments, tuple)
    return replace(row[0], arguments=arguments, keywords=keywords)


def _fitted(parts: Sequence[Argument], samples: int, where: str) -> Argument:
    """(1), (2) on one argument as it is in the three captures."""
    first = parts[0]
    if isinstance(first, tuple):
        columns = zip(*parts, strict=True)
        return tuple(_fitted(column, samples, where) for column in columns)
    if all(part == first for part in parts):
        return first
    if all(type(part) is int for part in parts):
        return _size(parts, samples, where)  # type: ignore[arg-type]
    if all(type(part) is float for part in parts):
        return _factor(parts, samples, where)  # type: ignore[arg-type]
    raise _unknown(parts, where)


def _size(sizes: Sequence[int], samples: int, where: str) -> int:
    """(1)."""
    slope, rest = divmod(sizes[1] - sizes[0], COUNTS[1] - COUNTS[0])
    constant = sizes[0] - slope * COUNTS[0]
    if rest or any(constant + slope * n != size for n, size in zip(COUNTS, sizes, strict=True)):
        raise _unknown(sizes, where)
    return constant + slope * samples


def _factor(values: Sequence[float], samples: int, where: str) -> float:
    """(2)."""
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
    found = f"{', '.join(map(str, values))} with {', '.join(map(str, COUNTS))} samples"
    return InputError([Problem(path=where, found=found, expected="numbers in proportion to the samples, or constant")])
