"""Cut a graph into parts that follow one another: stages of a pipeline, or segments with their own
ratios.

The caller assigns each forward operation to a part. The backward mirrors the forward:

    (1)  part of a backward operation = least of the parts in which the gradients that it reads were
         made and of the last parts in which the forward values that it reads were read

So a gradient is summed where a tensor branched and travels back along the way that the tensor came.
Then

    (2)  an operation that makes the gradient of a parameter runs where the parameter is, if that is
         no later part
    (3)  an operation whose results only earlier parts read runs there, unless more bytes would
         cross

A tensor passes from part to part, once over every boundary, up in the forward and down in the
backward. Inputs, buffers and constants are in all parts, and a parameter is in every part in which
it or its gradient is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from argosy.workload.graph import Argument, Graph, GraphNode, Phase, Ref, Role, Value

# Roles of values that are in all parts.
EVERYWHERE = (Role.INPUT, Role.BUFFER, Role.CONSTANT)
# The operation that sums two gradients.
ADD = "aten.add.Tensor"


@dataclass(frozen=True, kw_only=True)
class GraphPart:
    """A part that is a graph of its own."""

    graph: Graph
    values: tuple[int, ...]
    """Number in the whole graph of each value of the part; -1 for sums that the whole does not
    have."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A graph that was cut into parts."""

    parts: tuple[GraphPart, ...]
    of_node: tuple[int, ...]
    up_bytes: tuple[float, ...]
    """Bytes that the forward sends over each boundary."""
    down_bytes: tuple[float, ...]
    """Bytes that the backward sends back over each boundary."""
    forwarded: tuple[int, ...]
    """Values that pass through a part which does not read them."""
    shared: tuple[tuple[int, tuple[int, ...]], ...]
    """Pairs of a parameter and the parts that hold it, if several do: their gradients are
    summed."""


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


def cut_into_parts(graph: Graph, forward: Sequence[int]) -> Parts:
    """Return a graph with its forward cut as given."""
    of_node = part_of_nodes(graph, forward)
    count = max(of_node, default=0) + 1
    holders = _holders(graph, of_node)
    terms, gone = _gradient_terms(graph, of_node, holders)
    read: list[set[int]] = [set() for _ in graph.values]
    for index, node in enumerate(graph.nodes):
        if index not in gone:
            for value in node.inputs:
                read[value].add(of_node[index])
    up, down, forwarded = [0.0] * (count - 1), [0.0] * (count - 1), []
    for value, maker in graph.producer.items():
        if maker in gone:
            continue
        home, size = of_node[maker], float(graph.values[value].num_bytes)
        highest, lowest = max(read[value], default=home), min(read[value], default=home)
        for boundary in range(home, highest):
            up[boundary] += size
        for boundary in range(lowest, home):
            down[boundary] += size
        if {*range(lowest, highest + 1)} - read[value] - {home}:
            forwarded.append(value)
    return Parts(
        parts=tuple(_Writer(graph, of_node, gone, terms, part).part() for part in range(count)),
        of_node=of_node,
        up_bytes=tuple(up),
        down_bytes=tuple(down),
        forwarded=tuple(forwarded),
        shared=tuple((value, where) for value, where in holders.items() if len(where) > 1),
    )


def _holders(graph: Graph, of_node: Sequence[int]) -> dict[int, tuple[int, ...]]:
    parts_of = {
        value: {of_node[reader] for reader in graph.consumers[value]} for value in graph.parameters
    }
    for parameter, gradient in graph.gradients:
        makers = (
            _terms(graph, gradient) if len(parts_of[parameter]) > 1 else [graph.producer[gradient]]
        )
        parts_of[parameter] |= {of_node[maker] for maker in makers}
    return {value: tuple(sorted(parts)) for value, parts in parts_of.items()}


def _gradient_terms(
    graph: Graph, of_node: Sequence[int], holders: dict[int, tuple[int, ...]]
) -> tuple[dict[int, dict[int, list[int]]], frozenset[int]]:
    """Return, per parameter and part, the values that add up to its gradient there, and the
    additions that are no longer needed."""
    terms: dict[int, dict[int, list[int]]] = {}
    gone: set[int] = set()
    for parameter, gradient in graph.gradients:
        by_part: dict[int, list[int]] = {}
        todo = [gradient]
        while todo:
            value = todo.pop()
            maker = graph.producer[value]
            node = graph.nodes[maker]
            alone = value == gradient or len(graph.consumers[value]) == 1
            spread = {of_node[term] for term in _terms(graph, value)}
            if (
                len(holders[parameter]) > 1
                and alone
                and len(spread) > 1
                and _is_sum_of_two(graph, node)
            ):
                gone.add(maker)
                todo += node.inputs
            else:
                by_part.setdefault(of_node[maker], []).append(value)
        terms[parameter] = by_part
    return terms, frozenset(gone)


def _is_sum_of_two(graph: Graph, node: GraphNode) -> bool:
    plain = (
        node.op == ADD and len(node.inputs) == 2 and len(node.arguments) == 2 and not node.keywords
    )
    return plain and all(value in graph.producer for value in node.inputs)


class _Writer:
    """A builder that writes one part."""

    def __init__(
        self,
        graph: Graph,
        of_node: Sequence[int],
        gone: frozenset[int],
        terms: dict[int, dict[int, list[int]]],
        part: int,
    ) -> None:
        self.whole, self.of_node, self.gone, self.terms, self.number = (
            graph,
            of_node,
            gone,
            terms,
            part,
        )
        self.values: list[Value] = []
        self.nodes: list[GraphNode] = []
        self.index: dict[int, int] = {}

    def part(self) -> GraphPart:
        whole = self.whole
        own = [
            i for i, part in enumerate(self.of_node) if part == self.number and i not in self.gone
        ]
        made = {value for index in own for value in whole.nodes[index].outputs if value is not None}
        used = {value for index in own for value in whole.nodes[index].inputs}
        used |= {buffer for buffer, after in whole.updates if after in made}
        used |= {parameter for parameter, by_part in self.terms.items() if self.number in by_part}
        for value in sorted(used):
            if value not in made:
                described = whole.values[value]
                given = described.role is Role.PARAMETER or described.role in EVERYWHERE
                self._add(value, described if given else replace(described, role=Role.RECEIVED))
        for index in own:
            self._copy(whole.nodes[index])
        gradients = tuple(self._gradients(made))
        elsewhere = {
            i
            for i in range(len(whole.nodes))
            if self.of_node[i] != self.number and i not in self.gone
        }
        sent = sorted(value for value in made if elsewhere.intersection(whole.consumers[value]))
        graph = Graph(
            name=f"{whole.name} stage {self.number}",
            values=tuple(self.values),
            nodes=tuple(self.nodes),
            loss=self.index[whole.loss] if whole.loss in made else None,
            gradients=gradients,
            updates=tuple((self.index[b], self.index[a]) for b, a in whole.updates if a in made),
            constants=tuple(
                (self.index[v], content) for v, content in whole.constants if v in self.index
            ),
            sent=tuple(self.index[value] for value in sent),
        )
        back = {here: there for there, here in self.index.items()}
        return GraphPart(
            graph=graph, values=tuple(back.get(value, -1) for value in range(len(self.values)))
        )

    def _add(self, value: int, described: Value) -> None:
        self.index[value] = len(self.values)
        self.values.append(described)

    def _copy(self, node: GraphNode) -> None:
        for value in node.outputs:
            if value is not None:
                self._add(value, self.whole.values[value])
        self.nodes.append(
            replace(
                node,
                arguments=tuple(renamed(part, self.index.__getitem__) for part in node.arguments),
                keywords=tuple(
                    (key, renamed(part, self.index.__getitem__)) for key, part in node.keywords
                ),
                outputs=tuple(
                    None if value is None else self.index[value] for value in node.outputs
                ),
            )
        )

    def _gradients(self, made: set[int]) -> Iterable[tuple[int, int]]:
        for parameter, by_part in self.terms.items():
            own = [self.index[value] for value in by_part.get(self.number, ()) if value in made]
            if own and parameter in self.index:
                yield self.index[parameter], self._sum(own)

    def _sum(self, terms: Sequence[int]) -> int:
        """Return one value for the sum of terms that the whole graph adds elsewhere."""
        total = terms[0]
        for term in terms[1:]:
            made = len(self.values)
            name = f"{self.values[total].name}_and_{self.values[term].name}"
            self.values.append(replace(self.values[total], name=name))
            self.nodes.append(
                GraphNode(
                    name=name,
                    op=ADD,
                    arguments=(Ref(total), Ref(term)),
                    outputs=(made,),
                    phase=Phase.BACKWARD,
                )
            )
            total = made
        return total


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


def run_after_run(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the parts of forward nodes that are cut into runs of the given lengths.

    >>> run_after_run([2, 1])
    (0, 0, 1)
    """
    return tuple(
        itertools.chain.from_iterable([part] * length for part, length in enumerate(lengths))
    )
