"""Why a plan takes as long as it does, and what would make it faster: questions put to the simulator.

With T the seconds of the plan's first iteration:

    (1)  peak memory of a device = weights + gradients + optimizer + activations + buffers, when it holds most
    (2)  load of a stage         = time that its busiest device computes, or else takes part in collectives, over T
    (3)  bottleneck              = the stage whose computation and collectives make up most of the critical path
    (4)  gain of a change        = T / T' - 1, T' being simulated with that change and nothing else

Buffers are what (1) leaves over: tensors that have arrived and are not yet used, and what a backward computes again. A
gain is that of this plan; a planner that knew of the change might find a better one.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from argosy.cluster.topology import Cluster, Link
from argosy.cluster.trace import Trace
from argosy.cost.compute import ComputeModel, Portion, stage_seconds
from argosy.cost.memory import StateBytes, activation_bytes, state_bytes
from argosy.errors import ArgosyError, InfeasibleError
from argosy.plan.plan import Plan, Predicted, Recompute, Replica, Stage
from argosy.schedule import ScheduleKind
from argosy.sim.simulate import simulate
from argosy.timeline import Span, SpanKind, Timeline
from argosy.workload.chain import Chain

MORE_BANDWIDTH = 1e9
"""Bytes/s that an edge gets in a what-if."""
MORE_SPEED = 1.1
"""Times the speed of the bottleneck's devices in a what-if."""
MORE_MEMORY = 1e9
"""Bytes that each device gets in a what-if."""
_MOST_EDGES = 3


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """(1): what a device holds when it holds most, in bytes."""

    device: str
    kind: str
    capacity: float
    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def peak(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def free(self) -> float:
        """Negative where it would run out."""
        return self.capacity - self.peak


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """(2) and (3), as shares of the iteration."""

    stage: int
    computing: float
    exchanging: float
    critical: float
    """Of the critical path."""

    @property
    def busy(self) -> float:
        return self.computing + self.exchanging


@dataclass(frozen=True, kw_only=True)
class EdgeLoad:
    """How much of what an edge could carry it did, on its busiest link."""

    edge: str
    utilisation: float


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """One change, and what it would buy."""

    change: str
    seconds: float
    """Of an iteration with it."""
    gain: float
    """(4); negative where it would be slower."""
    missing: float = 0.0
    """Bytes that some device lacks for it; 0 where it fits."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What the simulator says about a plan."""

    plan: Plan
    timeline: Timeline
    """Its first iteration."""
    memory: tuple[DeviceMemory, ...]
    loads: tuple[StageLoad, ...]
    edges: tuple[EdgeLoad, ...]
    """Those that carried anything, the busiest first."""
    improvements: tuple[WhatIf, ...]
    """Faster edges and devices."""
    settings: tuple[WhatIf, ...]
    """Cheaper settings that need more memory, the one that lacks least first."""
    additions: tuple[WhatIf, ...]
    """Left-out devices put to use."""

    @property
    def seconds(self) -> float:
        return self.timeline.iteration_ends[0]

    @property
    def bottleneck(self) -> StageLoad:
        return bottleneck(self.loads)


def explain_plan(plan: Plan, chain: Chain, cluster: Cluster, *, model: ComputeModel | None = None) -> Explanation:
    """Simulate a plan that ``check_plan`` passes as it is, and again with each change."""
    question = _Question(plan, chain, cluster, model or ComputeModel())
    loads, edges = stage_loads(plan, question.timeline), edge_loads(cluster, question.timeline)
    slowest = bottleneck(loads).stage
    busiest = max(loads, key=lambda load: load.busy).stage
    return Explanation(
        plan=plan,
        timeline=question.timeline,
        memory=memory_stack(plan, chain, cluster, question.timeline),
        loads=loads,
        edges=edges,
        improvements=(*question.faster_stages({slowest, busiest}), *question.wider_edges(edges)),
        settings=tuple(sorted(question.settings(slowest), key=lambda one: (one.missing, -one.gain))),
        additions=tuple(question.additions(slowest)),
    )


def with_prediction(plan: Plan, chain: Chain, cluster: Cluster, *, model: ComputeModel | None = None) -> Plan:
    """The plan with what its first iteration says about it; a time that it already predicts stays."""
    timeline = _first_iteration(plan, chain, cluster, model or ComputeModel())
    seconds = plan.predicted.iteration_seconds if plan.predicted else timeline.iteration_ends[0]
    load = bottleneck(stage_loads(plan, timeline))
    predicted = Predicted(
        iteration_seconds=seconds,
        samples_per_second=plan.global_batch / seconds,
        peak_memory_bytes=tuple(timeline.peak_memory().items()),
        bottleneck=f"stage {load.stage}, busy for {100 * load.busy:.0f} % of the time",
    )
    return replace(plan, predicted=predicted)


def memory_stack(plan: Plan, chain: Chain, cluster: Cluster, timeline: Timeline) -> tuple[DeviceMemory, ...]:
    """(1) for every device in use."""
    states: dict[str, list[StateBytes]] = defaultdict(list)
    kept: dict[tuple[str, int], float] = {}
    for index, stage in enumerate(plan.stages):
        for replica in stage.replicas:
            for name, share in zip(replica.devices, replica.shares, strict=True):
                states[name].append(state_bytes(chain, stage, share))
                kept[name, index] = activation_bytes(chain, stage, replica.samples, share)
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.where].append(span)
    return tuple(
        _stack(cluster, name, states[name], kept, max(steps, key=lambda step: step[1]), spans[name])
        for name, steps in timeline.memory
    )


def _stack(
    cluster: Cluster,
    name: str,
    states: Sequence[StateBytes],
    kept: dict[tuple[str, int], float],
    most: tuple[float, float],
    spans: Sequence[Span],
) -> DeviceMemory:
    when, peak = most
    kind = cluster.device(name).kind
    weights, gradients, optimizer = (
        sum(getattr(state, part) for state in states) for part in ("weights", "gradients", "optimizer")
    )
    activations = sum(kept[name, span.stage] * _in_flight(span, when) for span in spans if span.stage is not None)
    rest = peak - weights - gradients - optimizer - activations
    return DeviceMemory(
        device=name,
        kind=kind.name,
        capacity=kind.memory,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        buffers=max(rest, 0.0),  # what is below 0 is rounding
    )


def _in_flight(span: Span, when: float) -> int:
    """What a span adds to the micro-batches whose activations are held at a moment."""
    if span.kind is SpanKind.FORWARD:
        return int(span.start <= when)
    frees = span.kind in (SpanKind.BACKWARD, SpanKind.WEIGHT_GRADIENT)
    return -int(frees and span.end <= when)


def stage_loads(plan: Plan, timeline: Timeline) -> tuple[StageLoad, ...]:
    """(2) and (3) for every stage, in order."""
    computing: dict[str, list[tuple[float, float]]] = defaultdict(list)
    exchanging: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind is SpanKind.COLLECTIVE:
            for name in span.where.split(">"):
                exchanging[name].append((span.start, span.end))
        elif span.kind is not SpanKind.TRANSFER:
            computing[span.where].append((span.start, span.end))
    total, critical = timeline.iteration_ends[0], _critical_seconds(timeline)
    loads = []
    for index, stage in enumerate(plan.stages):
        shares = [
            (_covered([*computing[name], *exchanging[name]]) / total, _covered(computing[name]) / total)
            for name in stage.devices
        ]
        busy, computed = max(shares)
        on_path = critical.get(index, 0.0) / total
        loads.append(StageLoad(stage=index, computing=computed, exchanging=busy - computed, critical=on_path))
    return tuple(loads)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that at least one of the intervals covers."""
    covered = reach = 0.0
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return covered


def _critical_seconds(timeline: Timeline) -> dict[int, float]:
    """Per stage, seconds of the critical path that it computes or takes part in collectives."""
    seconds: dict[int, float] = defaultdict(float)
    clock = 0.0
    for span in timeline.critical_path():
        if span.stage is not None and span.kind is not SpanKind.TRANSFER:
            seconds[span.stage] += span.end - max(span.start, min(clock, span.end))
        clock = span.end
    return seconds


def bottleneck(loads: Iterable[StageLoad]) -> StageLoad:
    """(3); the earlier stage on a tie."""
    return max(loads, key=lambda load: load.critical)


def edge_loads(cluster: Cluster, timeline: Timeline) -> tuple[EdgeLoad, ...]:
    edge_of = {link.name: link.edge for link in cluster.links}
    most: dict[str, float] = {}
    for use in timeline.links:
        most[edge_of[use.link]] = max(most.get(edge_of[use.link], 0.0), use.utilisation)
    loads = [EdgeLoad(edge=edge, utilisation=share) for edge, share in most.items()]
    return tuple(sorted(loads, key=lambda load: (-load.utilisation, load.edge)))


def with_wider_edges(cluster: Cluster, edges: Iterable[str], more: float) -> Cluster:
    """The cluster with so many bytes/s more on every link of these edges, except while a link is down."""
    chosen = frozenset(edges)

    def widened(link: Link) -> Link:
        values = tuple(value + more if value > 0 else 0.0 for value in link.bandwidth.values)
        return replace(link, bandwidth=Trace(link.bandwidth.times, values))

    return replace(cluster, links=tuple(widened(link) if link.edge in chosen else link for link in cluster.links))


def with_faster_devices(cluster: Cluster, names: Iterable[str], factor: float) -> Cluster:
    chosen = frozenset(names)
    devices = [
        replace(device, efficiency=device.efficiency * factor) if device.name in chosen else device
        for device in cluster.devices
    ]
    return replace(cluster, devices=tuple(devices))


def cheaper_settings(stage: Stage) -> Iterator[tuple[str, Stage]]:
    """A stage with settings that save time and cost memory, and their names.

    ZeRO 1 costs no more time than 0; 2 and 3 exchange gradients and weights with every micro-batch.
    """
    order = list(Recompute)
    for recompute in order[: order.index(stage.recompute)]:
        yield f"recompute {recompute}", replace(stage, recompute=recompute)
    for zero in range(1, stage.zero if len(stage.replicas) > 1 else 1):
        yield f"zero {zero}", replace(stage, zero=zero)


def with_replica(
    plan: Plan, index: int, devices: tuple[str, ...], chain: Chain, cluster: Cluster, model: ComputeModel
) -> Plan | None:
    """The plan with one more replica of a stage, samples shared out anew by speed; None where they are too few."""
    stage = plan.stages[index]
    replicas = [*stage.replicas, Replica(devices=devices, samples=1)]
    if len(replicas) > plan.micro_batch_size or plan.schedule.kind is ScheduleKind.INTERLEAVED:
        return None
    pace = [_seconds_per_sample(chain, cluster, model, stage, replica) for replica in replicas]
    samples = [1] * len(replicas)
    for _ in range(plan.micro_batch_size - len(replicas)):
        soonest = min(range(len(replicas)), key=lambda at: ((samples[at] + 1) * pace[at], at))
        samples[soonest] += 1
    shared = tuple(replace(replica, samples=count) for replica, count in zip(replicas, samples, strict=True))
    stages = [replace(one, replicas=shared) if at == index else one for at, one in enumerate(plan.stages)]
    left_out = tuple(left for left in plan.left_out if left.device not in devices)
    return replace(plan, stages=tuple(stages), left_out=left_out)


def _seconds_per_sample(chain: Chain, cluster: Cluster, model: ComputeModel, stage: Stage, replica: Replica) -> float:
    portions = [
        Portion(device=cluster.device(name), samples=1, share=share, width=replica.width)
        for name, share in zip(replica.devices, replica.shares, strict=True)
    ]
    return max(sum(stage_seconds(model, chain, stage, portion)) for portion in portions)


def _first_iteration(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> Timeline:
    timeline = simulate(plan, chain, cluster, model=model)
    if not timeline.iteration_ends:
        raise InfeasibleError(f"{plan.model.name} on {cluster.name}: no iteration ends, because {timeline.stalled}")
    return timeline


class _Question:
    """A plan on its cluster, and how it does when something is changed."""

    def __init__(self, plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> None:
        self.plan = plan
        self.chain = chain
        self.cluster = cluster
        self.model = model
        self.timeline = _first_iteration(plan, chain, cluster, model)

    def _what_if(self, change: str, *, plan: Plan | None = None, cluster: Cluster | None = None) -> WhatIf:
        where = cluster or self.cluster
        timeline = _first_iteration(plan or self.plan, self.chain, where, self.model)
        seconds = timeline.iteration_ends[0]
        lacks = [held - where.device(name).kind.memory for name, held in timeline.peak_memory().items()]
        gain = self.timeline.iteration_ends[0] / seconds - 1
        return WhatIf(change=change, seconds=seconds, gain=gain, missing=max(0.0, *lacks))

    def faster_stages(self, stages: Iterable[int]) -> Iterator[WhatIf]:
        for stage in sorted(stages):
            faster = with_faster_devices(self.cluster, self.plan.stages[stage].devices, MORE_SPEED)
            yield self._what_if(f"10 % more speed of stage {stage}'s devices", cluster=faster)

    def wider_edges(self, loads: Sequence[EdgeLoad]) -> Iterator[WhatIf]:
        """The busiest edges; those of one sort that are equally busy together, because one alone would not help."""
        alike: dict[tuple[str, float], list[str]] = defaultdict(list)
        for load in loads:
            alike[load.edge.rpartition(".")[2], round(load.utilisation, 2)].append(load.edge)
        for edges in list(alike.values())[:_MOST_EDGES]:
            wider = with_wider_edges(self.cluster, edges, MORE_BANDWIDTH)
            others = f" and {len(edges) - 1} like it" if len(edges) > 1 else ""
            yield self._what_if(f"1 GB/s more on {edges[0]}{others}", cluster=wider)

    def settings(self, slowest: int) -> Iterator[WhatIf]:
        """Cheaper settings of the bottleneck, and of all stages that have them."""
        everywhere: dict[str, list[Stage]] = {}
        for index, stage in enumerate(self.plan.stages):
            for name, cheaper in cheaper_settings(stage):
                stages = everywhere.setdefault(name, list(self.plan.stages))
                stages[index] = cheaper
                if index == slowest:
                    alone = [cheaper if at == index else one for at, one in enumerate(self.plan.stages)]
                    yield self._what_if(f"{name} in stage {index}", plan=replace(self.plan, stages=tuple(alone)))
        for name, stages in everywhere.items():
            changed = [at for at, (new, old) in enumerate(zip(stages, self.plan.stages, strict=True)) if new != old]
            if changed != [slowest]:
                where = f"stage {changed[0]}" if len(changed) == 1 else f"stages {', '.join(map(str, changed))}"
                yield self._what_if(f"{name} in {where}", plan=replace(self.plan, stages=tuple(stages)))

    def additions(self, stage: int) -> Iterator[WhatIf]:
        """Left-out devices, one group of each kind, as a further replica of a stage."""
        width = self.plan.stages[stage].replicas[0].width
        idle: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for left in self.plan.left_out:
            device = self.cluster.device(left.device)
            idle[device.kind.name][device.node].append(device.name)
        for nodes in idle.values():
            group = next((tuple(names[:width]) for names in nodes.values() if len(names) >= width), ())
            with contextlib.suppress(ArgosyError):  # no route, or no such dtype there: the planner's reason says so
                plan = with_replica(self.plan, stage, group, self.chain, self.cluster, self.model) if group else None
                if plan is not None:
                    yield self._what_if(f"{', '.join(group)} as a further replica of stage {stage}", plan=plan)
