"""Whether re-planning pays over a trace: one plan for all, a plan for each change, and what
hindsight would do.

Between two changes of the network, a *segment* of length l, plan p does l / T(p) iterations
(``steady``). Going from p to q at the start of a segment first takes the migration's seconds
(``cost.moving``).

    (1)  static      one plan throughout
    (2)  re-planned at a change, the plan that is best now, if what it gains while the network stays
         so for as long as
                     it has stayed on average is more than the migration costs
    (3)  oracle      most iterations over the whole trace, by a programme over segments and plans that knows the future
                     (migrations that end within their segment, and the other courses)
    (4)  a switch pays back once the new state has lasted migration x T(old) / (T(old) - T(new))
         seconds
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from argosy.choose.scenario import lasting, moments, pace, plans_of_views, without_what_changes
from argosy.cluster.lasting import at_time_zero
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import FloatArray
from argosy.cost.compute import ComputeModel
from argosy.cost.moving import Migration, migration
from argosy.plan.plan import Plan
from argosy.planner import Settings, kept_plans
from argosy.workload.chain import Chain

_PLANS_PER_VIEW = 6
_QUANTILES = (0.1, 0.3, 0.7)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One change of plan."""

    time: float
    old: Plan
    new: Plan
    migration: float
    """Seconds."""
    pays_after: float
    """(4)."""
    pays_after_steps: float
    """The same as steps under the new plan, the migration itself not counted."""


@dataclass(frozen=True, kw_only=True)
class TraceRun:
    """One way to go through the trace."""

    name: str
    iterations: float
    migrating: float
    """Seconds."""
    switches: tuple[Switch, ...]

    def mean_seconds(self, horizon: float) -> float:
        return horizon / self.iterations if self.iterations else math.inf


@dataclass(frozen=True, kw_only=True)
class Courses:
    """(1) to (3) side by side."""

    horizon: float
    plans: int
    courses: tuple[TraceRun, ...]


@dataclass(frozen=True, kw_only=True)
class CandidatePlans:
    """Plans to go through a trace with: found for time 0, for the average, for better and for
    worse."""

    plans: tuple[Plan, ...]
    for_time_0: int
    for_the_average: int


def compare_courses(
    chain: Chain,
    cluster: Cluster,
    *,
    global_batch: int,
    horizon: float,
    settings: Settings | None = None,
    model: ComputeModel | None = None,
) -> Courses:
    """How each way fares on the cluster's own traces."""
    settings, model = replace(settings or Settings(), ends_early=False), model or ComputeModel()
    choices = plans_for_trace(chain, cluster, global_batch, horizon, settings, model)
    return courses_with(choices, chain, cluster, horizon, model)


def plans_for_trace(
    chain: Chain,
    cluster: Cluster,
    global_batch: int,
    horizon: float,
    settings: Settings,
    model: ComputeModel,
) -> CandidatePlans:
    """Search the network of time 0, of the average, of better and worse times, and what never
    changes."""
    views = [at_time_zero(cluster), lasting(cluster, [cluster], horizon)]
    views += [lasting(cluster, [cluster], horizon, quantile) for quantile in _QUANTILES]
    views += [without_what_changes(cluster, [cluster])]
    search = partial(kept_plans, chain, global_batch=global_batch, settings=settings, model=model)
    found = plans_of_views(search, views, _PLANS_PER_VIEW)
    plans: list[Plan] = []
    for plan in (plan for view in found for plan in view):
        if not any(_is_same(plan, other) for other in plans):
            plans.append(plan)
    average = found[1][0] if found[1] else found[0][0]
    return CandidatePlans(
        plans=tuple(plans),
        for_time_0=_index(plans, found[0][0]),
        for_the_average=_index(plans, average),
    )


def courses_with(
    choices: CandidatePlans, chain: Chain, cluster: Cluster, horizon: float, model: ComputeModel
) -> Courses:
    """(1) to (3) with these plans, over the cluster's traces."""
    journey = _Journey(choices.plans, chain, cluster, model, horizon)
    courses = [
        journey.static("static, for time 0", choices.for_time_0),
        journey.static("static, for the average", choices.for_the_average),
        journey.replanned(choices.for_time_0),
    ]
    best = max((journey.oracle(), *courses), key=lambda course: course.iterations)
    return Courses(
        horizon=horizon, plans=len(choices.plans), courses=(*courses, replace(best, name="oracle"))
    )


def _is_same(one: Plan, other: Plan) -> bool:
    return (one.stages, one.schedule) == (other.stages, other.schedule)


def _index(plans: Sequence[Plan], plan: Plan) -> int:
    return next(index for index, other in enumerate(plans) if _is_same(plan, other))


class _Journey:
    """The trace cut into segments, with every plan's pace in each."""

    def __init__(
        self,
        plans: Sequence[Plan],
        chain: Chain,
        cluster: Cluster,
        model: ComputeModel,
        horizon: float,
    ) -> None:
        self.plans = plans
        self.chain = chain
        self.cluster = cluster
        self.starts = moments(cluster, horizon)
        self.lengths = np.diff([*self.starts, horizon])
        links = list(enumerate(cluster.links))
        self.down = [
            frozenset(at for at, link in links if link.bandwidth.at(time) == 0)
            for time in self.starts
        ]
        """Per segment."""
        paces = [pace(plan, chain, cluster, model, horizon) for plan in plans]
        self.rates = np.array([[trace.at(start) for start in self.starts] for trace in paces])
        """(plans, segments): iterations per second."""
        self.known: dict[tuple[int, int, frozenset[int]], Migration] = {}
        """By plans, and by what is down."""

    def moving(self, old: int, new: int, segment: int) -> float:
        if old == new:
            return 0.0
        time, key = self.starts[segment], (old, new, self.down[segment])
        if key not in self.known:
            self.known[key] = migration(
                self.plans[old], self.plans[new], self.chain, self.cluster, time
            )
        return self.known[key].seconds(self.cluster, time)

    def static(self, name: str, plan: int) -> TraceRun:
        """(1)."""
        return TraceRun(
            name=name, iterations=float(self.rates[plan] @ self.lengths), migrating=0.0, switches=()
        )

    def replanned(self, plan: int) -> TraceRun:
        """(2)."""
        first, path = plan, []
        for segment in range(len(self.starts)):
            best = int(self.rates[:, segment].argmax())
            stay = self.lengths[:segment].mean() if segment else self.lengths[0]
            gain = (self.rates[best, segment] - self.rates[plan, segment]) * stay
            cost = self.moving(plan, best, segment) * self.rates[best, segment]
            plan = best if gain > cost else plan
            path.append(plan)
        return self._course("re-planned", path, first)

    def oracle(self) -> TraceRun:
        """(3)."""
        value: FloatArray = self.rates[:, 0] * self.lengths[0]
        back: list[list[int]] = []
        for segment in range(1, len(self.starts)):
            came_from, value = self._arrive(value, segment)
            back.append(came_from)
        path = [int(value.argmax())]
        for step in reversed(back):
            path.append(step[path[-1]])
        return self._course("oracle", path[::-1], path[-1])

    def _arrive(self, value: FloatArray, segment: int) -> tuple[list[int], FloatArray]:
        """For each plan of a segment the best plan before it, and what is done by the segment's
        end.

        A plan that would not be better even if it moved for nothing is not asked what moving takes.
        """
        length, rates = float(self.lengths[segment]), self.rates[:, segment]
        came_from, best = list(range(len(value))), value + length * rates
        furthest_first = np.argsort(-value, kind="stable").tolist()
        for new, rate in enumerate(rates):
            for old in furthest_first:
                if value[old] + length * rate <= best[new]:
                    break
                left = length - self.moving(old, new, segment)
                if left > 0 and value[old] + left * rate > best[new]:
                    came_from[new], best[new] = old, value[old] + left * rate
        return came_from, best

    def _course(self, name: str, path: Sequence[int], now: int) -> TraceRun:
        """Count what a sequence of plans does, one for each segment, after the plan ``now``."""
        iterations = migrating = owed = 0.0
        switches = []
        for segment, plan in enumerate(path):
            if plan != now:
                switches.append(self._switch(now, plan, segment, self.moving(now, plan, segment)))
                owed += switches[-1].migration
            spent = min(
                owed, float(self.lengths[segment])
            )  # what is left goes on in the next segment
            owed, migrating = owed - spent, migrating + spent
            iterations += float((self.lengths[segment] - spent) * self.rates[plan, segment])
            now = plan
        return TraceRun(
            name=name, iterations=iterations, migrating=migrating, switches=tuple(switches)
        )

    def _switch(self, old: int, new: int, segment: int, moving: float) -> Switch:
        slow, fast = self.rates[old, segment], self.rates[new, segment]
        pays_after = float(moving * fast / (fast - slow)) if fast > slow else math.inf
        steps = float((pays_after - moving) * fast) if fast > slow else math.inf
        return Switch(
            time=self.starts[segment],
            old=self.plans[old],
            new=self.plans[new],
            migration=moving,
            pays_after=pays_after,
            pays_after_steps=steps,
        )
