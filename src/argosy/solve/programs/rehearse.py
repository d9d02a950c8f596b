"""Compile a distributed program into tasks for the exact engine: what would happen when it runs on
a cluster.

Every device computes its share of the operations in the order of the graph. A collective starts
when all devices have made their parts, one after the other as on one communication stream, and
operations that need its result wait; others continue, so gradients are summed while the backward
runs. A collective is a ring of flows:

    (1)  all-reduce                 each hop 2 S (n-1)/n
    (2)  padded gather or scatter   each hop (n-1) x largest shard
    (3)  grouped                    each hop S (1 - least share)
    (4)  all-to-all                 every pair its part of S
    (5)  re-shard                   every pair the overlap of one's old with the other's new piece
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from argosy.cluster.topology import Cluster
from argosy.cost.group import CollectiveMethod, GroupCollective, passed_on
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import Flow, Task, TaskGraph
from argosy.solve.programs.placement import Pricing, ProgramPlacement
from argosy.solve.programs.spmd import Program, ProgramCollective
from argosy.space.operations.rules import StateChoices
from argosy.timeline import SpanKind, Timeline
from argosy.workload.graph import Phase, Role


class _Rehearsal:
    def __init__(self, program: Program, pricing: Pricing) -> None:
        self.program = program
        choices = StateChoices(program.graph, len(program.group))
        self.placement = ProgramPlacement(program.graph, choices, pricing, program.segments)
        self.count = len(program.group)
        self.tasks: list[Task] = []
        self.last: list[int | None] = [None] * self.count
        self.stream: int | None = None
        self.pending: dict[int, int] = {}
        """For each value, the collective that delivers it."""
        self.seconds = [0.0] * self.count
        self.waits: set[int] = set()
        self.kind = SpanKind.FORWARD
        self.moves: dict[int, list[ProgramCollective]] = {}
        for move in program.moves:
            if move.step.kind is not GroupCollective.SLICE and move.seconds > 0:
                self.moves.setdefault(move.value, []).append(move)

    def graph(self) -> TaskGraph:
        for value, described in enumerate(self.program.graph.values):
            if described.role is not Role.RESULT and value in self.moves:
                self._collect(value)
        for index, node in enumerate(self.program.graph.nodes):
            needed = {self.pending[value] for value in node.inputs if value in self.pending}
            if needed - self.waits:
                self._flush()
                self.waits = needed
            self.kind = SpanKind.FORWARD if node.phase is Phase.FORWARD else SpanKind.BACKWARD
            self._compute(index)
            for made in node.outputs:
                if made in self.moves:
                    self._flush()
                    self._collect(made)
        self._flush()
        return TaskGraph(devices=self.program.group.names, tasks=tuple(self.tasks))

    def _compute(self, index: int) -> None:
        group, row = self.program.group, self.program.rows[index]
        flop, moved = self.placement.row_work(index)
        if flop == 0 and moved == 0:
            return
        for rank, share in enumerate(self.placement.work_shares(index, row)):
            work = flop / group.flops[rank] + moved / group.memory_bandwidths[rank]
            self.seconds[rank] += share * work + group.launch

    def _flush(self) -> None:
        """Turn the collected work into one computation per device."""
        for rank, seconds in enumerate(self.seconds):
            if seconds > 0:
                own = self.last[rank]
                after = sorted(self.waits | ({own} if own is not None else set()))
                self.last[rank] = self._add(
                    Task(kind=self.kind, device=rank, seconds=seconds, after=tuple(after))
                )
        if any(self.seconds):
            self.waits = set()
        self.seconds = [0.0] * self.count

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _collect(self, value: int) -> None:
        for move in self.moves[value]:
            before = {task for task in (*self.last, self.stream) if task is not None} | self.waits
            rounds = self._rounds(move)
            task = Task(
                kind=SpanKind.COLLECTIVE,
                flows=tuple(self._flows(move)),
                rounds=rounds,
                after=tuple(sorted(before)),
            )
            self.stream = self.pending[value] = self._add(task)

    def _rounds(self, move: ProgramCollective) -> int:
        """Return how many latencies a collective waits for, one after the other."""
        group = self.program.group
        if move.way is CollectiveMethod.HIERARCHICAL:
            return 2 * (group.nodes + self.count // group.nodes - 2)
        return (
            2 * math.ceil(math.log2(self.count))
            if move.step.kind is GroupCollective.ALL_REDUCE
            else self.count - 1
        )

    def _flows(self, move: ProgramCollective) -> list[Flow]:
        amount = self.placement.moved_bytes(move.value)
        cut = (
            move.step.after
            if move.step.kind is GroupCollective.REDUCE_SCATTER
            else move.step.before
        )
        shares = self.placement.shares(cut)
        if move.step.kind is GroupCollective.ALL_TO_ALL:
            return _pairs(amount, shares)
        if move.step.kind is GroupCollective.RESHARD:
            passed = passed_on(shares, self.placement.shares(move.step.after))
            return [
                Flow(i, j, amount * part)
                for i, row in enumerate(passed)
                for j, part in enumerate(row)
                if part
            ]
        if move.step.kind is GroupCollective.ALL_REDUCE:
            hop_bytes = 2 * amount * (self.count - 1) / self.count
        elif move.way is CollectiveMethod.PADDED:
            hop_bytes = amount * max(shares) * (self.count - 1)
        else:
            hop_bytes = amount * (1 - min(shares))
        return [Flow(rank, (rank + 1) % self.count, hop_bytes) for rank in range(self.count)]


def _pairs(amount: float, shares: Sequence[float]) -> list[Flow]:
    """Return the flows of an all-to-all (4): what one device holds and another will hold, about its
    share in both cuts."""
    return [
        Flow(source, target, amount * held * received)
        for source, held in enumerate(shares)
        for target, received in enumerate(shares)
        if source != target
    ]


def program_tasks(program: Program, pricing: Pricing) -> TaskGraph:
    """Return the tasks of one step of a program, without the optimizer."""
    return _Rehearsal(program, pricing).graph()


def rehearse(program: Program, pricing: Pricing, cluster: Cluster) -> Timeline:
    """Simulate one step in the exact engine."""
    return simulate_exact(program_tasks(program, pricing), cluster)
