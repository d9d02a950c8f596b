"""A training step as a pipeline of stages, each shared by a group of devices by a program of its own.

The forward of a graph is cut into stages (``stagecut``), the backward follows (``workload.part``), and every stage is a
graph for which the cheapest program on its group is found (``spmd``), for one micro-batch, with its gradients summed
once for all of them and as many kept activations as the schedule has in flight. From the program of stage s come

    (1)  f_s, b_s    operations and collectives of its forward and of its backward, per micro-batch
    (2)  y_s         its all-reduces of gradients, and its part of those that several stages share, per step

Between stages pass the tensors of ``Parts``, each once over every boundary, every device of the wider group to or from
one of the other. The step is the schedule's longest path through all of it in the exact engine, and where the cluster
changes, computing, collectives and what passes between stages go on as it does (``pace``); for a first look

    (3)  about  max_s (M - 1) (f_s + b_s) + sum_s (f_s + b_s + x_s) + max_s y_s,   x_s both transfers after stage s
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from argosy.cluster.topology import Cluster
from argosy.cost.group import Collective, DeviceGroup
from argosy.schedule import Action, ActionKind, ScheduleSpec
from argosy.schedule.generate import build_schedule, default_depth
from argosy.sim.exact import simulate_exact
from argosy.sim.graph import Flow, Task, TaskGraph
from argosy.solve.pace import hand_over_pace, is_calm, network_pace
from argosy.solve.placement import Pricing
from argosy.solve.spmd import Program, find_program
from argosy.timeline import SpanKind, Timeline
from argosy.workload.graph import Graph, Phase
from argosy.workload.part import Parts, cut_into_parts

ROUNDS = 2
"""Of program and ratios in turns, per stage."""


@dataclass(frozen=True, kw_only=True)
class StageProgram:
    """One stage: which devices share it, and how."""

    program: Program
    pricing: Pricing
    forward_seconds: float
    """(1), per micro-batch."""
    backward_seconds: float
    sync_seconds: float
    """(2), per step."""
    forward_moving: float = 0.0
    """The part of ``forward_seconds`` that is collectives."""
    backward_moving: float = 0.0
    shared_seconds: float = 0.0
    """The part of ``sync_seconds`` that is between stages."""

    @property
    def devices(self) -> tuple[str, ...]:
        return self.program.group.names

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A step in stages."""

    graph: Graph
    """One micro-batch of the whole step."""
    parts: Parts = field(repr=False)
    stages: tuple[StageProgram, ...]
    micro_batches: int
    schedule: ScheduleSpec
    seconds: float
    """Of a step, the optimizer apart."""

    def __repr__(self) -> str:
        shares = " | ".join(str(len(stage.devices)) for stage in self.stages)
        return f"{self.graph.name} in {len(self.stages)} stages on {shares} devices: {self.seconds:.6g} s"


def price_stages(
    graph: Graph,
    forward: Sequence[int],
    groups: Sequence[DeviceGroup],
    *,
    bandwidths: Sequence[float],
    micro_batches: int,
    schedule: ScheduleSpec,
) -> tuple[Parts, tuple[StageProgram, ...]]:
    """The cheapest program of every stage, for a forward that is cut as given; ``bandwidths`` join stages."""
    parts = cut_into_parts(graph, forward)
    assert len(parts.parts) == len(groups)
    depth = default_depth(schedule, len(groups), micro_batches)
    stages = []
    for number, (part, group) in enumerate(zip(parts.parts, groups, strict=True)):
        pricing = Pricing(group=group, micro_batches=micro_batches, in_flight=depth[number])
        program = find_program(part.graph, pricing, rounds=ROUNDS)
        stages.append(_timed(program, pricing, _shared_seconds(graph, parts, number, bandwidths)))
    return parts, tuple(stages)


def _shared_seconds(graph: Graph, parts: Parts, stage: int, bandwidths: Sequence[float]) -> float:
    """Gradients of parameters that several stages hold: summed between them over the narrowest network between."""
    seconds = 0.0
    for parameter, holders in parts.shared:
        if stage in holders:
            slowest = min(bandwidths[min(holders) : max(holders)])
            seconds += 2 * graph.values[parameter].num_bytes / slowest
    return seconds


def _timed(program: Program, pricing: Pricing, shared: float) -> StageProgram:
    """(1) and (2)."""
    seconds, moving = dict.fromkeys(Phase, 0.0), dict.fromkeys(Phase, 0.0)
    for node, spent in zip(program.graph.nodes, program.row_seconds, strict=True):
        seconds[node.phase] += spent
    sync = shared
    gradients = {gradient for _, gradient in program.graph.gradients}
    for move in program.moves:
        if move.step.kind is Collective.ALL_REDUCE and move.value in gradients:
            sync += pricing.micro_batches * move.seconds
        else:
            seconds[program.phase(move)] += move.seconds
            moving[program.phase(move)] += move.seconds
    return StageProgram(
        program=program,
        pricing=pricing,
        forward_seconds=seconds[Phase.FORWARD],
        backward_seconds=seconds[Phase.BACKWARD],
        sync_seconds=sync,
        forward_moving=moving[Phase.FORWARD],
        backward_moving=moving[Phase.BACKWARD],
        shared_seconds=shared,
    )


def estimate(stages: Sequence[StageProgram], parts: Parts, bandwidths: Sequence[float], micro_batches: int) -> float:
    """(3); ``bandwidths`` are those between a stage and the next."""
    passing = [
        (up + down) / bandwidth
        for up, down, bandwidth in zip(parts.up_bytes, parts.down_bytes, bandwidths, strict=True)
    ]
    steady = max(stage.seconds for stage in stages)
    fill = sum(stage.seconds for stage in stages) + sum(passing)
    return (micro_batches - 1) * max(steady, *passing, 0.0) + fill + max(stage.sync_seconds for stage in stages)


class _Tasks:
    """A pipeline as tasks. In a cluster that changes, a stage's collectives are work for a device that stands for its
    network, behind the real ones, and sums between stages for one behind all of these."""

    def __init__(
        self, stages: Sequence[StageProgram], parts: Parts, cluster: Cluster, micro_batches: int, schedule: ScheduleSpec
    ) -> None:
        self.stages, self.parts = stages, parts
        self.is_calm = is_calm(cluster)
        self.rows = build_schedule(schedule, len(stages), micro_batches).rows
        self.devices = tuple(name for stage in stages for name in stage.devices)
        self.speeds = [cluster.device(name).speed.at(0.0) for name in self.devices]
        self.first = [sum(len(stage.devices) for stage in stages[:number]) for number in range(len(stages))]
        self.tasks: list[Task] = []
        self.last: list[int | None] = [None] * len(self.devices)
        self.arrived: dict[Action, tuple[int, ...]] = {}
        """Per action, what it waits for besides its own devices."""

    def graph(self) -> TaskGraph:
        todo = [list(row) for row in self.rows]
        while any(todo):
            stage = next(s for s, row in enumerate(todo) if row and self._is_ready(row[0]))
            self._run(todo[stage].pop(0))
        for number, one in enumerate(self.stages):
            if one.sync_seconds > 0 and self.is_calm:
                self._compute(number, SpanKind.UPDATE, one.sync_seconds, ())  # the engine plays collectives by flows
            elif one.sync_seconds > 0:
                self._move(number, SpanKind.UPDATE, one.sync_seconds - one.shared_seconds)
                self._move(number, SpanKind.UPDATE, one.shared_seconds, between=True)
        networks = () if self.is_calm else network_names(self.stages)
        return TaskGraph(devices=(*self.devices, *networks), tasks=tuple(self.tasks))

    def _is_ready(self, action: Action) -> bool:
        if action.kind is ActionKind.FORWARD:
            return action.stage == 0 or action in self.arrived
        return action.stage == len(self.stages) - 1 or action in self.arrived

    def _run(self, action: Action) -> None:
        stage = self.stages[action.stage]
        ahead = action.kind is ActionKind.FORWARD
        seconds = stage.forward_seconds if ahead else stage.backward_seconds
        kind = SpanKind.FORWARD if ahead else SpanKind.BACKWARD
        moving = 0.0 if self.is_calm else stage.forward_moving if ahead else stage.backward_moving
        done = self._compute(action.stage, kind, seconds - moving, self.arrived.get(action, ()))
        if moving:
            done = self._move(action.stage, kind, moving)
        target = action.stage + (1 if ahead else -1)
        if 0 <= target < len(self.stages):
            boundary = min(action.stage, target)
            amount = self.parts.up_bytes[boundary] if ahead else self.parts.down_bytes[boundary]
            flows = self._flows(action.stage, target, amount)
            self.tasks.append(Task(kind=SpanKind.TRANSFER, flows=flows, after=done))
            self.arrived[Action(target, action.kind, action.micro_batch)] = (len(self.tasks) - 1,)

    def _compute(self, stage: int, kind: SpanKind, seconds: float, after: tuple[int, ...]) -> tuple[int, ...]:
        done = []
        for device in range(self.first[stage], self.first[stage] + len(self.stages[stage].devices)):
            own = self.last[device]
            waits = (*after, *((own,) if own is not None else ()))
            work = seconds * self.speeds[device]  # priced at the speed of time 0
            self.tasks.append(Task(kind=kind, device=device, seconds=work, after=waits, stage=stage))
            self.last[device] = len(self.tasks) - 1
            done.append(len(self.tasks) - 1)
        return tuple(done)

    def _move(self, stage: int, kind: SpanKind, seconds: float, *, between: bool = False) -> tuple[int, ...]:
        """A collective of all devices of a stage, once all of them are there."""
        own = range(self.first[stage], self.first[stage] + len(self.stages[stage].devices))
        network = len(self.devices) + (len(self.stages) if between else stage)
        after = tuple(sorted({task for device in own if (task := self.last[device]) is not None}))
        self.tasks.append(Task(kind=kind, device=network, seconds=seconds, after=after, stage=stage))
        for device in own:
            self.last[device] = len(self.tasks) - 1
        return (len(self.tasks) - 1,)

    def _flows(self, source: int, target: int, amount: float) -> tuple[Flow, ...]:
        """Every device of the wider group to or from one of the other."""
        here, there = len(self.stages[source].devices), len(self.stages[target].devices)
        wide = max(here, there)
        return tuple(
            Flow(self.first[source] + place % here, self.first[target] + place % there, amount / wide)
            for place in range(wide)
        )


def play(
    stages: Sequence[StageProgram], parts: Parts, cluster: Cluster, *, micro_batches: int, schedule: ScheduleSpec
) -> Timeline:
    """One step in the exact engine."""
    tasks = _Tasks(stages, parts, cluster, micro_batches, schedule).graph()
    return simulate_exact(tasks, cluster if is_calm(cluster) else _with_networks(cluster, stages))


def network_names(stages: Sequence[StageProgram]) -> tuple[str, ...]:
    """Of the devices that stand for the network of each stage, and between all of them."""
    return (*(f"network of stage {number}" for number in range(len(stages))), "network between stages")


def _with_networks(cluster: Cluster, stages: Sequence[StageProgram]) -> Cluster:
    ends = [(one.devices[-1], other.devices[0]) for one, other in itertools.pairwise(stages)]
    paces = [network_pace(stage.program, stage.pricing, cluster) for stage in stages]
    named = zip(network_names(stages), [*paces, hand_over_pace(ends, cluster)], strict=True)
    like = cluster.device(stages[0].devices[0])
    return replace(cluster, devices=(*cluster.devices, *(replace(like, name=name, speed=pace) for name, pace in named)))
