"""Compare courses over a trace: one plan for all, a plan for each change, and perfect hindsight.

Between two changes of the network, a *segment* of length l, plan p does l / T(p) iterations
(``steady``). Changing from p to q at the start of a segment first takes the migration's seconds
(``cost.moving``).

    (1)  static      one plan throughout
    (2)  re-planned  at a change, the plan that is best now, if its gain while the network stays
                     unchanged, for as long as it did on average, exceeds the cost of the migration
    (3)  oracle      most iterations over the whole trace, by a programme over segments and plans
                     that knows the future (migrations that end within their segment, and the other
                     courses)
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

# Each view of the cluster contributes at most this many plans.
_PLANS_PER_VIEW = 6
# Quantiles of bandwidth over time for which plans are searched: bad, fair and good times.
_QUANTILES = (0.1, 0.3, 0.7)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A change of plan that a course makes."""

    time: float
    old: Plan
    new: Plan
    migration: float
    """Seconds."""
    pays_after: float
    """Seconds after which the switch has paid back (4)."""
    pays_after_steps: float
    """Steps under the new plan after which it has paid back, without the migration itself."""


@dataclass(frozen=True, kw_only=True)
class TraceRun:
    """A course that leads through the trace."""

    name: str
    iterations: float
    migrating: float
    """Seconds of all migrations."""
    switches: tuple[Switch, ...]

    def mean_seconds(self, horizon: float) -> float:
        return horizon / self.iterations if self.iterations else math.inf


@dataclass(frozen=True, kw_only=True)
class Courses:
    """A comparison that shows the courses (1) to (3) side by side."""

    horizon: float
    plans: int
    courses: tuple[TraceRun, ...]


@dataclass(frozen=True, kw_only=True)
class CandidatePlans:
    """A set of plans that were found for time 0, for the average, and for better and worse
    times."""

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
    """Return how each course performs on the cluster's own traces."""
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
    """Search plans for time 0, for the average, for better and worse times, and for the unchanging
    part."""
    views = [at_time_zero(cluster), lasting(cluster, [cluster], horizon)]
    views += [lasting(cluster, [cluster], horizon, quantile) for quantile in _QUANTILES]
    views += [without_what_changes(cluster, [cluster])]
    search = partial(kept_plans, chain, global_batch=global_batch, settings=settings, model=model)
    by_view = plans_of_views(search, views, _PLANS_PER_VIEW)
    plans: list[Plan] = []
    for plan in (plan for view in by_view for plan in view):
        if not any(_is_same(plan, known) for known in plans):
            plans.append(plan)
    average = by_view[1][0] if by_view[1] else by_view[0][0]
    return CandidatePlans(
        plans=tuple(plans),
        for_time_0=_index(plans, by_view[0][0]),
        for_the_average=_index(plans, average),
    )


def courses_with(
    choices: CandidatePlans, chain: Chain, cluster: Cluster, horizon: float, model: ComputeModel
) -> Courses:
    """Return the courses (1) to (3) with these plans, over the cluster's traces."""
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


def _is_same(first: Plan, second: Plan) -> bool:
    return (first.stages, first.schedule) == (second.stages, second.schedule)


def _index(plans: Sequence[Plan], plan: Plan) -> int:
    return next(index for index, candidate in enumerate(plans) if _is_same(plan, candidate))


class _Journey:
    """A trace that is cut into segments, with every plan's pace in each."""

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
        """Links that are down in each segment."""
        paces = [pace(plan, chain, cluster, model, horizon) for plan in plans]
        self.rates = np.array([[trace.at(start) for start in self.starts] for trace in paces])
        """(plans, segments): iterations per second."""
        self.known: dict[tuple[int, int, frozenset[int]], Migration] = {}
        """Migrations by old plan, new plan, and links that are down."""

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
        """Return the course of one plan throughout (1)."""
        return TraceRun(
            name=name, iterations=float(self.rates[plan] @ self.lengths), migrating=0.0, switches=()
        )

    def replanned(self, plan: int) -> TraceRun:
        """Return the course that re-plans at changes (2)."""
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
        """Return the course that knows the future (3)."""
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
        """Return, for each plan of a segment, the best plan before it and the iterations done by
        the segment's end.

        The seconds of a move are not computed for a plan that would not be better even if the move
        were free.
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
        """Return the totals of a sequence of plans, one for each segment, that starts from the plan
        ``now``."""
        iterations = migrating = owed = 0.0
        switches = []
        for segment, plan in enumerate(path):
            if plan != now:
                switches.append(self._switch(now, plan, segment, self.moving(now, plan, segment)))
                owed += switches[-1].migration
            # A migration that is not finished continues in the next segment.
            spent = min(owed, float(self.lengths[segment]))
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
