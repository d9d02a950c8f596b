"""What to do now: keep on, switch the schedule, move shares, or re-plan, each only where it pays.

After every step the controller is told how long the step took and what the job saw of links and devices. It believes
``Watch``, predicts what its choices would take in that world, and takes the best of them at three prices:

    (1)  schedule    free          among those that fit in memory with the stages as they are
    (2)  shares      free          samples of every micro-batch in proportion to the replicas' speeds
    (3)  plan        moving (``moving``)   where  (seconds now - seconds then) x steps left > moving x ``CAUTION``

and only where the gain is at least ``min_gain`` and the last change of that price is ``dwell`` steps ago (twice as long
for every change that had to be undone). It never thrashes because it also keeps the books: with m_i the measured
seconds of a step and s_i what the first plan would have taken in the world of that step,

    (4)  regret = sum of (m_i - s_i);  above 1 % of all seconds so far it goes back to the first plan and waits; above
         5 % where the first plan is predicted to be clearly slower now.

Predictions are corrected by what was measured: a plan's own steps, and until it has any, those of the plan in force,

    (5)  seconds of p = predicted seconds of p  x  median of measured / predicted over the last steps under p

so that a plan that does not keep its promise is left again for one that did, at the price of moving.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from argosy.adapt.moving import moving_seconds
from argosy.adapt.watch import Watch, World, in_world, seen_world
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan, Stage
from argosy.schedule import ScheduleSpec
from argosy.sim.compile import compile_plan
from argosy.sim.exact import simulate_exact
from argosy.sim.fold import fold_plan
from argosy.workload.chain import Chain

CAUTION = 1.5
_MOST_REGRET = 0.01
_CLEARLY = 0.8
_WHOLE = 2_000
"""Devices times micro-batches of a plan that is played device by device."""
_REMEMBERED = 5
"""Plans that were in force, and steps under each."""
_Key = tuple[tuple[Stage, ...], ScheduleSpec, int]


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
    why: str = ""
    world: World = field(default_factory=World)
    """As it was believed to be."""

    @property
    def is_change(self) -> bool:
        return self.what is not Reach.OFF


def plan_key(plan: Plan) -> _Key:
    """What the time of a step depends on."""
    return plan.stages, plan.schedule, plan.micro_batch_size


class Predictor:
    """Seconds of a step of a plan in a world, remembered."""

    def __init__(self, chain: Chain, cluster: Cluster, model: ComputeModel) -> None:
        self.chain, self.cluster, self.model = chain, cluster, model
        self.known: dict[tuple[object, ...], float] = {}

    def seconds(self, plan: Plan, world: World) -> float:
        key = (*plan_key(plan), world)
        if key not in self.known:
            self.known[key] = iteration_seconds(plan, self.chain, in_world(self.cluster, world), self.model)
        return self.known[key]


def iteration_seconds(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> float:
    """By the exact engine; infinite where the plan gets stuck."""
    small = len(plan.devices) * plan.num_micro_batches <= _WHOLE
    graph, where = (
        (compile_plan(plan, chain, cluster, model), cluster) if small else fold_plan(plan, chain, cluster, model)
    )
    ends = simulate_exact(graph, where, record=0).iteration_ends
    return ends[0] if ends else math.inf


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
        """What has changed since plans were last made."""
        self.has_planned = False
        self.used: list[Plan] = [plan]
        """Plans with other stages that were in force."""
        self.ratios: dict[_Key, list[float]] = {}
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
        self.news |= dict.fromkeys(self.watch.observe(bandwidths, speeds))
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
        if decision.what is Reach.FULL:
            self.used = [one for one in self.used if one.stages != decision.plan.stages]
            self.used = [*self.used, decision.plan][-_REMEMBERED:]
            if self.variants is not None:
                self.schedules = tuple(variant.schedule for variant in self.variants(decision.plan))
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
        if step - self.last_change < self.patience:
            return stay
        best = max(self._choices(step, world, now), key=self._worth, default=stay)
        return best if self._worth(best) > 0 else stay

    def _worth(self, decision: Decision) -> float:
        """Seconds that it saves over the steps that are left, if it is worth its while at all."""
        gain = decision.before - decision.after
        if math.isinf(decision.before):
            return math.inf if math.isfinite(decision.after) else -1.0
        if gain < self.limits.min_gain * decision.before:
            return -1.0
        return gain * self.limits.horizon - CAUTION * decision.moving

    def _choices(self, step: int, world: World, now: float) -> list[Decision]:
        why = f"{', '.join([*self.news][:3])} changed" if self.news else "as believed now"
        reach = self.limits.reach
        plans = [replace(self.plan, schedule=schedule) for schedule in self.schedules if schedule != self.plan.schedule]
        found = [(Reach.K, plan) for plan in plans]
        if reach.allows(Reach.SHARES):
            shared = self._with_shares(world)
            found += [(Reach.SHARES, plan) for plan in (shared, *(replace(shared, schedule=s) for s in self.schedules))]
        choices = [self._choice(step, what, plan, world, now, why) for what, plan in found]
        best = min((one.after for one in choices), default=now)
        if reach.allows(Reach.FULL) and self.replan is not None:
            free = min(best, now)
            others = [plan for plan in self.used if plan.stages != self.plan.stages]
            if self.news or not self.has_planned:
                others += self._replanned(world)
                self.has_planned = True
                self.news.clear()
            choices += [one for plan in others for one in self._moves(step, plan, world, free, now, why)]
        return choices

    def _choice(self, step: int, what: Reach, plan: Plan, world: World, now: float, why: str) -> Decision:
        return Decision(step=step, what=what, plan=plan, before=now, after=self._seconds(plan, world), why=why)

    def _replanned(self, world: World) -> list[Plan]:
        assert self.replan is not None
        try:
            return [self.replan(in_world(self.cluster, world))]
        except InfeasibleError:
            return []

    def _moves(self, step: int, plan: Plan, world: World, free: float, now: float, why: str) -> list[Decision]:
        """(3); measured against what a free change would reach."""
        seconds = self._seconds(plan, world)
        if seconds >= free * (1 - self.limits.min_gain):
            return []
        moving = self.moving_ratio * moving_seconds(self.plan, plan, self.chain, in_world(self.cluster, world))
        return [Decision(step=step, what=Reach.FULL, plan=plan, before=now, after=seconds, moving=moving, why=why)]

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
        return self.regret > (5 if is_clear else 1) * _MOST_REGRET * self.elapsed

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
