"""Repeated layers of a graph: the longest run of operations that does the same again and again.

Two nodes look alike when they run the same operation with the same constants on values of the same shapes and roles.
With ``s`` the sequence of looks,

    (1)  s[i] = s[i + p]  for i in [a, b)   =>   from a on, (b - a) / p + 1 repeats of p nodes

and the period and start that fold the most nodes away are taken. Forward and backward are searched apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.workload.graph import Argument, Graph, Node, Phase, Ref


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """A run of equal pieces: nodes ``first``, ``first + 1``, ... in pieces of ``period`` nodes, ``count`` times."""

    phase: Phase
    first: int
    period: int
    count: int

    @property
    def folded(self) -> int:
        """Nodes that need not be looked at because an equal one was."""
        return self.period * (self.count - 1)


def find_repeats(graph: Graph) -> tuple[Repeat, ...]:
    """The best repeat of each phase, where there is one."""
    looks = node_looks(graph)
    found = []
    for phase in Phase:
        places = [index for index, node in enumerate(graph.nodes) if node.phase is phase]
        if places and places[-1] - places[0] + 1 == len(places):
            best = _longest(np.array([looks[index] for index in places]))
            if best is not None:
                start, period, count = best
                found.append(Repeat(phase=phase, first=places[start], period=period, count=count))
    return tuple(found)


def node_looks(graph: Graph) -> list[int]:
    """A number per node, equal for nodes that look alike."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(_look(graph, node), len(numbers)) for node in graph.nodes]


def _look(graph: Graph, node: Node) -> object:
    def part(argument: Argument) -> object:
        if isinstance(argument, Ref):
            value = graph.values[argument.value]
            return (value.role, value.shape, value.dtype)
        return tuple(part(inner) for inner in argument) if isinstance(argument, tuple) else argument

    return (node.op, part(node.arguments), tuple((key, part(value)) for key, value in node.keywords))


def _longest(looks: NDArray[np.int64]) -> tuple[int, int, int] | None:
    """(1): start, period and count of the run that folds most; the shortest period on a tie."""
    best, answer = 0, None
    for period in range(1, len(looks) // 2 + 1):
        same = np.concatenate([[False], looks[period:] == looks[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        if not len(edges):
            continue
        starts, ends = edges[::2], edges[1::2]
        counts = (ends - starts) // period + 1
        place = int(np.argmax(counts))
        saved = int(counts[place] - 1) * period
        if counts[place] > 1 and saved > best:
            best, answer = saved, (int(starts[place]), period, int(counts[place]))
    return answer
