"""Choose a plan that stays good if the cost model is wrong: by the slow end of its interval.

    (1)  candidates  = the best unlike plans of the whole cluster, of plans without tensor-parallel
                       groups, and of the cluster without the least known device kinds
    (2)  prediction  = the first iteration in the exact engine on the whole cluster
    (3)  choice      = the least seconds x (1 + e), with e of the plan by ``cost.uncertainty`` (2)

So a plan that is predicted a little faster loses if it relies on a less certain kind or on
collectives of tensor-parallel groups. The plan that is predicted to be fastest is always among the
candidates. Only that plan has a certificate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from argosy.cluster.lasting import at_time_zero, with_only
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.uncertainty import relative_error
from argosy.errors import NothingFitsError
from argosy.plan.plan import ClusterRef, LeftOut, Plan, RunnerUp
from argosy.planner import Settings, find_plan, kept_plans
from argosy.sim.prediction import play_once, prediction
from argosy.sim.simulate import SMALL_PLAN
from argosy.units import TIME
from argosy.workload.chain import Chain

# Each search contributes at most this many unlike plans.
_KEPT = 8
# A plan names at most this many runner-ups.
_RUNNER_UPS = 3


@dataclass(frozen=True, kw_only=True)
class UncertainPlan:
    """A plan that carries its prediction and the relative error of that prediction."""

    plan: Plan
    seconds: float
    error: float

    @property
    def at_worst(self) -> float:
        """Return the seconds at the slow end of the interval (3)."""
        return self.seconds * (1 + self.error)


def find_plan_within_error(
    chain: Chain,
    cluster: Cluster,
    *,
    global_batch: int,
    settings: Settings | None = None,
    model: ComputeModel | None = None,
) -> Plan:
    """Return the candidate (1) that is best by (3), with the others as runner-ups."""
    settings, model = settings or Settings(), model or ComputeModel()
    fastest = find_plan(chain, cluster, global_batch=global_batch, settings=settings, model=model)
    still = at_time_zero(cluster)
    plans = {_key(fastest): fastest}
    for where, given in _views(cluster, settings):
        try:
            view_plans = kept_plans(
                chain, where, global_batch=global_batch, settings=given, model=model, most=_KEPT
            )
        except NothingFitsError:
            continue
        for plan in view_plans:
            plans.setdefault(_key(plan), replace(plan, cluster=ClusterRef.of(cluster)))
    ranked = sorted(
        (_candidate(plan, chain, still, model) for plan in plans.values()),
        key=lambda candidate: candidate.at_worst,
    )
    return _finished(ranked, fastest, cluster)


def _key(plan: Plan) -> tuple[object, ...]:
    return plan.stages, plan.schedule, plan.num_micro_batches


def _views(cluster: Cluster, settings: Settings) -> Iterator[tuple[Cluster, Settings]]:
    """Yield the cluster and settings of each search of (1)."""
    yield cluster, settings
    yield cluster, replace(settings, max_width=1)
    errors = {device.kind.reached.error for device in cluster.devices}
    if len(errors) > 1:
        kept = [
            device.name for device in cluster.devices if device.kind.reached.error < max(errors)
        ]
        yield with_only(cluster, kept), settings


def _candidate(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> UncertainPlan:
    """Return a plan with its prediction (2) and its error."""
    if plan.predicted is None:
        is_small = len(plan.devices) * plan.num_micro_batches <= SMALL_PLAN
        played = play_once(plan, chain, cluster, model, whole=is_small)
        plan = replace(plan, predicted=prediction(plan, played, chain))
    assert plan.predicted is not None
    return UncertainPlan(
        plan=plan, seconds=plan.predicted.iteration_seconds, error=relative_error(plan, cluster)
    )


def _finished(ranked: list[UncertainPlan], fastest: Plan, cluster: Cluster) -> Plan:
    """Return the choice (3) with the reasons why others lost; the search effort is that of the
    fastest plan's search."""
    best = ranked[0]
    if _key(best.plan) == _key(fastest):
        return fastest
    used = set(best.plan.devices)
    # The plan that is predicted to be fastest comes first.
    lost = sorted(ranked[1:], key=lambda candidate: _key(candidate.plan) != _key(fastest))
    others = [
        RunnerUp(
            description=repr(loser.plan), iteration_seconds=loser.seconds, reason=_why(loser, best)
        )
        for loser in lost[:_RUNNER_UPS]
    ]
    unused = cluster.names_without(used)
    reason = "no plan with it is faster at the slow end of its interval"
    return replace(
        best.plan,
        search=fastest.search,
        certificate=None,
        runner_ups=tuple(others),
        left_out=tuple(LeftOut(device=name, reason=reason) for name in unused),
    )


def _why(loser: UncertainPlan, best: UncertainPlan) -> str:
    both = " against ".join(TIME.apart(loser.at_worst, best.at_worst))
    return f"may take {both}: its predictions are within {100 * loser.error:.0f} %"
