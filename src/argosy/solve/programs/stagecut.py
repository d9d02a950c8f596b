"""Cut a graph that is no chain into pipeline stages: skip connections, two towers, an encoder that
every decoder layer reads.

Pieces v have FLOP f_v, tensors t have b_t bytes from a piece to the pieces that read it, and stages
0..S-1 have shares of the work. With y[v, s] = 1 if v runs in stage s or later, w[t, s] = 1 if t
crosses from stage s - 1 to s:

    (1)  minimise  sum_t b_t sum_s w[t, s]     a tensor is forwarded stage to stage, once per
                                               boundary
    (2)  y[v, s] >= y[v, s+1]                  a stage is one number
    (3)  y[u, s] >= y[v, s]                    for u that reads a tensor of v: nothing runs before
                                               what it reads
    (4)  w[t, s] >= y[u, s] - y[v, s]          crossed if it is read later than it is made
    (5)  sum_v f_v (y[v, s] - y[v, s+1]) <= (1 + tolerance) share_s sum f

Windows fix most y before the programme runs: a piece cannot come earlier than the stage by which
all it needs fits, nor later than the stage from which all that needs it fits. The backward mirrors
the forward, so bytes count both ways. Parameters are tensors too: one that two stages read must
travel (or be summed) between them. HiGHS solves it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from argosy.errors import InfeasibleError
from argosy.space.operations.calls import call_of
from argosy.space.operations.flop import flop_of
from argosy.workload.graph import Graph, Role
from argosy.workload.part import forward_order

# Shares by which the work of a stage may exceed its target, tried one after the other.
TOLERANCES = (0.08, 0.16, 0.32, 0.64, 1.28)
# Maximum seconds for the integer programme; after that the best cut so far is taken.
TIME_LIMIT = 20.0
# Pieces with less than this share of all FLOP are merged into their reader if there is only one.
SMALL = 1e-3


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor that goes from one piece to others."""

    source: int
    readers: tuple[int, ...]
    num_bytes: float
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A directed graph that has no cycles; its pieces are in an order in which they can run."""

    flop: tuple[float, ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """An assignment that gives each piece its stage."""

    stages: tuple[int, ...]
    flop: tuple[float, ...]
    """FLOP of each stage."""
    crossing_bytes: tuple[float, ...]
    """Bytes across each boundary, one way."""
    forwarded: tuple[str, ...]
    """Names of tensors that pass through a stage which does not read them."""
    tolerance: float

    @property
    def total_bytes(self) -> float:
        return sum(self.crossing_bytes)

    def __repr__(self) -> str:
        shares = " | ".join(f"{100 * flop / sum(self.flop):.0f} %" for flop in self.flop)
        work = f"{len(self.flop)} stages with {shares} of the FLOP"
        return f"{work}, {self.total_bytes:,.0f} bytes across"


def cut_pieces(pieces: Pieces, shares: Sequence[float]) -> StageCut:
    """Return the stages that the fewest bytes cross (1), at the smallest tolerance of
    ``TOLERANCES`` that can be met."""
    for tolerance in TOLERANCES:
        stages = _solve(pieces, shares, tolerance)
        if stages is not None:
            return _described(pieces, stages, len(shares), tolerance)
    largest = max(pieces.flop) / sum(pieces.flop)
    within = f"no {len(shares)} stages within {TOLERANCES[-1]:.0%} of their shares"
    raise InfeasibleError(f"{within}: one operation alone has {largest:.0%} of the FLOP")


def _windows(pieces: Pieces, budgets: Sequence[float]) -> tuple[list[int], list[int]]:
    """Return the earliest and latest stage of every piece."""
    count = len(pieces.flop)
    above, below = _reach(pieces)
    ahead = np.cumsum(budgets)
    behind = np.cumsum(list(budgets)[::-1])
    flop = np.array(pieces.flop)
    first, last = [], []
    for piece in range(count):
        before, after = (
            flop[above[piece]].sum() + flop[piece],
            flop[below[piece]].sum() + flop[piece],
        )
        first.append(min(int(np.searchsorted(ahead * (1 + 1e-9), before)), len(budgets) - 1))
        last.append(max(len(budgets) - 1 - int(np.searchsorted(behind * (1 + 1e-9), after)), 0))
    return first, last


def _reach(pieces: Pieces) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return boolean matrices: which pieces come before and after each piece."""
    count = len(pieces.flop)
    above = np.zeros((count, count), dtype=bool)
    edges = sorted(
        {(t.source, r) for t in pieces.tensors for r in t.readers if r != t.source},
        key=lambda e: e[1],
    )
    for source, reader in edges:  # pieces are in running order, so a reader's sources are complete
        above[reader] |= above[source]
        above[reader, source] = True
    return above, above.T


def _solve(pieces: Pieces, shares: Sequence[float], tolerance: float) -> list[int] | None:
    """Return the stages of the pieces, or None if the tolerance cannot be met."""
    import highspy

    budgets = [(1 + tolerance) * share * sum(pieces.flop) for share in shares]
    first, last = _windows(pieces, budgets)
    if any(earliest > latest for earliest, latest in zip(first, last, strict=True)):
        return None
    programme = _Programme(pieces, budgets)
    programme.add_pieces(first, last)
    programme.add_tensors()
    programme.add_budgets()
    solver = programme.solver
    solver.run()
    if solver.getModelStatus() not in (
        highspy.HighsModelStatus.kOptimal,
        highspy.HighsModelStatus.kTimeLimit,
    ):
        return None
    values = solver.getSolution().col_value
    if not len(values) or not math.isfinite(solver.getInfo().objective_function_value):
        return None
    return [round(sum(values[column] for column in row)) for row in programme.later]


class _Programme:
    """A model of (1) to (5) that HiGHS solves; y[v, s] is column v (S - 1) + s - 1, the w
    follow."""

    def __init__(self, pieces: Pieces, budgets: Sequence[float]) -> None:
        import highspy

        self.pieces, self.budgets = pieces, budgets
        self.boundaries = len(budgets) - 1
        self.integer, self.infinite = highspy.HighsVarType.kInteger, highspy.kHighsInf
        self.solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        self.solver.setOptionValue("output_flag", False)
        self.solver.setOptionValue("time_limit", TIME_LIMIT)
        self.later = [
            [v * self.boundaries + s for s in range(self.boundaries)]
            for v in range(len(pieces.flop))
        ]

    def at_least(self, bound: float, *terms: tuple[int, float]) -> None:
        columns, factors = [column for column, _ in terms], [factor for _, factor in terms]
        self.solver.addRow(bound, self.infinite, len(terms), columns, factors)

    def add_pieces(self, first: Sequence[int], last: Sequence[int]) -> None:
        """Add variables y within their windows; each piece has one stage (2)."""
        for v, row in enumerate(self.later):
            for s, column in enumerate(row, start=1):
                self.solver.addVar(float(s <= first[v]), float(s <= last[v]))
                self.solver.changeColIntegrality(column, self.integer)
        for row in self.later:
            for earlier, later in itertools.pairwise(row):
                self.at_least(0.0, (earlier, 1.0), (later, -1.0))

    def add_tensors(self) -> None:
        """Add variables w with their costs (1), and the order of makers and readers, (3) and
        (4)."""
        column = len(self.later) * self.boundaries
        scale = max((tensor.num_bytes for tensor in self.pieces.tensors), default=1.0)
        for tensor in self.pieces.tensors:
            readers = [reader for reader in tensor.readers if reader != tensor.source]
            for s in range(self.boundaries) if readers else ():
                self.solver.addVar(0.0, 1.0)
                self.solver.changeColCost(column, tensor.num_bytes / scale)
                made = self.later[tensor.source][s]
                for read in (self.later[reader][s] for reader in readers):
                    self.at_least(0.0, (read, 1.0), (made, -1.0))
                    self.at_least(0.0, (column, 1.0), (read, -1.0), (made, 1.0))
                column += 1

    def add_budgets(self) -> None:
        """Add the limits on the FLOP of each stage (5)."""
        total = sum(self.pieces.flop)
        for s, budget in enumerate(self.budgets):
            terms = []
            for row, flop in zip(self.later, self.pieces.flop, strict=True):
                terms += [(row[s - 1], -flop / total)] if s > 0 else []
                terms += [(row[s], flop / total)] if s < self.boundaries else []
            self.at_least((total * (s == 0) - budget) / total - 1e-9, *terms)


def _described(pieces: Pieces, stages: list[int], count: int, tolerance: float) -> StageCut:
    flop = [0.0] * count
    for stage, work in zip(stages, pieces.flop, strict=True):
        flop[stage] += work
    crossing = [0.0] * (count - 1)
    forwarded = []
    for tensor in pieces.tensors:
        read = {stages[reader] for reader in tensor.readers}
        end = max(read, default=stages[tensor.source])
        for boundary in range(stages[tensor.source], end):
            crossing[boundary] += tensor.num_bytes
        passed = set(range(stages[tensor.source] + 1, end)) - read
        if passed:
            forwarded.append(tensor.name)
    return StageCut(
        stages=tuple(stages),
        flop=tuple(flop),
        crossing_bytes=tuple(crossing),
        forwarded=tuple(forwarded),
        tolerance=tolerance,
    )


def forward_pieces(graph: Graph) -> tuple[Pieces, tuple[int, ...]]:
    """Return the forward of a captured step as pieces, and for each forward node its piece.

    Parameters and inputs that several pieces read come first, as pieces without work.
    """
    nodes = forward_order(graph)
    flop = {index: flop_of(call_of(graph, graph.nodes[index])) for index in nodes}
    home = _homes(graph, nodes, flop)
    given = [
        v for v in _given(graph) if len({home[r] for r in graph.consumers[v] if r in home}) > 1
    ]
    order = {index: len(given) + place for place, index in enumerate(sorted(set(home.values())))}
    sizes = [0.0] * (len(given) + len(order))
    for index in nodes:
        sizes[order[home[index]]] += flop[index]
    source = {value: place for place, value in enumerate(given)}
    source |= {v: order[home[i]] for i in nodes for v in graph.nodes[i].outputs if v is not None}
    tensors = []
    for value, place in source.items():
        readers = {order[home[r]] for r in graph.consumers[value] if r in home}
        if readers - {place}:
            described = graph.values[value]
            tensors.append(
                Tensor(
                    source=place,
                    readers=tuple(sorted(readers)),
                    num_bytes=float(described.num_bytes),
                    name=described.name or "batch",
                )
            )
    return Pieces(flop=tuple(sizes), tensors=tuple(tensors)), tuple(
        order[home[index]] for index in nodes
    )


def _homes(graph: Graph, nodes: Sequence[int], flop: dict[int, float]) -> dict[int, int]:
    """Return for each forward node the node it is merged with: a small one with a single reader
    goes there, so no cycle can arise."""
    whole = sum(flop.values()) or 1.0
    home = {index: index for index in nodes}
    for index in reversed(nodes):
        readers = {
            r
            for v in graph.nodes[index].outputs
            if v is not None
            for r in graph.consumers[v]
            if r in home
        }
        if len(readers) == 1 and flop[index] < SMALL * whole:
            home[index] = home[readers.pop()]
    return home


def _given(graph: Graph) -> tuple[int, ...]:
    return (*graph.with_role(Role.PARAMETER), *graph.with_role(Role.INPUT))


def cut_graph(graph: Graph, shares: Sequence[float]) -> StageCut:
    """Return stages of a captured forward; ``stages`` of the result is per forward node, in order.

    This gives a planner the work of every stage and the bytes at every boundary if a workload is no
    chain.
    """
    pieces, of_node = forward_pieces(graph)
    cut = cut_pieces(pieces, shares)
    return StageCut(
        stages=tuple(cut.stages[piece] for piece in of_node),
        flop=cut.flop,
        crossing_bytes=cut.crossing_bytes,
        forwarded=cut.forwarded,
        tolerance=cut.tolerance,
    )
