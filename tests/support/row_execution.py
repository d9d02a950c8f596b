"""A row of the sharding rules, executed: shards in, the local operation, results joined, equal to
the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from argosy.runtime.communication.shards import take
from argosy.runtime.graphs.calls import RANDOM, drawn, filled, function
from argosy.runtime.graphs.local import LocalCall
from argosy.space.operations.families import BY_CLASSES, BY_ROWS
from argosy.space.operations.sharding import PARTIAL, State, local_shape, unit_counts
from argosy.workload.graph import Argument, Graph, GraphNode

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
        LocalCall(graph=graph, node=node, row=row, ratios=ratios, rank=rank)
        for rank in range(len(ratios))
    ]


def join(parts: Sequence[Tensor], state: State, ratios: Sequence[float]) -> Tensor:
    """Return the whole tensor from every device's part."""
    if state == PARTIAL:
        return torch.stack(list(parts)).sum(0)
    if not state.is_sharded:
        return parts[0]
    counts = unit_counts(state.units, ratios)
    opened = [
        part.unflatten(state.dim, (state.outer, count, -1))
        for part, count in zip(parts, counts, strict=True)
    ]
    return torch.cat(opened, state.dim + 1).flatten(state.dim, state.dim + 2)


def local_arguments(call: LocalCall) -> tuple[Argument, ...]:
    """Return the arguments of a call; operations of a backward, which torch derives in a run, name
    sizes too."""
    node, found = call.node, list(call.arguments)
    if node.op == "aten.native_group_norm_backward.default" and call.row.units:
        found[5] = call.input_shape(0, node.inputs[0])[0]
    elif node.op == "aten.convolution_backward.default" and node.arguments[3] is not None:
        found[3] = (call.input_shape(2, node.inputs[2])[1 if node.arguments[7] else 0],)
    return tuple(found)


def local_result(call: LocalCall, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Return what one device makes of its shards."""
    node, row = call.node, call.row
    if row.local == BY_ROWS:
        return BY_OWN_ROWS[node.op](*own_rows(call), *arguments)
    if node.op in RANDOM:
        shape = call.graph.values[node.outputs[0]].shape
        every = torch.arange(torch.Size(shape).numel()).view(*shape)
        places = take(every, row.outputs[0], call.ratios, call.rank)
        return drawn(node.op, arguments, places, seed=0, step=0)
    return function(node.op)(*arguments, **keywords)


def own_rows(call: LocalCall) -> tuple[int, int]:
    """Return the first row or class of one device, and how many it has."""
    ends = zip(
        (*call.node.inputs, *call.node.outputs), (*call.row.inputs, *call.row.outputs), strict=True
    )
    value, state = next((value, state) for value, state in ends if state.is_sharded)
    each = call.graph.values[value].shape[state.dim] // state.units
    counts = unit_counts(state.units, call.ratios)
    return each * sum(counts[: call.rank]), each * counts[call.rank]


def lookup(first: int, count: int, weight: Tensor, ids: Tensor, *_: Any) -> Tensor:
    own = (ids >= first) & (ids < first + count)
    found = torch.nn.functional.embedding((ids - first).clamp(0, count - 1), weight)
    return found * own.unsqueeze(-1)


def lookup_backward(
    first: int, count: int, grad: Tensor, ids: Tensor, _: int, padding: int, by_frequency: bool
) -> Tensor:
    own = (ids >= first) & (ids < first + count) & (ids != padding)
    wanted = (ids - first).clamp(0, count - 1)
    return torch.ops.aten.embedding_dense_backward.default(
        grad * own.unsqueeze(-1), wanted, count, -1, by_frequency
    )


def own_targets(first: int, count: int, target: Tensor, ignored: int) -> Tensor:
    """Return the targets of one device by its own numbers, and -100 for the others."""
    own = (target >= first) & (target < first + count) & (target != ignored)
    return torch.where(own, target - first, -100)


def own_weights(first: int, count: int, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight[first : first + count]


def losses(
    first: int, count: int, x: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """Return the losses of one device's targets, and the weight of all targets."""
    function = torch.ops.aten.nll_loss_forward if x.dim() < 4 else torch.ops.aten.nll_loss2d_forward
    own = own_targets(first, count, target, ignored)
    found, _ = function(x, own, own_weights(first, count, weight), reduction, -100)
    every = torch.zeros_like(x[:, :1]).expand(-1, int(target.max()) + 1, *x.shape[2:])
    _, total = function(
        every, target, None if weight is None else weight[: every.shape[1]], reduction, ignored
    )
    return found, total


def losses_backward(
    first: int, count: int, grad: Tensor, x: Tensor, target: Tensor, weight: Any, reduction: int,
    ignored: int, total: Tensor,
) -> Tensor:  # fmt: skip
    function = (
        torch.ops.aten.nll_loss_backward if x.dim() < 4 else torch.ops.aten.nll_loss2d_backward
    )
    own = own_targets(first, count, target, ignored)
    return function(grad, x, own, own_weights(first, count, weight), reduction, -100, total)


BY_OWN_ROWS = {
    "aten.embedding.default": lookup,
    "aten.embedding_dense_backward.default": lookup_backward,
    "aten.nll_loss_forward.default": losses,
    "aten.nll_loss2d_forward.default": losses,
    "aten.nll_loss_backward.default": losses_backward,
    "aten.nll_loss2d_backward.default": losses_backward,
}


def by_classes(parts: Sequence[Sequence[Any]], op: str) -> list[Tensor]:
    """Return the results of all devices for an operation over classes that they share: the
    normaliser of all classes, or the sum of all their gradients."""
    if op == "aten._log_softmax.default":
        sums = torch.stack([torch.logsumexp(x, dim) for x, dim, _ in parts])
        return [x - torch.logsumexp(sums, 0).unsqueeze(dim) for x, dim, _ in parts]
    total = sum(gradient.sum(dim, keepdim=True) for gradient, _, dim, _ in parts)
    return [gradient - result.exp() * total for gradient, result, _, _ in parts]


def check_row(
    graph: Graph, node: GraphNode, row: Any, held: dict[int, Any], expected: list[Any], ratios: Any
) -> None:
    shards = [
        parts_of(held[v], state, ratios) for v, state in zip(node.inputs, row.inputs, strict=True)
    ]
    made, called = [], []
    for rank, call in enumerate(local_calls(graph, node, row, tuple(ratios))):
        given = iter(shard[rank] for shard in shards)
        arguments = [
            filled(part, lambda _, given=given: next(given), CPU) for part in local_arguments(call)
        ]
        keywords = {
            key: filled(part, lambda _, given=given: next(given), CPU)
            for key, part in node.keywords
        }
        if row.local == BY_CLASSES:
            called.append(arguments)
            continue
        out = local_result(call, arguments, keywords)
        made.append(list(out) if isinstance(out, (tuple, list)) else [out])
    made += [[out] for out in by_classes(called, node.op)] if called else []
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
