"""Find the weights that are worth cutting: matrices, kernels and tables, but not vectors that are
added to a tensor or scale it."""

from __future__ import annotations

from argosy.workload.graph import Graph, Role

MULTIPLIED = frozenset(
    f"aten.{name}.default"
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "convolution", "embedding")
)
"""Operations that multiply with a weight or look rows up in it."""


def is_matrix(graph: Graph, value: int) -> bool:
    """Return whether a value is a parameter that an operation multiplies with or looks rows up in,
    either directly or after operations of one input such as a transpose."""
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
