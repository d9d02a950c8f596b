"""Run the controller in the simulator: hours of a changing cluster, step by step.

A step that begins at t takes the seconds that the exact engine computes on the cluster from t on.
Its measurements of links and devices are those of a job (``signals``): the median over the work
done, so that a pause without work is not part of it. A move takes what its bytes need on the links
as they are from then on, not what the controller predicted. If the cluster does not change during a
step, its time depends only on the state of the cluster, so it is simulated once for each plan and
state.

A device or link that is lost holds a step up until it returns, or permanently. A controller that
may re-plan notices after ``NOTICE`` seconds and, if there is another plan for the remaining
devices, abandons the step and repeats it under that plan.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

from argosy.adapt.controller import (
    SEARCHED,
    AdaptationLevel,
    Controller,
    ControllerLimits,
    Decision,
)
from argosy.adapt.predictor import Predictor, plan_key
from argosy.adapt.watch import in_grains
from argosy.choose.policy import schedules_that_fit
from argosy.cluster.lasting import at_moment, from_moment, within_reach
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.cost.compute import ComputeModel
from argosy.cost.moving import DeviceGroup, migration
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan
from argosy.workload.chain import Chain

# Seconds after which a controller notices that a step does not continue.
NOTICE = 10.0
# The oracle tries this many plans for a step, those that were best in a similar state.
_PLAYED = 4


@dataclass(frozen=True, kw_only=True)
class PlayedStep:
    """A step that was simulated as part of a run."""

    start: float
    seconds: float
    plan: Plan
    was_lost: bool = False
    """Whether the step was abandoned and repeated."""


@dataclass(frozen=True, kw_only=True)
class PolicyRun:
    """The steps and decisions that a policy led to."""

    steps: tuple[PlayedStep, ...]
    decisions: tuple[Decision, ...]
    end: float
    """Seconds at which the last step ended, moves included; if the run got stuck, when it was
    abandoned."""

    @property
    def samples_per_second(self) -> float:
        done = sum(step.plan.global_batch for step in self.steps if not step.was_lost)
        return done / self.end if self.end else 0.0


class Playback:
    """A cluster together with the traces that a simulation runs under."""

    def __init__(self, chain: Chain, cluster: Cluster, model: ComputeModel) -> None:
        self.chain, self.cluster, self.model = chain, cluster, model
        speeds = [device.speed for device in cluster.devices]
        traces = [trace for link in cluster.links for trace in (link.bandwidth, link.latency)]
        self.moving = [trace for trace in (*traces, *speeds) if not trace.is_constant]
        bandwidths = [link.bandwidth for link in cluster.links]
        self.losing = [trace for trace in (*bandwidths, *speeds) if 0 in trace.values]
        """Traces of links and devices that are lost at some time."""
        self.predictor = Predictor(chain, cluster, model)
        self.known: dict[tuple[object, ...], float] = {}

    def next_change(self, time: float) -> float:
        return min((trace.next_change(time) for trace in self.moving), default=math.inf)

    def seconds(self, plan: Plan, time: float) -> float:
        """Return the seconds of a step that begins at ``time``."""
        lasting = self.lasting(plan, time)
        if time + lasting <= self.next_change(time):
            return lasting
        return self.predictor.on(plan, from_moment(self.cluster, time))

    def lasting(self, plan: Plan, time: float) -> float:
        """Return the seconds of a step if everything stayed as it is at ``time``."""
        state = tuple(trace.at(time) for trace in self.moving)
        key = (*plan_key(plan), state)
        if key not in self.known:
            self.known[key] = self.predictor.on(plan, at_moment(self.cluster, time))
        return self.known[key]

    def move_seconds(self, old: Plan, new: Plan, time: float, known: Set[DeviceGroup]) -> float:
        """Return the seconds of a move that begins at ``time``; ``known`` are the process groups
        that exist."""
        moves = migration(old, new, self.chain, self.cluster, time)
        if moves.is_free:
            return 0.0
        before_step = moves.seconds_before_step(self.cluster, time, known)
        if math.isinf(before_step):
            return math.inf
        later = from_moment(self.cluster, time + before_step)
        return before_step + self.predictor.exposed_on(new, moves.state, later)

    def seen(
        self, plan: Plan, start: float, end: float
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return what a job measures while it runs: bandwidths of the links in use, and speeds."""
        used = {self.cluster.device(name).node for name in plan.devices}
        rates = {
            link.name: seen_level(link.bandwidth, start, end)
            for link in self.cluster.links
            if link.edge.partition(".")[0] in used or "." not in link.edge
        }
        speeds = {
            device.name: seen_level(device.speed, start, end) for device in self.cluster.devices
        }
        return rates, speeds

    def stuck_from(self, plan: Plan, start: float, end: float) -> float:
        """Return from when a step between two moments waits for a link or device that is lost for
        more than ``NOTICE`` seconds; infinity if it does not."""
        for time in sorted(
            {start, *(at for t in self.losing for at in t.knots_between(start, end))}
        ):
            is_lost = any(
                trace.at(time) == 0 and trace.next_change(time) > time + NOTICE
                for trace in self.losing
            )
            if is_lost and time + NOTICE < end and math.isinf(self.lasting(plan, time)):
                return time
        return math.inf


def seen_level(trace: Trace, start: float, end: float) -> float:
    """Return the level at which half of the work between two moments was done, at most.

    >>> seen_level(Trace.from_steps([(2.0, 0.0), (9.0, 1.0)], initial=1.0), 0.0, 10.0)
    1.0
    """
    edges = [start, *trace.knots_between(start, end), end]
    levels = sorted((trace.at(begin), last - begin) for begin, last in pairwise(edges))
    work = sum(level * seconds for level, seconds in levels)
    if end <= start or work == 0:
        return trace.at(start)
    done = 0.0
    for level, seconds in levels:
        done += level * seconds
        if done >= work / 2:
            return level
    return levels[-1][0]


def play(
    stage: Playback,
    plan: Plan,
    *,
    until: float,
    limits: ControllerLimits,
    schedules: Sequence[Plan] = (),
    replan: Callable[[Cluster], Sequence[Plan]] | None = None,
    most_steps: float = math.inf,
) -> PolicyRun:
    """Run a policy from time 0 until the first step that would begin after ``until``, or for
    ``most_steps`` steps.

    ``schedules`` is the plan under the schedules that it, and plans after it, may switch to if they
    fit.
    """
    specs = [variant.schedule for variant in schedules if not variant.schedule.kind.is_chunked]
    controller = Controller(
        plan,
        stage.chain,
        stage.cluster,
        limits=limits,
        model=stage.model,
        schedules=schedules,
        replan=replan,
        variants=lambda other: schedules_that_fit(other, stage.chain, stage.cluster, specs),
    )
    clock, steps = 0.0, list[PlayedStep]()
    while clock < until and len(steps) < most_steps:
        current = controller.plan
        seconds = stage.seconds(current, clock)
        stuck = stage.stuck_from(current, clock, min(clock + seconds, until))
        if limits.reach is AdaptationLevel.FULL and math.isfinite(stuck):
            end, lost = _give_up(stage, controller, clock, stuck + NOTICE, len(steps))
            if controller.plan is not current:
                steps.append(lost)
                clock = end
                continue
        if math.isinf(seconds):
            clock = until
            break
        steps.append(PlayedStep(start=clock, seconds=seconds, plan=current))
        steps_left = min(
            math.ceil(max(0.0, until - clock - seconds) / seconds), most_steps - len(steps)
        )
        controller.limits = replace(limits, horizon=int(min(limits.horizon, steps_left)))
        clock = _observe(stage, controller, steps[-1], len(steps))
    end = clock if math.isfinite(clock) else until
    return PolicyRun(steps=tuple(steps), decisions=tuple(controller.log), end=end)


def _observe(stage: Playback, controller: Controller, step: PlayedStep, number: int) -> float:
    """Let the controller decide after a step; return when the next one begins."""
    end = step.start + step.seconds
    rates, speeds = stage.seen(step.plan, step.start, end)
    later = stage.seen(step.plan, step.start + step.seconds / 2, end)
    known = frozenset(controller.groups)
    controller.after_step(number, step.seconds, rates, speeds, last=later[0] | later[1])
    return end + stage.move_seconds(step.plan, controller.plan, end, known)


def _give_up(
    stage: Playback, controller: Controller, clock: float, end: float, number: int
) -> tuple[float, PlayedStep]:
    """Re-plan for the devices that remain at ``end``, when the controller notices that a step does
    not continue."""
    lost = PlayedStep(start=clock, seconds=end - clock, plan=controller.plan, was_lost=True)
    rates, speeds = stage.seen(controller.plan, end, end)
    known = frozenset(controller.groups)
    controller.after_step(number, end - clock, rates, speeds)
    return end + stage.move_seconds(lost.plan, controller.plan, end, known), lost


def play_oracle(
    stage: Playback,
    plans: Sequence[Plan],
    *,
    until: float,
    replan: Callable[[Cluster], Sequence[Plan]] | None = None,
    most_steps: float = math.inf,
) -> PolicyRun:
    """Run an oracle that knows the future and moves for free.

    Before every step it takes the best plan for what follows, among those given and those found for
    the states that it sees; similar states are searched once.
    """
    clock, steps = 0.0, list[PlayedStep]()
    candidates = list(plans)
    ranked: dict[tuple[float, ...], list[tuple[float, int]]] = {}
    while clock < until and len(steps) < most_steps:
        promising: set[int] = set()
        for moment in {clock, min(stage.next_change(clock), until)}:
            state = tuple(in_grains(trace.at(moment), SEARCHED) for trace in stage.moving)
            if replan is not None and state not in ranked:
                with contextlib.suppress(InfeasibleError):
                    candidates += replan(within_reach(at_moment(stage.cluster, moment)))
            known = ranked.setdefault(state, [])
            for index in range(len(known), len(candidates)):
                known.append((stage.lasting(candidates[index], moment), index))
            promising |= {index for _, index in sorted(known)[:_PLAYED]}
        seconds, best = min((stage.seconds(candidates[index], clock), index) for index in promising)
        if math.isinf(seconds):
            clock = until
            break
        steps.append(PlayedStep(start=clock, seconds=seconds, plan=candidates[best]))
        clock += seconds
    return PolicyRun(steps=tuple(steps), decisions=(), end=clock)
