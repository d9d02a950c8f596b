"""The controller against the simulator: hours of a changing cluster, step by step.

A step that begins at t takes what the exact engine says on the cluster from t on. What it saw of links and devices is
what they really were on average while it ran. Where a step sees no change, its time depends only on the state of the
cluster, so it is simulated once for each plan and state.

A device or link that goes away holds a step up until it returns, or for ever. Whoever may re-plan notices after
``NOTICE`` seconds, gives the step up, and repeats it under another plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from argosy.adapt.controller import Controller, Decision, Limits, Reach, iteration_seconds
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.plan.plan import Plan
from argosy.workload.chain import Chain

NOTICE = 10.0
_STUCK = 3.0
"""A step that takes so many times longer than the one before, while something is down, is held up."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a course."""

    start: float
    seconds: float
    plan: Plan
    was_lost: bool = False
    """Given up and repeated."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """What came of a policy."""

    steps: tuple[Step, ...]
    decisions: tuple[Decision, ...]
    end: float
    """When the last step was done, moves included."""

    @property
    def samples_per_second(self) -> float:
        done = sum(step.plan.global_batch for step in self.steps if not step.was_lost)
        return done / self.end if self.end else 0.0


class Stage:
    """A cluster with a future, on which plans are played."""

    def __init__(self, chain: Chain, cluster: Cluster, model: ComputeModel) -> None:
        self.chain, self.cluster, self.model = chain, cluster, model
        self.moving = [one.bandwidth for one in cluster.links if not one.bandwidth.is_constant]
        self.moving += [one.speed for one in cluster.devices if not one.speed.is_constant]
        self.known: dict[tuple[object, ...], float] = {}

    def next_change(self, time: float) -> float:
        return min((trace.next_change(time) for trace in self.moving), default=math.inf)

    def seconds(self, plan: Plan, time: float) -> float:
        """Of a step that begins at ``time``."""
        state = tuple(trace.at(time) for trace in self.moving)
        key = (plan.stages, plan.schedule, plan.micro_batch_size, state)
        if key not in self.known:
            self.known[key] = iteration_seconds(plan, self.chain, self._from(time, calm=True), self.model)
        if time + self.known[key] <= self.next_change(time):
            return self.known[key]
        return iteration_seconds(plan, self.chain, self._from(time, calm=False), self.model)

    def _from(self, time: float, *, calm: bool) -> Cluster:
        """The cluster from ``time`` on; calm: as it is then, for ever."""
        horizon = [
            trace.after(time) if not calm else type(trace).constant(trace.at(time))
            for trace in [link.bandwidth for link in self.cluster.links]
        ]
        links = tuple(
            replace(link, bandwidth=trace, latency=link.latency.after(time))
            for link, trace in zip(self.cluster.links, horizon, strict=True)
        )
        devices = tuple(
            replace(d, speed=type(d.speed).constant(d.speed.at(time)) if calm else d.speed.after(time))
            for d in self.cluster.devices
        )
        return replace(self.cluster, links=links, devices=devices)

    def seen(self, plan: Plan, start: float, end: float) -> tuple[dict[str, float], dict[str, float]]:
        """What a job measures while it runs: mean bandwidths, and mean speeds of the devices in use."""
        used = {self.cluster.device(name).node for name in plan.devices}
        rates = {
            link.name: link.bandwidth.mean(start, end)
            for link in self.cluster.links
            if link.edge.partition(".")[0] in used or "." not in link.edge
        }
        speeds = {device.name: device.speed.mean(start, end) for device in self.cluster.devices}
        return rates, speeds

    def something_is_down(self, plan: Plan, start: float, end: float) -> bool:
        used = set(plan.devices)
        traces = [device.speed for device in self.cluster.devices if device.name in used]
        traces += [link.bandwidth for link in self.cluster.links]
        return any(
            trace.at(time) == 0 for trace in traces for time in (start, *(t for t in trace.times if start < t < end))
        )


def play(
    stage: Stage,
    plan: Plan,
    *,
    until: float,
    limits: Limits,
    schedules: Sequence[Plan] = (),
    replan: Callable[[Cluster], Plan] | None = None,
) -> Course:
    """A policy from time 0 until the first step that would begin after ``until``."""
    controller = Controller(
        plan, stage.chain, stage.cluster, limits=limits, model=stage.model, schedules=schedules, replan=replan
    )
    clock, steps, usual = 0.0, list[Step](), math.inf
    while clock < until:
        current = controller.plan
        seconds = stage.seconds(current, clock)
        held_up = seconds > _STUCK * usual and stage.something_is_down(current, clock, clock + min(seconds, until))
        if held_up and limits.reach is Reach.FULL:
            clock, lost = _give_up(stage, controller, clock, len(steps))
            steps.append(lost)
            if controller.plan is current:
                break
            continue
        if math.isinf(seconds):
            break
        steps.append(Step(start=clock, seconds=seconds, plan=current))
        usual = min(usual, seconds)
        rates, speeds = stage.seen(current, clock, clock + seconds)
        decision = controller.after_step(len(steps), seconds, rates, speeds)
        clock += seconds + decision.moving
    return Course(steps=tuple(steps), decisions=tuple(controller.log), end=clock)


def _give_up(stage: Stage, controller: Controller, clock: float, number: int) -> tuple[float, Step]:
    """Notice that a step does not go on, and re-plan for who is left."""
    change = stage.next_change(clock)
    gone = clock if math.isinf(change) or stage.something_is_down(controller.plan, clock, clock) else change
    end = gone + NOTICE
    lost = Step(start=clock, seconds=end - clock, plan=controller.plan, was_lost=True)
    controller.last_change = -math.inf
    rates, speeds = stage.seen(controller.plan, end, end)
    decision = controller.after_step(number, end - clock, rates, speeds)
    return end + decision.moving, lost


def play_oracle(
    stage: Stage, plans: Sequence[Plan], *, until: float, replan: Callable[[Cluster], Plan] | None = None
) -> Course:
    """Whoever knows the future and moves for nothing: before every step the best plan for what comes."""
    clock, steps = 0.0, list[Step]()
    candidates = list(plans)
    planned: set[tuple[float, ...]] = set()
    while clock < until:
        state = tuple(trace.at(clock) for trace in stage.moving)
        if replan is not None and state not in planned:
            planned.add(state)
            candidates.append(replan(stage._from(clock, calm=True)))
        seconds, best = min(
            ((stage.seconds(plan, clock), index) for index, plan in enumerate(candidates)), default=(math.inf, 0)
        )
        if math.isinf(seconds):
            break
        steps.append(Step(start=clock, seconds=seconds, plan=candidates[best]))
        clock += seconds
    return Course(steps=tuple(steps), decisions=(), end=clock)
