"""A row of the sharding rules, executed: shards in, the local operation, results joined, equal to
the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from argosy.runtime.communication.shards import join, take
from argosy.runtime.graphs.calls import filled
from argosy.runtime.graphs.local import LocalCall, MaskClock
from argosy.space.operations.sharding import State, local_shape
from argosy.workload.graph import Graph, GraphNode

RATIOS = ((0.7, 0.3), (0.5, 0.3, 0.2))
CPU = torch.device("cpu")


def parts_of(tensor: Tensor, state: State, ratios: tuple[float, ...]) -> list[Tensor]:
    """Shards; a partial sum is spread at random, so that a rule which forgets a term is found
    out."""
    if str(state) != "partial":
        return [take(tensor, state, ratios, rank) for rank in range(len(ratios))]
    spread = [torch.randn_like(tensor) for _ in ratios[1:]]
    return [tensor - sum(spread), *spread] if tensor.is_floating_point() else []


def local_calls(
    graph: Graph, node: GraphNode, row: Any, ratios: tuple[float, ...]
) -> list[LocalCall]:
    """One call per device."""
    return [
        LocalCall(graph=graph, node=node, row=row, ratios=ratios, rank=rank, clock=MaskClock())
        for rank in range(len(ratios))
    ]


def check_row(
    graph: Graph, node: GraphNode, row: Any, held: dict[int, Any], expected: list[Any], ratios: Any
) -> None:
    shards = [
        parts_of(held[v], state, ratios) for v, state in zip(node.inputs, row.inputs, strict=True)
    ]
    made = []
    for rank, call in enumerate(local_calls(graph, node, row, tuple(ratios))):
        given = iter(shard[rank] for shard in shards)
        arguments = [
            filled(part, lambda _, given=given: next(given), CPU) for part in call.arguments
        ]
        keywords = {
            key: filled(part, lambda _, given=given: next(given), CPU)
            for key, part in node.keywords
        }
        out = call.run(*arguments, **keywords)
        made.append(list(out) if isinstance(out, (tuple, list)) else [out])
    for place, value in enumerate(node.outputs):
        if value is None:
            continue
        for rank in range(len(ratios)):
            shape = local_shape(graph.values[value].shape, row.outputs[place], ratios, rank)
            assert made[rank][place].shape == shape, f"{node.op}: {row}"
        whole = join([out[place] for out in made], row.outputs[place], ratios)
        exact = all(graph.values[v].dtype != "float32" for v in (*node.inputs, value))
        size = 1.0 + max(
            float(part[place].double().nan_to_num(0, 0, 0).abs().max()) for part in made
        )
        slack = (1e-9 if exact else 2e-5) * size
        close = torch.allclose(
            whole.double(), expected[place].double(), rtol=1e-9, atol=slack, equal_nan=True
        )
        assert close, f"{node.op} by {row} on {[graph.values[v].shape for v in node.inputs]}"
