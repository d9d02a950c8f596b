"""Run one operation on one device's shards, by a row of the sharding rules.

Usually the operation itself is called; only arguments that contain a size change, to the size of
the shard. No device looks up all rows of a table that is cut by rows: ids of other devices' rows
give zeros, and the partial sums add up to the rows that were looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from argosy.runtime.communication.shards import positions
from argosy.runtime.graphs.calls import RANDOM, drawn, function
from argosy.space.operations.calls import table
from argosy.space.operations.rules import BY_ROWS, ShardingRule
from argosy.space.operations.sharding import local_shape, unit_counts
from argosy.workload.graph import Argument, Graph, GraphNode

SPLITS = {"aten.split.Tensor", "aten.split_with_sizes.default"}
"""Operations whose sizes change if their dim is cut."""
GROUP_NORMS = {"aten.native_group_norm.default": 3, "aten.native_group_norm_backward.default": 5}
"""The index of the argument that holds the number of samples, by operation."""


@dataclass
class MaskClock:
    """The seed and step that random masks depend on, besides their position; changed between
    steps."""

    seed: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class LocalCall:
    """A call that computes one node on one device by one row of the sharding rules."""

    graph: Graph
    node: GraphNode
    row: ShardingRule
    ratios: tuple[float, ...]
    rank: int
    clock: MaskClock

    def shape(self, output: int) -> tuple[int, ...]:
        value = self.node.outputs[output]
        assert value is not None
        return local_shape(
            self.graph.values[value].shape, self.row.outputs[output], self.ratios, self.rank
        )

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """Return the node's arguments with the sizes of the shard."""
        node, arguments = self.node, list(self.node.arguments)
        sizes = table().get(node.op, {}).get("sizes")
        if sizes is not None:
            arguments[sizes] = self.shape(0)
        elif node.op in SPLITS:
            dim = node.arguments[2] if len(node.arguments) > 2 else 0
            assert isinstance(dim, int)
            made = next(place for place, value in enumerate(node.outputs) if value is not None)
            if self.row.outputs[made].is_sharded and self.row.outputs[made].dim == dim % len(
                self.shape(made)
            ):
                length = self.shape(made)[dim]
                arguments[1] = (
                    length if node.op == "aten.split.Tensor" else (length,) * len(node.outputs)
                )
        elif node.op in GROUP_NORMS and self.row.units:
            value = node.inputs[0]
            arguments[GROUP_NORMS[node.op]] = self.input_shape(0, value)[0]
        elif node.op == "aten.convolution_backward.default" and node.arguments[3] is not None:
            transposed = bool(node.arguments[7])
            arguments[3] = (self.input_shape(2, node.inputs[2])[1 if transposed else 0],)
        return tuple(arguments)

    def input_shape(self, place: int, value: int) -> tuple[int, ...]:
        return local_shape(
            self.graph.values[value].shape, self.row.inputs[place], self.ratios, self.rank
        )

    @cached_property
    def run(self) -> Callable[..., Any]:
        """Return the function to call with ``arguments`` and the node's keywords."""
        if self.row.local == BY_ROWS:
            return (
                self._lookup if self.node.op == "aten.embedding.default" else self._lookup_backward
            )
        if self.node.op in RANDOM:
            return self._drawn
        return function(self.node.op)

    @cached_property
    def rows(self) -> tuple[int, int]:
        """Return the first row and the number of rows that this device holds."""
        state = (
            self.row.inputs[0] if self.node.op == "aten.embedding.default" else self.row.outputs[0]
        )
        counts = unit_counts(state.units, self.ratios)
        return sum(counts[: self.rank]), counts[self.rank]

    def _lookup(self, weight: Tensor, ids: Tensor, *_: Any) -> Tensor:
        first, count = self.rows
        own = (ids >= first) & (ids < first + count)
        rows = torch.nn.functional.embedding((ids - first).clamp(0, count - 1), weight)
        return rows * own.unsqueeze(-1)

    def _lookup_backward(
        self, grad: Tensor, ids: Tensor, _: int, padding: int, by_frequency: bool
    ) -> Tensor:
        first, count = self.rows
        own = (ids >= first) & (ids < first + count) & (ids != padding)
        wanted = (ids - first).clamp(0, count - 1)
        return torch.ops.aten.embedding_dense_backward.default(  # type: ignore[no-any-return]
            grad * own.unsqueeze(-1), wanted, count, -1, by_frequency
        )

    def _drawn(self, like: Tensor, *others: Any) -> Tensor:
        places = self._places.to(like.device)
        return drawn(
            self.node.op, (like, *others), places, seed=self.clock.seed, step=self.clock.step
        )

    @cached_property
    def _places(self) -> Tensor:
        value = self.node.outputs[0]
        assert value is not None
        return positions(
            self.graph.values[value].shape, self.row.outputs[0], self.ratios, self.rank
        )
