"""Run one operation on one device's shards, by a row of the sharding rules.

It is the operation itself; what changes is an argument that spells out a size, which must be the
shard's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from argosy.runtime.graphs.classes import HeldRows
from argosy.space.operations.calls import table
from argosy.space.operations.rules import ShardingRule
from argosy.space.operations.sharding import local_shape, unit_counts
from argosy.workload.graph import Argument, Graph, GraphNode

SPLITS = {"aten.split.Tensor", "aten.split_with_sizes.default"}
GROUP_NORM, GROUP_NORM_SAMPLES = "aten.native_group_norm.default", 3
"""The operation, and which of its arguments holds the number of samples."""


@dataclass(frozen=True, kw_only=True)
class LocalCall:
    """A call that computes one node on one device by one row of the sharding rules."""

    graph: Graph
    node: GraphNode
    row: ShardingRule
    ratios: tuple[float, ...]
    rank: int

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
        elif node.op == GROUP_NORM and self.row.units:
            arguments[GROUP_NORM_SAMPLES] = self.input_shape(0, node.inputs[0])[0]
        return tuple(arguments)

    def input_shape(self, place: int, value: int) -> tuple[int, ...]:
        return local_shape(
            self.graph.values[value].shape, self.row.inputs[place], self.ratios, self.rank
        )

    @cached_property
    def rows(self) -> HeldRows:
        """Return the rows or classes of the first input that this device holds."""
        state = self.row.inputs[0]
        counts = unit_counts(state.units, self.ratios)
        total = self.graph.values[self.node.inputs[0]].shape[state.dim]
        per_unit = total // state.units
        return HeldRows(per_unit * sum(counts[: self.rank]), per_unit * counts[self.rank], total)
