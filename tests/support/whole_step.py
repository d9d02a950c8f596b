"""A captured step in one process, operation by operation: a reference for all that shares it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from argosy.runtime.graphs.calls import run_node, tensor_constants
from argosy.workload.graph import Graph, Role


def run_whole(
    graph: Graph, tensors: dict[int, Tensor], *, seed: int = 0, step: int = 0
) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
    """Return loss, gradients by parameter and changed buffers by buffer.

    ``tensors`` holds parameters, buffers and inputs by value.
    """
    device = next(iter(tensors.values())).device
    held: dict[int, Any] = {**tensors, **tensor_constants(graph, device)}
    with torch.no_grad():
        for node in graph.nodes:
            run_node(node, held, device, seed=seed, step=step)
    assert graph.loss is not None
    gradients = {parameter: held[value] for parameter, value in graph.gradients}
    return held[graph.loss], gradients, {buffer: held[value] for buffer, value in graph.updates}


def whole_tensors(graph: Graph, named: dict[str, Tensor]) -> dict[int, Tensor]:
    """Return parameters, buffers and inputs by value, from tensors by name."""
    given = (Role.PARAMETER, Role.BUFFER, Role.INPUT)
    return {
        index: named[value.name] for index, value in enumerate(graph.values) if value.role in given
    }
