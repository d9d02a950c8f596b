"""How should this graph run? The planner's counterpart for a captured program, which is no chain of layers.

    (1)  One program over all devices (``solve.spmd``), with ratios of their own for segments (``solve.segments``).
    (2)  Pipelines: the nodes of the cluster, in their order or in the reverse, cut into runs; the forward of the graph
         cut into stages in proportion to the speed of the runs (``solve.stagecut``, skip tensors forwarded); every
         stage a program on its run (``solve.staging``); the batch in so many micro-batches.
    (3)  What (2) looks at first: runs that stay inside nodes, then few stages. Level 1 looks at a few, level 2 at many.
    (4)  The best few by their estimate are played by the exact engine; the fastest wins, or (1). Where links or devices
         change, both go on as these do (``solve.pace``), from the prices of time 0.

A pipeline steps through micro-batches: its loss and gradients are means over them, as when one device accumulates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from argosy.cluster.lasting import within_reach
from argosy.cluster.topology import Cluster
from argosy.cost.communicate import DOWN
from argosy.cost.group import DeviceGroup, device_group
from argosy.dtype import Dtype
from argosy.errors import InfeasibleError, InputError, NothingFitsError
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.solve.pace import is_calm, seconds_under_changes
from argosy.solve.placement import Pricing
from argosy.solve.segments import find_segmented
from argosy.solve.spmd import Program
from argosy.solve.stagecut import StageCut, cut_graph
from argosy.solve.staging import Pipeline, StageProgram, estimate, play, price_stages
from argosy.workload.graph import Graph
from argosy.workload.part import Parts

Step = Callable[[int], Graph]
"""The step on so many samples, or an ``InputError`` where the program cannot do with so few."""
TRIED = {1: 6, 2: 40}
"""Ways to cut the cluster, per level."""
PLAYED = 4
MOST_STAGES = 8
MOST_BLOCKS = 8
SCHEDULE = ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A pipeline that was looked at."""

    runs: tuple[int, ...]
    """Devices per stage."""
    micro_batches: int
    seconds: float
    """Estimated, or played; infinite where it does not fit."""


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """What was found: the faster of one program for all and the best pipeline."""

    program: Program | None
    """Over all devices; None if none fits."""
    pipeline: Pipeline | None
    """None if none was found."""
    attempts: tuple[Attempt, ...]
    changed_seconds: float | None = None
    """Of the program while links and devices change; None where nothing does, or there is no program."""

    @property
    def program_seconds(self) -> float:
        """Of a step of the program, infinite if there is none."""
        if self.program is None:
            return math.inf
        return self.program.seconds if self.changed_seconds is None else self.changed_seconds

    @property
    def is_pipeline(self) -> bool:
        return self.pipeline is not None and self.pipeline.seconds < self.program_seconds

    @property
    def seconds(self) -> float:
        return min(self.program_seconds, self.pipeline.seconds if self.pipeline is not None else math.inf)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Operations that no rule knows."""
        if self.program is not None:
            return self.program.unknown
        assert self.pipeline is not None
        return tuple(sorted({op for stage in self.pipeline.stages for op in stage.program.unknown}))


def find_graph_plan(step: Step, samples: int, cluster: Cluster, dtype: Dtype, *, level: int = 1) -> GraphPlan:
    """(1) to (4), on the devices that are there at time 0 and reach each other."""
    return _Search(step, samples, within_reach(cluster), dtype, level).run()


class _Search:
    def __init__(self, step: Step, samples: int, cluster: Cluster, dtype: Dtype, level: int) -> None:
        self.step, self.samples, self.cluster, self.dtype, self.level = step, samples, cluster, dtype, level
        self.graphs: dict[int, Graph | None] = {}
        self.cuts: dict[tuple[int, tuple[float, ...]], StageCut | None] = {}
        self.attempts: list[Attempt] = []
        self.stalled: str | None = None
        """Why a pipeline never ends."""

    def run(self) -> GraphPlan:
        everything = [device.name for device in self.cluster.devices if device.speed.at(0.0) > 0]
        if not everything:
            raise NothingFitsError(f"no device of {self.cluster!r} is there at time 0")
        program, why = self._one_program(everything)
        found: list[tuple[float, Parts, tuple[StageProgram, ...], int]] = []
        for runs in itertools.islice(ordered_runs(self.cluster, everything), TRIED[self.level]):
            groups = [device_group(self.cluster, names, self.dtype) for names in runs]
            for micro_batches in self._counts(len(runs)):
                priced = self._priced(groups, micro_batches)
                if priced is not None:
                    found.append(priced)
        best = self._best(sorted(found, key=lambda one: one[0])[:PLAYED])
        changed = None
        if program is not None and not is_calm(self.cluster):
            changed = seconds_under_changes(program, Pricing(group=program.group), self.cluster)
        plan = GraphPlan(program=program, pipeline=best, attempts=tuple(self.attempts), changed_seconds=changed)
        if math.isinf(plan.seconds):
            lost = self.stalled or "a device is lost and does not come back"
            raise why if why is not None and self.stalled is None else InfeasibleError(f"no step ends, because {lost}")
        return plan

    def _one_program(self, names: Sequence[str]) -> tuple[Program | None, InfeasibleError | None]:
        """(1)."""
        graph = self._graph(self.samples)
        assert graph is not None
        try:
            return find_segmented(graph, Pricing(group=device_group(self.cluster, names, self.dtype))), None
        except InfeasibleError as error:
            return None, error

    def _graph(self, samples: int) -> Graph | None:
        if samples not in self.graphs:
            try:
                self.graphs[samples] = self.step(samples)
            except InputError:
                if samples == self.samples:
                    raise
                self.graphs[samples] = None
        return self.graphs[samples]

    def _counts(self, stages: int) -> tuple[int, ...]:
        """Numbers of micro-batches: divisors of the batch around four per stage, on level 2 also two and eight."""
        divisors = [count for count in range(2, self.samples + 1) if self.samples % count == 0]
        wanted = (4,) if self.level == 1 else (2, 4, 8)
        near = [min(divisors, key=lambda count: (abs(count - factor * stages), count)) for factor in wanted if divisors]
        return tuple(dict.fromkeys(near))

    def _priced(
        self, groups: Sequence[DeviceGroup], micro_batches: int
    ) -> tuple[float, Parts, tuple[StageProgram, ...], int] | None:
        """(2): a pipeline and its estimate."""
        graph = self._graph(self.samples // micro_batches)
        cut = self._cut(self.samples // micro_batches, groups)
        if graph is None or cut is None or len(set(cut.stages)) < len(groups):
            return None
        runs, between = tuple(len(group) for group in groups), self._between(groups)
        try:
            parts, stages = price_stages(
                graph, cut.stages, groups, bandwidths=between, micro_batches=micro_batches, schedule=SCHEDULE
            )
        except InfeasibleError:
            self.attempts.append(Attempt(runs=runs, micro_batches=micro_batches, seconds=float("inf")))
            return None
        seconds = estimate(stages, parts, between, micro_batches)
        self.attempts.append(Attempt(runs=runs, micro_batches=micro_batches, seconds=seconds))
        return seconds, parts, stages, micro_batches

    def _cut(self, samples: int, groups: Sequence[DeviceGroup]) -> StageCut | None:
        speeds = [sum(group.flops) for group in groups]
        shares = tuple(round(speed / sum(speeds), 4) for speed in speeds)
        key = (samples, shares)
        if key not in self.cuts:
            graph = self._graph(samples)
            try:
                self.cuts[key] = cut_graph(graph, shares) if graph is not None else None
            except InfeasibleError:
                self.cuts[key] = None
        return self.cuts[key]

    def _between(self, groups: Sequence[DeviceGroup]) -> list[float]:
        """Bytes/s from a stage to the next."""
        cluster = self.cluster
        ends = [(one.names[-1], other.names[0]) for one, other in itertools.pairwise(groups)]
        return [max(DOWN, cluster.bandwidth_at(cluster.fastest(*end, 1e6))) for end in ends]

    def _best(self, found: Sequence[tuple[float, Parts, tuple[StageProgram, ...], int]]) -> Pipeline | None:
        """(4)."""
        pipelines = []
        for _, parts, stages, micro_batches in found:
            timeline = play(stages, parts, self.cluster, micro_batches=micro_batches, schedule=SCHEDULE)
            if timeline.stalled is not None:
                self.stalled = timeline.stalled
                continue
            graph = self.graphs[self.samples // micro_batches]
            assert graph is not None
            pipelines.append(
                Pipeline(
                    graph=graph,
                    parts=parts,
                    stages=stages,
                    micro_batches=micro_batches,
                    schedule=SCHEDULE,
                    seconds=timeline.end,
                )
            )
        return min(pipelines, key=lambda one: one.seconds, default=None)


def ordered_runs(cluster: Cluster, names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """(3): ways to cut the devices into two or more runs, the most promising first."""
    blocks = _blocks(cluster, names)
    home = {name: node.name for node in cluster.nodes for name in node.devices}
    found = []
    for stages in range(2, min(len(blocks), MOST_STAGES) + 1):
        for ends in itertools.combinations(range(1, len(blocks)), stages - 1):
            bounds = itertools.pairwise((0, *ends, len(blocks)))
            runs = tuple(tuple(itertools.chain.from_iterable(blocks[a:b])) for a, b in bounds)
            found += [runs, runs[::-1]]

    def promise(runs: tuple[tuple[str, ...], ...]) -> tuple[int, int]:
        wide = sum(len(run) for run in runs if len({home[name] for name in run}) > 1)
        return wide, len(runs)

    return iter(sorted(found, key=promise))


def _blocks(cluster: Cluster, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Nodes, or devices where there is one node; neighbours together where there are many."""
    wanted = set(names)
    nodes = [tuple(name for name in node.devices if name in wanted) for node in cluster.nodes]
    blocks = [node for node in nodes if node]
    if len(blocks) == 1:
        blocks = [(name,) for name in blocks[0]]
    each = -(-len(blocks) // MOST_BLOCKS)
    return [tuple(itertools.chain.from_iterable(blocks[i : i + each])) for i in range(0, len(blocks), each)]
