"""Decide after every step: continue, switch the schedule, change the shares, or move to another
plan.

The controller receives the seconds of a step and the job's measurements of links and devices.
``ClusterWatch`` turns the measurements into two worlds: the *believed* one, which changes when a
test with a stated error rate detects a change, and that of the *latest* step, in which samples that
contradict a belief replace it. Seconds of a plan are predicted by the exact engine and corrected by
measurements:

    (1)  seconds of p = predicted seconds of p x median of measured / predicted over the last
         ``_REMEMBERED`` steps: under p, if it had that many, all lie above or all below those under
         the plan in force, and the medians differ by more than min_gain; otherwise under the plan
         in force

If nothing but chance is at work, five ratios and five others lie apart in 0.8 % of all cases. A
change is only made to a plan that is faster now. So none is made to a plan that is slower under
present conditions, and none for a change that is already over:

    (2)  seconds of the plan in force > seconds of p, in the believed world and in the world of the
         latest step's samples alone; and min_gain x seconds of p < the gain in the believed world,
         or, for a move, < regret of p / its steps (3)

Other schedules and other shares of samples move no state. The fastest of those that fulfil (2) is
taken at once.

A move to another plan has a price: the seconds until the next step can begin, those that optimizer
state adds to that step (``Predictor.exposed``), and a second move if the change is undone. The time
already lost by not having moved shows when a move is worth it, as in the ski rental problem:

    (3)  regret of p = max(0, regret of p + seconds of the plan in force - seconds of p in the
         latest world), each step, the plan in force under the best of its schedules
    (4)  move to p if regret of p, or its gain times the steps that worlds like this one have lasted
         beyond the present age, >= moving + min(moving back, what p loses in the world before x n),
         and n x regret of p / its steps >= moving, with n the remaining steps
    (5)  but wait if worlds like this one have lasted longer than the present age, p is faster in
         the world before too, and its gain until the present one is expected to end, plus a move in
         the world before, is less than a move now

In (4) and (5) a move now has the larger price of those in the believed world and in that of the
latest samples.

With (4) moves cost no more than staying has cost before them. If a change lasts and p gains g
seconds a step, the move comes price / g steps after the change, but not before the test has
detected it. With (5) state does not cross a slow link that usually recovers soon: the move is made
over the fast link, by (2) also if the gain there is small. Regret of a plan found in a changed
world starts at its gain times the age of that world. Before the first change the cluster is
expected to stay as its file states: regret starts at n times the gain. A plan that was left because
of a loss is returned to at once when it runs again.

A search returns several good plans. Those that are not both slower and dearer to move to than
another are kept, so that a plan near the one in force is found before the best one is worth its
price. Searching takes seconds, so plans that were found are compared in every later world. A search
is made only in a world unlike those searched in, by its levels (``SEARCHED``) or by the time of the
best kept plan (``min_gain``), on average at most every ``replan_every`` steps, at once if a device
or link is lost, and never while the latest samples contradict the belief.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from argosy.adapt.predictor import PlanKey, Predictor, plan_key
from argosy.adapt.shares import with_shares
from argosy.adapt.watch import MEMORY, ClusterWatch, World, are_alike, in_world, reason
from argosy.cluster.lasting import within_reach
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.moving import process_groups
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan
from argosy.workload.chain import Chain

# Worlds whose levels differ by at most this factor share the result of a search.
SEARCHED = 0.25
# The median ratio of measured to predicted seconds over this many steps corrects predictions (1).
_REMEMBERED = 5
# Number of searches that may be made beyond one per ``replan_every`` steps.
_SPARE = 3


class AdaptationLevel(StrEnum):
    """A limit on what a controller may change: everything up to and including this level."""

    OFF = "off"
    K = "k"
    SHARES = "shares"
    FULL = "full"

    def allows(self, other: AdaptationLevel) -> bool:
        order = list(AdaptationLevel)
        return order.index(other) <= order.index(self)


@dataclass(frozen=True, kw_only=True)
class ControllerLimits:
    """A set of limits that a user may set."""

    reach: AdaptationLevel = AdaptationLevel.FULL
    horizon: int = 1000
    """Number of remaining steps, over which a move must pay."""
    min_gain: float = 0.02
    """Relative gain in a step's seconds below which nothing is changed."""
    replan_every: int = 10
    """Mean number of steps between two searches for a plan, unless something is lost."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change to make before the next step, together with the numbers that justify it."""

    step: int
    what: AdaptationLevel
    """``off`` if nothing changes."""
    plan: Plan
    before: float
    """Predicted seconds of a step without the change."""
    after: float
    moving: float = 0.0
    """Predicted seconds of the change itself."""
    why: str = ""
    world: World = field(default_factory=World)
    """The believed world."""

    @property
    def is_change(self) -> bool:
        return self.what is not AdaptationLevel.OFF


class Regret(NamedTuple):
    """A sum of the seconds that another plan would have saved, since it was last 0 (3)."""

    seconds: float = 0.0
    steps: int = 0

    @property
    def mean(self) -> float:
        return self.seconds / max(1, self.steps)

    def plus(self, gain: float, steps: int = 1) -> Regret:
        """Add steps that would have taken ``gain`` seconds less each."""
        seconds = self.seconds + gain * steps
        return Regret(seconds, self.steps + steps) if seconds > 0 else Regret()


class Controller:
    """A controller that decides after every step."""

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        cluster: Cluster,
        *,
        limits: ControllerLimits | None = None,
        model: ComputeModel | None = None,
        schedules: Sequence[Plan] = (),
        replan: Callable[[Cluster], Sequence[Plan]] | None = None,
        variants: Callable[[Plan], Sequence[Plan]] | None = None,
    ) -> None:
        """Start with a plan.

        ``schedules`` is the plan under the schedules that it may switch to; ``variants`` finds
        these for another plan; ``replan`` finds good plans for a cluster.
        """
        self.plan = plan
        self.chain, self.cluster = chain, cluster
        self.limits = limits or ControllerLimits()
        self.schedules = tuple(variant.schedule for variant in schedules)
        self.replan, self.variants = replan, variants
        self.predictor = Predictor(chain, cluster, model or ComputeModel())
        self.watch = ClusterWatch(cluster)
        self.log: list[Decision] = []
        self.news: dict[str, None] = {}
        """Names of levels that have changed since the last decision."""
        self.present = self.watch.world
        """The believed world when it began."""
        self.age = 0
        """Number of steps since it began."""
        self.past: list[tuple[World, int]] = []
        """Worlds that are over, each unlike the next, with the number of steps that they lasted."""
        self.kept: dict[PlanKey, Plan] = {plan_key(plan): plan}
        """Plans that searches found."""
        self.regrets: dict[PlanKey, Regret] = {}
        """The regret of each kept plan (3)."""
        self.forced_from: PlanKey | None = None
        """The plan that was left because a device or link was lost."""
        self.searched: list[World] = []
        self.lost = _lost(self.watch.world)
        """Names that were lost when a plan was last searched."""
        self.ratios: dict[PlanKey, list[float]] = {}
        """Measured over predicted seconds of the last steps, by plan."""
        self.usual = _REMEMBERED * [1.0]
        """The ratios of the plan that last had ``_REMEMBERED`` of them."""
        self.groups = set(process_groups(plan, chain))
        """Process groups of all plans so far."""
        self.moving_ratio = 1.0
        """Measured over predicted seconds of the last move."""

    def after_step(
        self,
        step: int,
        seconds: float,
        bandwidths: dict[str, float],
        speeds: dict[str, float],
        *,
        last: Mapping[str, float] | None = None,
        in_force: bool = True,
        is_newest: Callable[[], bool] = lambda: True,
    ) -> Decision:
        """Process the measurements of a step, and those of its later half alone (``last``); return
        what to do before the next step.

        ``in_force`` tells whether the step ran under the plan of the last decision, which may still
        be on its way; if not, the step only updates the world. ``is_newest`` returns whether no
        later step was measured during a search; if one was, that step decides.
        """
        changed = self.watch.observe(bandwidths, speeds, last)
        self.news |= dict.fromkeys(changed)
        self.age += 1
        if not self._are_alike(self.present, self.watch.world):
            age = max(changed.values(), default=1)
            if self.past or age < self.age:  # otherwise the cluster never was as its file states
                self.past = [*self.past, (self.present, self.age - age)][-MEMORY:]
            self.present, self.age = self.watch.world, age
        stay = Decision(
            step=step, what=AdaptationLevel.OFF, plan=self.plan, before=seconds, after=seconds
        )
        if not in_force:
            return stay
        self._correct(seconds)
        searches = len(self.searched)
        decision = self._decide(stay)
        if len(self.searched) > searches and not is_newest():
            return stay
        if decision.is_change:
            self._take(decision)
        return decision

    def _take(self, decision: Decision) -> None:
        if decision.what is AdaptationLevel.FULL:
            self.regrets.clear()
            self.groups |= process_groups(decision.plan, self.chain)
            self.forced_from = plan_key(self.plan) if math.isinf(decision.before) else None
            if self.variants is not None:
                self.schedules = tuple(variant.schedule for variant in self.variants(decision.plan))
        self.news.clear()
        self.plan = decision.plan
        self.log.append(decision)

    def learn_of_move(self, seconds: float) -> None:
        """Scale the prices of further moves by the measured seconds of the last one."""
        predicted = self.log[-1].moving if self.log else 0.0
        if 0 < predicted < math.inf:  # a move of nothing gives no ratio
            self.moving_ratio *= seconds / predicted

    def _correct(self, seconds: float) -> None:
        """Record the ratio of measured to predicted seconds (1), unless samples contradict the
        believed world."""
        predicted = self.predictor.seconds(self.plan, self.watch.world)
        if self.watch.latest != self.watch.world or not 0 < predicted < math.inf:
            return
        ratios = self.ratios.setdefault(plan_key(self.plan), [])
        ratios.append(seconds / predicted)
        del ratios[:-_REMEMBERED]
        if len(ratios) == _REMEMBERED:
            self.usual = ratios

    def _seconds(self, plan: Plan, world: World) -> float:
        """Return the corrected seconds of a step of a plan in a world (1)."""
        ratios, usual = self.ratios.get(plan_key(plan), []), self.usual
        ratio = statistics.median(usual)
        if len(ratios) == len(usual):
            own = statistics.median(ratios)
            is_apart = min(ratios) > max(usual) or max(ratios) < min(usual)
            ratio = own if is_apart and abs(own / ratio - 1) > self.limits.min_gain else ratio
        return self.predictor.seconds(plan, world) * ratio

    def _gain(self, plan: Plan, world: World) -> float:
        """Return the seconds that a step of another plan saves in a world, beyond those that
        another schedule would save; 0 if the plan in force gets stuck."""
        variants = (self.plan, *self._rescheduled())
        now = min(self._seconds(variant, world) for variant in variants)
        return now - self._seconds(plan, world) if math.isfinite(now) else 0.0

    def _rescheduled(self) -> list[Plan]:
        """Return the plan in force under every schedule that it may switch to."""
        return [replace(self.plan, schedule=schedule) for schedule in self.schedules]

    def _is_faster(self, plan: Plan, mean_gain: float = 0.0) -> bool:
        """Return whether a plan is faster in the believed world and in that of the latest samples
        (2)."""
        world, sampled = self.watch.world, self.watch.sampled
        before, after = self._seconds(self.plan, world), self._seconds(plan, world)
        is_gain = before > after and max(before - after, mean_gain) > self.limits.min_gain * after
        return is_gain and self._seconds(self.plan, sampled) > self._seconds(plan, sampled)

    def _decide(self, stay: Decision) -> Decision:
        now = self._seconds(self.plan, self.watch.world)
        why = reason([*self.news])
        stay = replace(stay, before=now, after=now, why=why, world=self.watch.world)
        if self.limits.reach is AdaptationLevel.OFF:
            return stay
        can_move = self.limits.reach is AdaptationLevel.FULL and self.replan is not None
        if can_move:
            self._search(stay.step)
            self._count_regret()
        free = min(self._free(stay), key=lambda change: change.after, default=None)
        if free is not None:
            return free
        return min(self._moves(stay) if can_move else [], key=self._total, default=stay)

    def _total(self, move: Decision) -> float:
        """Return the seconds of a move and of the remaining steps."""
        return move.moving + self.limits.horizon * move.after

    def _free(self, stay: Decision) -> list[Decision]:
        """Return changes that move no state and are faster: other schedules, other shares of
        samples, or both."""
        changes = [(AdaptationLevel.K, variant) for variant in self._rescheduled()]
        if self.limits.reach.allows(AdaptationLevel.SHARES):
            shared = with_shares(self.plan, self.chain, self.cluster, stay.world)
            schedules = (self.plan.schedule, *self.schedules)
            changes += [
                (AdaptationLevel.SHARES, replace(shared, schedule=schedule))
                for schedule in schedules
            ]
        return [
            replace(stay, what=level, plan=plan, after=self._seconds(plan, stay.world))
            for level, plan in changes
            if self._is_faster(plan)
        ]

    def _search(self, step: int) -> None:
        """Search a plan for a world unlike those searched in, if a search is due."""
        world = self.watch.world
        gone = _lost(world)
        is_due = (
            bool(gone - self.lost) or len(self.searched) < _SPARE + step / self.limits.replan_every
        )
        is_known = any(self._are_alike(world, searched) for searched in self.searched)
        if is_known or not is_due or self.watch.latest != world:
            return
        self.searched.append(world)
        self.lost = gone
        assert self.replan is not None
        with contextlib.suppress(InfeasibleError):
            plans = self.replan(within_reach(in_world(self.cluster, world)))
            for plan in self._worth_keeping(plans, world):
                self.kept.setdefault(plan_key(plan), plan)

    def _are_alike(self, first: World, second: World) -> bool:
        """Return whether two worlds share the result of a search: no level differs by more than
        ``SEARCHED``, and the time of the best kept plan by no more than ``min_gain``."""
        if first == second:
            return True
        if not are_alike(first, second, SEARCHED):
            return False
        seconds = (self._least(first), self._least(second))
        return max(seconds) <= min(seconds) * (1 + self.limits.min_gain)

    def _least(self, world: World) -> float:
        """Return the predicted seconds of the fastest kept plan in a world."""
        return min(self.predictor.seconds(plan, world) for plan in (self.plan, *self.kept.values()))

    def _worth_keeping(self, plans: Sequence[Plan], world: World) -> Iterator[Plan]:
        """Yield the plans that are cheaper to move to than every faster one."""
        least = math.inf
        for plan in sorted(plans, key=lambda plan: self.predictor.seconds(plan, world)):
            moving = self._moving(self.plan, plan, world)
            if moving < least or math.isinf(least):
                yield plan
                least = moving

    def _count_regret(self) -> None:
        """Add the latest step to the regret of every kept plan (3)."""
        steps = self.age if self.past else self.limits.horizon
        for key, plan in self.kept.items():
            if key in self.regrets:
                self.regrets[key] = self.regrets[key].plus(self._gain(plan, self.watch.latest))
            else:
                self.regrets[key] = Regret().plus(self._gain(plan, self.watch.world), steps)

    def _moves(self, stay: Decision) -> list[Decision]:
        """Return moves to kept plans that are faster and worth their price (4)."""
        moves = []
        for key, plan in self.kept.items():
            if plan.stages != self.plan.stages and self._is_faster(plan, self.regrets[key].mean):
                moving = self._moving(self.plan, plan, stay.world)
                if math.isinf(moving):
                    continue
                if math.isfinite(stay.before):
                    if not self._is_worth(key, plan, moving):
                        continue
                    moving = max(moving, self._moving(self.plan, plan, self.watch.sampled))
                    if not self._is_worth(key, plan, moving):
                        continue
                after = self._seconds(plan, stay.world)
                moves.append(
                    replace(stay, what=AdaptationLevel.FULL, plan=plan, after=after, moving=moving)
                )
        return moves

    def _is_worth(self, key: PlanKey, plan: Plan, moving: float) -> bool:
        """Return whether regret, or the gain expected from worlds like this one, reaches the price
        of moving there and back (4), and waiting is not cheaper (5)."""
        regret = self.regrets[key]
        if self.limits.horizon * regret.mean < moving:
            return False
        if key == self.forced_from:
            return True
        expected = self._remaining() * self._gain(plan, self.watch.world)
        is_paid = max(regret.seconds, expected) >= moving + self._back(plan)
        return is_paid and not 0 < expected < moving - self._later(plan)

    def _later(self, plan: Plan) -> float:
        """Return the seconds of a move in the world before the present one; infinity if the plan is
        not faster there."""
        before = self.past[-1][0]
        is_faster = self._gain(plan, before) > 0
        return self._moving(self.plan, plan, before) if is_faster else math.inf

    def _remaining(self) -> float:
        """Return the mean number of steps that worlds like this one have lasted beyond its age."""
        durations = [
            steps - self.age for world, steps in self.past if self._are_alike(world, self.present)
        ]
        longer = [steps for steps in durations if steps > 0]
        return min(statistics.fmean(longer), self.limits.horizon) if longer else 0.0

    def _back(self, plan: Plan) -> float:
        """Return the seconds that a plan costs if the last change is undone: a move back, or slower
        remaining steps."""
        if not self.past:
            return 0.0
        before = self.past[-1][0]
        loss = max(0.0, -self._gain(plan, before))
        moving = min(self._moving(plan, self.plan, world) for world in (before, self.watch.world))
        return min(moving, self.limits.horizon * loss)

    def _moving(self, old: Plan, new: Plan, world: World) -> float:
        """Return the seconds of a move in a world: those before the next step, and those that
        optimizer state adds to that step."""
        moves = self.predictor.migration(old, new, world)
        if moves.is_free:
            return 0.0
        exposed = self.predictor.exposed(new, moves.state, world)
        believed = in_world(self.cluster, world)
        before_step = moves.seconds_before_step(believed, known=self.groups)
        return self.moving_ratio * (before_step + exposed)


def _lost(world: World) -> set[str]:
    return {name for name, level in (*world.bandwidths, *world.speeds) if level == 0}
