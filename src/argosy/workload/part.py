"""Assign the operations of a backward to the parts of the forward of a step.

The caller assigns each forward operation to a part. The backward mirrors the forward:

    (1)  part of a backward operation = least of the parts in which the gradients that it reads were
         made and of the last parts in which the forward values that it reads were read

So a gradient is summed where a tensor branched and travels back along the way that the tensor came.
Then

    (2)  what makes the gradient of a parameter runs where the parameter is, if that is no later
         part
    (3)  what only earlier parts read runs there, unless more bytes would cross for it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from argosy.workload.graph import Argument, Graph, GraphNode, Phase, Ref

ADD = "aten.add.Tensor"


def part_of_nodes(graph: Graph, forward: Sequence[int]) -> tuple[int, ...]:
    """Return the part of every node by (1) to (3); ``forward`` has those of forward nodes, in
    order."""
    given = iter(forward)
    parts = [next(given) if node.phase is Phase.FORWARD else -1 for node in graph.nodes]
    top = max(forward, default=0)
    last = [top] * len(graph.values)
    for value, readers in enumerate(graph.consumers):
        ahead = [parts[index] for index in readers if parts[index] >= 0]
        maker = graph.producer.get(value)
        if ahead:
            last[value] = max(ahead)
        elif maker is not None and parts[maker] >= 0:
            last[value] = parts[maker]
    for index, node in enumerate(graph.nodes):
        if node.phase is Phase.BACKWARD:
            parts[index] = min((last[value] for value in node.inputs), default=top)
            for made in node.outputs:
                if made is not None:
                    last[made] = parts[index]
    fixed = _with_their_parameters(graph, parts)
    while _moved_down(graph, parts, fixed):
        pass
    return tuple(parts)


def _with_their_parameters(graph: Graph, parts: list[int]) -> frozenset[int]:
    """Move the nodes that make gradients of parameters by (2), and return the nodes that must not
    move again."""
    fixed = set()
    for parameter, gradient in graph.gradients:
        homes = {
            parts[r] for r in graph.consumers[parameter] if graph.nodes[r].phase is Phase.FORWARD
        }
        for maker in _terms(graph, gradient) if len(homes) > 1 else [graph.producer[gradient]]:
            below = [home for home in homes if home <= parts[maker]]
            if below and graph.nodes[maker].phase is Phase.BACKWARD:
                parts[maker] = max(below)
            fixed.add(maker)
    return frozenset(fixed)


def _moved_down(graph: Graph, parts: list[int], fixed: frozenset[int]) -> bool:
    """Apply (3) once to all nodes, and return whether any moved."""
    moved = False
    values = graph.values
    for index in range(len(parts) - 1, -1, -1):
        node = graph.nodes[index]
        if node.phase is Phase.FORWARD or index in fixed:
            continue
        made = [value for value in node.outputs if value is not None]
        target = max(
            (parts[reader] for value in made for reader in graph.consumers[value]),
            default=parts[index],
        )
        if target >= parts[index]:
            continue
        new = [
            v
            for v in set(node.inputs)
            if v in graph.producer and not _is_needed(graph, parts, v, target, index)
        ]
        if sum(values[v].num_bytes for v in new) <= sum(values[v].num_bytes for v in made):
            parts[index], moved = target, True
    return moved


def _is_needed(graph: Graph, parts: Sequence[int], value: int, part: int, reader: int) -> bool:
    """Return whether a value is made or read in ``part`` or below without this reader."""
    lowest = min(
        (parts[index] for index in graph.consumers[value] if index != reader), default=parts[reader]
    )
    return min(parts[graph.producer[value]], lowest) <= part


def _terms(graph: Graph, gradient: int) -> list[int]:
    """Return the nodes whose results add up to a gradient."""
    makers, todo = [], [graph.producer[gradient]]
    while todo:
        maker = todo.pop()
        if _is_sum_of_two(graph, graph.nodes[maker]):
            todo += [graph.producer[value] for value in graph.nodes[maker].inputs]
        else:
            makers.append(maker)
    return makers


def _is_sum_of_two(graph: Graph, node: GraphNode) -> bool:
    plain = (
        node.op == ADD and len(node.inputs) == 2 and len(node.arguments) == 2 and not node.keywords
    )
    return plain and all(value in graph.producer for value in node.inputs)


def renamed(argument: Argument, name: Callable[[int], int]) -> Argument:
    """Return an argument with its values renumbered."""
    if isinstance(argument, Ref):
        return Ref(name(argument.value))
    if isinstance(argument, tuple):
        return tuple(renamed(part, name) for part in argument)
    return argument


def forward_order(graph: Graph) -> tuple[int, ...]:
    """Return the forward nodes of a graph."""
    return tuple(index for index, node in enumerate(graph.nodes) if node.phase is Phase.FORWARD)
