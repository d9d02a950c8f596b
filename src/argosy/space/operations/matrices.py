"""Which weights are worth cutting: matrices, kernels and tables, not what is added to or scales a
tensor."""

from __future__ import annotations

from argosy.workload.graph import Graph, Role

MULTIPLIED = frozenset(
    f"aten.{name}.default"
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "convolution", "embedding")
)
"""What they are for."""


def is_matrix(graph: Graph, value: int) -> bool:
    """Whether a value is a parameter that something is multiplied with or looked up in, as it is or
    turned around."""
    described = graph.values[value]
    if described.role is not Role.PARAMETER or len(described.shape) < 2:
        return False
    todo = [value]
    while todo:
        for index in graph.consumers[todo.pop()]:
            node = graph.nodes[index]
            if node.op in MULTIPLIED:
                return True
            if len(node.inputs) == 1:
                todo += [made for made in node.outputs if made is not None]
    return False
