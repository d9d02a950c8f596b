"""What to do now: keep on, switch the schedule, move shares, or re-plan, each only where it pays.

After every step the controller is told how long the step took and what the job saw of links and devices. It believes
``Watch``, predicts what its choices would take in that world, and takes the best of them at three prices:

    (1)  schedule    free          among those that fit in memory with the stages as they are
    (2)  shares      free          samples of every micro-batch in proportion to the replicas' speeds
    (3)  plan        moving (``moving``)   where what it saves over the steps that are left > moving x ``CAUTION``

and only where the gain is at least ``min_gain`` and the last change of that price is ``dwell`` steps ago (twice as long
for every change that had to be undone). It never thrashes because it also keeps the books: with m_i the measured
seconds of a step and s_i what the first plan would have taken in the world of that step,

    (4)  regret = sum of (m_i - s_i);  above 1 % of all seconds so far, and half a step, it goes back to the first plan
         and waits; above 5 % where the first plan is predicted to be clearly slower now.

Predictions are corrected by what was measured: a plan's own steps, and until it has any, those of the plan in force,

    (5)  seconds of p = predicted seconds of p  x  median of measured / predicted over the last steps under p

so that a plan that does not keep its promise is left again for one that did, at the price of moving.

A free change is weighed as if the world stayed as it is: it can be taken back for nothing. A move cannot, so worlds are
expected to last as long as they have lasted, L steps, and then to be like those before: of n steps that are left

    (6)  saved = L (seconds now - seconds then) + (n - L) (the same on average over the last worlds)

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

from argosy.adapt.moving import moving_seconds
from argosy.adapt.predictor import PlanKey, Predictor, plan_key
from argosy.adapt.watch import Watch, World, coarse_world, in_world, seen_world
from argosy.cluster.lasting import within_reach
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan, Stage
from argosy.workload.chain import Chain

CAUTION = 1.5
_MOST_REGRET = 0.01
_CLEARLY = 0.8
_REMEMBERED = 5
"""Steps under a plan."""
SEARCHED = 0.25
"""Worlds whose levels are in the same steps of so much are alike for a search, and"""
SETTLED = 0.05
"""for what was decided."""
_WORLDS = 6
"""Last ones that (6) looks back on."""
_MOVES = 3
"""Best kept plans that are weighed by (6)."""
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
        self.elapsed = self.regret = 0.0
        self.last_change = -math.inf
        self.patience = self.limits.dwell
        self.news: dict[str, None] = {}
        """What has changed since something was decided."""
        self.kept: list[Plan] = [plan]
        """Plans that were found."""
        self.searched: set[World] = set()
        self.lost = _lost(self.watch.world)
        """What was gone when a plan was last made."""
        self.past: list[World] = []
        """The last worlds, the newest last."""
        self.num_worlds = 0
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
        if changed or not self.past:
            self.past = [*self.past, self.watch.world][-_WORLDS:]
            self.num_worlds, self.since = self.num_worlds + 1, step
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
        self.plan = decision.plan
        self.last_change = decision.step
        self.log.append(decision)

    def learn_of_move(self, seconds: float) -> None:
        """What the last move really took."""
        moves = [decision for decision in self.log if decision.moving > 0]
        if moves:
            self.moving_ratio *= seconds / moves[-1].moving

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
        """(4)."""
        self.elapsed += seconds
        if self._is_first:
            self.regret = max(0.0, self.regret - 0.001 * seconds)  # old losses fade while it sits still
            return
        instead = self._seconds(self.first, seen)
        if math.isfinite(instead):
            self.regret = max(0.0, self.regret + seconds - instead)

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
        self.settled = coarse_world(world, SETTLED), self.plan, step + (1 if is_open else max(1, step - self.since))
        self.news.clear()

    def _is_settled(self, step: int, world: World) -> bool:
        if self.settled is None:
            return False
        where, plan, until = self.settled
        return step < until and plan is self.plan and where == coarse_world(world, SETTLED)

    def _worth(self, decision: Decision) -> float:
        """Seconds that it saves over the steps that are left, if it is worth its while at all."""
        if math.isinf(decision.before):
            return math.inf if math.isfinite(decision.after) else -1.0
        if decision.saved < self.limits.min_gain * decision.before * self.limits.horizon:
            return -1.0
        return decision.saved - CAUTION * decision.moving

    def _choices(self, step: int, world: World, now: float) -> list[Decision]:
        why = f"{', '.join([*self.news][:3])} changed" if self.news else "as believed now"
        reach = self.limits.reach
        plans = [replace(self.plan, schedule=schedule) for schedule in self.schedules if schedule != self.plan.schedule]
        found = [(Reach.K, plan) for plan in plans]
        if reach.allows(Reach.SHARES):
            shared = self._with_shares(world)
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
        return coarse_world(world, SEARCHED) not in self.searched

    def _search(self, step: int, world: World) -> None:
        """Look for a plan for this world, where that is due."""
        gone = _lost(world)
        is_due = bool(gone - self.lost) or len(self.searched) < _SPARE + step / self.limits.replan_every
        if not self._is_new(world) or not is_due:
            return
        self.searched.add(coarse_world(world, SEARCHED))
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
        others = [
            one for one in others if math.isfinite(one[0]) and one[2].stages not in (self.plan.stages, stay.stages)
        ]
        believed, found = in_world(self.cluster, world), []
        for seconds, _, plan in sorted(others)[:_MOVES]:
            saved = self._saved(step, world, stay, plan) if math.isfinite(least) else 0.0
            if math.isfinite(least) and saved < self.limits.min_gain * least * self.limits.horizon:
                continue
            moving = self.moving_ratio * moving_seconds(self.plan, plan, self.chain, believed)
            move = Decision(step=step, what=Reach.FULL, plan=plan, before=now, after=seconds, moving=moving, why=why)
            found.append(replace(move, saved=gained + saved))
        return found

    def _saved(self, step: int, world: World, old: Plan, new: Plan) -> float:
        """(6)."""
        left = self.limits.horizon
        usual = self.since / (self.num_worlds - 1) if self.num_worlds > 1 else left
        lasts = min(max(step - self.since, usual), left)
        here = self._seconds(old, world) - self._seconds(new, world)
        most = _HELD_UP * max(self._seconds(old, world), self._seconds(new, world))
        before = [
            min(self._seconds(old, one), most) - min(self._seconds(new, one), most) for one in (*self.past, world)
        ]
        return lasts * here + (left - lasts) * sum(before) / len(before)

    def _with_shares(self, world: World) -> Plan:
        """(2): every stage's samples in proportion to its replicas' speeds, no replica without one."""
        speeds = dict(world.speeds)
        stages = tuple(self._shared(stage, speeds) for stage in self.plan.stages)
        return replace(self.plan, stages=stages)

    def _shared(self, stage: Stage, speeds: dict[str, float]) -> Stage:
        if len(stage.replicas) < 2:
            return stage
        paces = []
        for replica in stage.replicas:
            devices = [self.cluster.device(name) for name in replica.devices]
            kinds = [d.kind.peak(self.chain.dtype) * d.efficiency * speeds.get(d.name, 1.0) for d in devices]
            paces.append(max(min(kinds) * len(kinds), 1e-9))
        total = sum(replica.samples for replica in stage.replicas)
        counts = _in_proportion(total, paces)
        replicas = [replace(r, samples=count) for r, count in zip(stage.replicas, counts, strict=True)]
        return replace(stage, replicas=tuple(replicas))

    def _has_lost(self, world: World, now: float) -> bool:
        """(4), unless going back would clearly cost more as things are; then it must have lost more."""
        is_clear = now < _CLEARLY * self._seconds(self.first, world)
        return self.regret > max((5 if is_clear else 1) * _MOST_REGRET * self.elapsed, now / 2)

    def _can_go_back(self, world: World) -> bool:
        """Whether the first plan runs in this world, on the devices as they are held now."""
        moved = moving_seconds(self.plan, self.first, self.chain, in_world(self.cluster, world))
        return moved == 0 and math.isfinite(self.predictor.seconds(self.first, world))

    def _back(self, step: int, world: World, now: float) -> Decision:
        """(4): undo, and be slower to believe the next time."""
        self.patience = min(2 * self.patience, 10 * self.limits.dwell + 50)
        self.regret = 0.0
        after = self._seconds(self.first, world)
        why = "undone: it lost more than 1 % against the first plan"
        return Decision(step=step, what=Reach.K, plan=self.first, before=now, after=after, why=why)


def _in_proportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers of at least 1 that sum to ``total``: the next goes to whoever would be done with it first."""
    counts = [1] * len(weights)
    for _ in range(total - len(weights)):
        at = min(range(len(weights)), key=lambda index: ((counts[index] + 1) / weights[index], index))
        counts[at] += 1
    return counts


def _lost(world: World) -> set[str]:
    return {name for name, level in (*world.bandwidths, *world.speeds) if level == 0}
