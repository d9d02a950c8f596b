"""What to do now: keep on, switch the schedule, move shares, or re-plan, each only where it pays.

After every step the controller is told how long the step took and what the job saw of links and devices. It believes
``Watch``, predicts what its choices would take in that world, and takes the best of them at three prices:

    (1)  schedule    free          among those that fit in memory with the stages as they are
    (2)  shares      free          samples of every micro-batch in proportion to the replicas' speeds
    (3)  plan        moving (``cost.moving``)   where what it saves over the steps that are left > moving x ``CAUTION``

and only where the gain is at least ``min_gain``, of a move ``SURE`` times that beyond what a free change gains, and the
last change of that price is ``dwell`` steps ago (twice as long for every change that had to be undone). It never
thrashes because it also keeps the books: with m_i the measured seconds of a step and s_i what the first plan would have
taken in the world of that step,

    (4)  regret = sum of (m_i - s_i);  above 1 % of all seconds so far, and half a step, it goes back to the first plan
         and waits; above 5 % where the first plan is predicted to be clearly slower now.

Predictions are corrected by what was measured: a plan's own steps, and until it has any, those of the plan in force,

    (5)  seconds of p = predicted seconds of p  x  median of measured / predicted over the last steps under p

so that a plan that does not keep its promise is left again for one that did, at the price of moving.

A free change is weighed as if the world stayed as it is: it can be taken back for nothing. A move cannot, so a world is
expected to last as long as those like it have lasted (or all, where it is the first of its kind), and at least as long
again as it has: L steps. Then things will be like before: of n steps that are left

    (6)  saved = L (seconds now - seconds then) + (n - L) (the same on average over the steps in the last worlds)
         the latter at worst a loss of moving x ``CAUTION``, for which one moves back

A move is not made where a free change reaches most of what it would: that comes first, and shows what is left to gain.

Whatever is expected, a move may turn out to be for nothing. So moves are made on a budget: with c what moves have cost
so far, g what steps under other plans than the first have taken more than it would have (half of it where less),

    (7)  c + g + moving <= ``RISK`` x (seconds so far and of the steps that are left)

Searching for a plan takes seconds, so plans that were found are kept and ranked again in every world; a search is made
only in a world unlike those searched in (``SEARCHED``), on average every ``replan_every`` steps at most, at once where
something is lost. While the world is the same, (1) to (3) are looked at again when it has lasted twice as long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from argosy.adapt.predictor import PlanKey, Predictor, plan_key
from argosy.adapt.shares import with_shares
from argosy.adapt.watch import Watch, World, are_alike, in_world, reason, seen_world
from argosy.cluster.lasting import within_reach
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.moving import migration
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan
from argosy.workload.chain import Chain

CAUTION = 1.5
SURE = 2.0
"""A move rests on a prediction that no step has confirmed, and noise in the estimates must not cause one."""
RISK = 0.02
_MOST_REGRET = 0.01
_BELIEVED = 0.5
"""Of what was saved by prediction, what counts in (7)."""
_CLEARLY = 0.8
_REMEMBERED = 5
"""Steps under a plan."""
SEARCHED = 0.25
"""Worlds whose levels differ by no more than this are alike for a search and for (6), and"""
SETTLED = 0.05
"""for what was decided."""
_WORLDS = 20
"""Last ones whose durations (6) looks at, and"""
_WEIGHED = 6
"""in which it weighs plans."""
_MOVES = 3
"""Best kept plans that are weighed by (6)."""
_MOST_OF_IT = 0.75
_BEFOREHAND = 1.05
"""Times as long as now, at most, may a step take for the sake of other worlds: one can move when they come."""
_HELD_UP = 10.0
"""Times as long as now: what (6) counts for a plan that cannot go on in a world."""
_SPARE = 3
"""Searches beyond those that are due by now."""


class Reach(StrEnum):
    """How far a controller may go: everything up to and with this."""

    OFF = "off"
    K = "k"
    SHARES = "shares"
    FULL = "full"

    def allows(self, other: Reach) -> bool:
        order = list(Reach)
        return order.index(other) <= order.index(self)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a user may set."""

    reach: Reach = Reach.FULL
    horizon: int = 1000
    """Steps that are left, for weighing a move against what it gains."""
    min_gain: float = 0.02
    dwell: int = 3
    """Steps between two changes."""
    replan_every: int = 10
    """Steps between two searches for a plan on average, where nothing is lost."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do before the next step, with the numbers behind it."""

    step: int
    what: Reach
    """``off``: nothing changes."""
    plan: Plan
    before: float
    """Predicted seconds of a step as it is."""
    after: float
    moving: float = 0.0
    """Predicted seconds of the change itself."""
    saved: float = 0.0
    """Predicted seconds over the steps that are left, moving not counted."""
    why: str = ""
    world: World = field(default_factory=World)
    """As it was believed to be."""

    @property
    def is_change(self) -> bool:
        return self.what is not Reach.OFF


class Controller:
    """Decides after every step."""

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        cluster: Cluster,
        *,
        limits: Limits | None = None,
        model: ComputeModel | None = None,
        schedules: Sequence[Plan] = (),
        replan: Callable[[Cluster], Plan] | None = None,
        variants: Callable[[Plan], Sequence[Plan]] | None = None,
    ) -> None:
        """``schedules`` are the plan under those that it may switch to, ``variants`` finds them for another plan;
        ``replan`` finds a plan for a cluster."""
        self.first = self.plan = plan
        self.chain, self.cluster = chain, cluster
        self.limits = limits or Limits()
        self.schedules = tuple(variant.schedule for variant in schedules)
        self.replan, self.variants = replan, variants
        self.predictor = Predictor(chain, cluster, model or ComputeModel())
        self.watch = Watch(cluster)
        self.log: list[Decision] = []
        self.elapsed = self.regret = self.spent = 0.0
        self.last_change = -math.inf
        self.patience = self.limits.dwell
        self.news: dict[str, None] = {}
        """What has changed since something was decided."""
        self.kept: list[Plan] = [plan]
        """Plans that were found."""
        self.searched: list[World] = []
        self.lost = _lost(self.watch.world)
        """What was gone when a plan was last made."""
        self.past: list[tuple[World, int]] = []
        """The last worlds that are over, each unlike the next, with the steps that it lasted; the newest last."""
        self.present: World | None = None
        """As it was when it began."""
        self.since = 0
        """The step after which the world became what it is."""
        self.settled: tuple[World, Plan, int] | None = None
        """In which world, with which plan and until which step there is nothing to decide."""
        self.ratios: dict[PlanKey, list[float]] = {}
        """Measured over predicted seconds of the last steps, by plan."""
        self.moving_ratio = 1.0
        """Measured over predicted seconds of the last move."""

    def after_step(
        self,
        step: int,
        seconds: float,
        bandwidths: dict[str, float],
        speeds: dict[str, float],
        *,
        in_force: bool = True,
    ) -> Decision:
        """Take what a step measured; what to do before the next. ``in_force``: whether the step was made under the
        plan of the last decision, which may still be on its way; if not, the step only tells of the world."""
        changed = self.watch.observe(bandwidths, speeds)
        self.news |= dict.fromkeys(changed)
        if self.present is None:
            self.present = self.watch.world
        elif not are_alike(self.present, self.watch.world, SEARCHED):
            self.past = [*self.past, (self.present, step - self.since)][-_WORLDS:]
            self.present, self.since = self.watch.world, step
        if not in_force:
            return Decision(step=step, what=Reach.OFF, plan=self.plan, before=seconds, after=seconds)
        levels = self.watch.world
        self._keep_books(seconds, seen_world(dict(levels.bandwidths) | bandwidths, dict(levels.speeds) | speeds))
        self._correct(seconds)
        decision = self._decide(step)
        if decision.is_change:
            decision = replace(decision, world=self.watch.world)
            self._take(decision)
        return decision

    def _take(self, decision: Decision) -> None:
        if decision.what is Reach.FULL and self.variants is not None:
            self.schedules = tuple(variant.schedule for variant in self.variants(decision.plan))
        self.news.clear()
        self.spent += decision.moving
        self.plan = decision.plan
        self.last_change = decision.step
        self.log.append(decision)

    def learn_of_move(self, seconds: float) -> None:
        """What the move of the last decision really took, for the next ones and for (7)."""
        predicted = self.log[-1].moving if self.log else 0.0
        if 0 < predicted < math.inf:  # nothing is learnt of moves where nothing had to move
            self.moving_ratio *= seconds / predicted
            self.spent += seconds - predicted

    def _correct(self, seconds: float) -> None:
        """(5), while nothing is in doubt."""
        predicted = self.predictor.seconds(self.plan, self.watch.world)
        if self.watch.is_calm and math.isfinite(predicted) and predicted > 0:
            ratios = self.ratios.setdefault(plan_key(self.plan), [])
            ratios.append(seconds / predicted)
            del ratios[:-_REMEMBERED]

    def _seconds(self, plan: Plan, world: World) -> float:
        """(5)."""
        ratios = self.ratios.get(plan_key(plan)) or self.ratios.get(plan_key(self.plan)) or [1.0]
        return self.predictor.seconds(plan, world) * statistics.median(ratios)

    def _keep_books(self, seconds: float, seen: World) -> None:
        """(4), (7)."""
        self.elapsed += seconds
        if self._is_first:
            self.regret = max(0.0, self.regret - 0.001 * seconds)  # old losses fade while it sits still
            return
        instead = self._seconds(self.first, seen)
        if math.isfinite(instead):
            lost = seconds - instead
            self.regret = max(0.0, self.regret + lost)
            self.spent += lost if lost > 0 else _BELIEVED * lost

    @property
    def _is_first(self) -> bool:
        return (self.plan.stages, self.plan.schedule) == (self.first.stages, self.first.schedule)

    def _decide(self, step: int) -> Decision:
        world = self.watch.world
        now = self._seconds(self.plan, world)
        stay = Decision(step=step, what=Reach.OFF, plan=self.plan, before=now, after=now)
        if self.limits.reach is Reach.OFF:
            return stay
        if not self._is_first and self._has_lost(world, now) and self._can_go_back(world):
            return self._back(step, world, now)
        if step - self.last_change < self.patience or self._is_settled(step, world):
            return stay
        best = max(self._choices(step, world, now), key=self._worth, default=stay)
        if self._worth(best) > 0:
            return best
        self._settle(step, world)
        return stay

    def _settle(self, step: int, world: World) -> None:
        """Nothing to decide for a while, unless a search is still due."""
        is_open = self.limits.reach is Reach.FULL and self.replan is not None and self._is_new(world)
        self.settled = world, self.plan, step + (1 if is_open else max(1, step - self.since))
        self.news.clear()

    def _is_settled(self, step: int, world: World) -> bool:
        if self.settled is None:
            return False
        where, plan, until = self.settled
        return step < until and plan is self.plan and are_alike(where, world, SETTLED)

    def _worth(self, decision: Decision) -> float:
        """Seconds that it saves over the steps that are left, if it is worth its while at all."""
        if math.isinf(decision.before):
            return math.inf if math.isfinite(decision.after) else -1.0
        is_move = decision.what is Reach.FULL  # of which that was asked before
        if not is_move and decision.saved < self.limits.min_gain * decision.before * self.limits.horizon:
            return -1.0
        return decision.saved - CAUTION * decision.moving

    def _choices(self, step: int, world: World, now: float) -> list[Decision]:
        why = reason([*self.news])
        reach = self.limits.reach
        plans = [replace(self.plan, schedule=schedule) for schedule in self.schedules if schedule != self.plan.schedule]
        found = [(Reach.K, plan) for plan in plans]
        if reach.allows(Reach.SHARES):
            shared = with_shares(self.plan, self.chain, self.cluster, world)
            found += [(Reach.SHARES, plan) for plan in (shared, *(replace(shared, schedule=s) for s in self.schedules))]
        choices = [self._choice(step, what, plan, world, now, why) for what, plan in found]
        if reach.allows(Reach.FULL) and self.replan is not None:
            self._search(step, world)
            choices += self._moves(step, world, now, choices, why)
        return choices

    def _choice(self, step: int, what: Reach, plan: Plan, world: World, now: float, why: str) -> Decision:
        after = self._seconds(plan, world)
        saved = (now - after) * self.limits.horizon if math.isfinite(now) else 0.0
        return Decision(step=step, what=what, plan=plan, before=now, after=after, saved=saved, why=why)

    def _is_new(self, world: World) -> bool:
        return not any(are_alike(world, one, SEARCHED) for one in self.searched)

    def _search(self, step: int, world: World) -> None:
        """Look for a plan for this world, where that is due."""
        gone = _lost(world)
        is_due = bool(gone - self.lost) or len(self.searched) < _SPARE + step / self.limits.replan_every
        if not self._is_new(world) or not is_due:
            return
        self.searched.append(world)
        self.lost = gone
        assert self.replan is not None
        try:
            plan = self.replan(within_reach(in_world(self.cluster, world)))
        except InfeasibleError:
            return
        if plan_key(plan) not in map(plan_key, self.kept):
            self.kept.append(plan)

    def _moves(self, step: int, world: World, now: float, free: Sequence[Decision], why: str) -> list[Decision]:
        """(3): the best kept plans, measured against what a free change would reach."""
        base = min((one for one in free if one.after < now), key=lambda one: one.after, default=None)
        stay, least, gained = (base.plan, base.after, base.saved) if base is not None else (self.plan, now, 0.0)
        others = [(self._seconds(plan, world), at, plan) for at, plan in enumerate(self.kept)]
        most = min(_BEFOREHAND * least, math.nextafter(math.inf, 0.0))
        others = [one for one in others if one[0] <= most and one[2].stages not in (self.plan.stages, stay.stages)]
        believed, found = in_world(self.cluster, world), []
        for seconds, _, plan in sorted(others)[:_MOVES]:
            moving = self.moving_ratio * migration(self.plan, plan, self.chain, believed).seconds(believed)
            saved = 0.0
            if math.isfinite(least):
                saved, steps = self._saved(step, world, stay, plan, moving)
                free_does = base is not None and now - least > _MOST_OF_IT * (now - seconds)
                if free_does or not self._is_affordable(saved, steps * least, moving):
                    continue
            move = Decision(step=step, what=Reach.FULL, plan=plan, before=now, after=seconds, moving=moving, why=why)
            found.append(replace(move, saved=gained + saved))
        return found

    def _is_affordable(self, saved: float, of: float, moving: float) -> bool:
        """Whether a move promises enough of the seconds that it is for, and (7)."""
        ahead = self.limits.horizon * self._seconds(self.plan, self.watch.world)
        return saved >= SURE * self.limits.min_gain * of and self.spent + moving <= RISK * (self.elapsed + ahead)

    def _saved(self, step: int, world: World, old: Plan, new: Plan, moving: float) -> tuple[float, float]:
        """(6), and over how many steps."""
        left, so_far = self.limits.horizon, step - self.since
        alike = [steps for one, steps in self.past if are_alike(one, world, SEARCHED)]
        usual = alike or [steps for _, steps in self.past] or [left]
        lasts = min(max(so_far, statistics.mean(usual)), left)
        most = _HELD_UP * max(self._seconds(old, world), self._seconds(new, world))
        weighed = gain = 0.0
        for one, steps in (*self.past[-_WEIGHED:], (world, max(so_far, 1))):
            weighed += steps
            gain += steps * (min(self._seconds(old, one), most) - min(self._seconds(new, one), most))
        here, back = self._seconds(old, world) - self._seconds(new, world), CAUTION * moving
        later = (left - lasts) * gain / weighed
        return (lasts * here + later, left) if later > -back else (lasts * here - back, lasts)

    def _has_lost(self, world: World, now: float) -> bool:
        """(4), unless going back would clearly cost more as things are; then it must have lost more."""
        is_clear = now < _CLEARLY * self._seconds(self.first, world)
        return self.regret > max((5 if is_clear else 1) * _MOST_REGRET * self.elapsed, now / 2)

    def _can_go_back(self, world: World) -> bool:
        """Whether the first plan runs in this world, on the devices as they are held now."""
        moved = migration(self.plan, self.first, self.chain, in_world(self.cluster, world)).bytes
        return moved == 0 and math.isfinite(self.predictor.seconds(self.first, world))

    def _back(self, step: int, world: World, now: float) -> Decision:
        """(4): undo, and be slower to believe the next time."""
        self.patience = min(2 * self.patience, 10 * self.limits.dwell + 50)
        self.regret = 0.0
        after = self._seconds(self.first, world)
        why = "undone: it lost more than 1 % against the first plan"
        return Decision(step=step, what=Reach.K, plan=self.first, before=now, after=after, why=why)


def _lost(world: World) -> set[str]:
    return {name for name, level in (*world.bandwidths, *world.speeds) if level == 0}
