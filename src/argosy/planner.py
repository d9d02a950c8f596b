"""Find the best plan: this module shows the whole search in one place.

    (1)  Equal devices that reach each other equally form pools (``space.pool``); a stage takes a
         number of devices of each pool, in the pool's order (``space.place``).
    (2)  One search covers all plans on the pools (``solve.pool_search``), first quickly, then with
         a proof.
    (3)  The exact engine decides (``solve.finalists.verdict``).

Every plan carries a certificate: no plan in the stated scope is faster than its lower bound.
"""

from __future__ import annotations

import math
from dataclasses import replace

from argosy.cluster.lasting import at_time_zero, within_reach
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.remembered import with_cost_model
from argosy.errors import NothingFitsError, bad_input
from argosy.plan.plan import Plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.solve.even import EvenSearch
from argosy.solve.finalists.candidate import diverse
from argosy.solve.finalists.interleave import can_be_chunked, with_interleaved
from argosy.solve.finalists.uniform import uniform_candidates
from argosy.solve.finalists.verdict import placed
from argosy.solve.history import History, with_history
from argosy.solve.pool_search import PoolSearch
from argosy.solve.program_plans import (
    CapturedProgram,
    divided_plan,
    undivided_plan,
    undivided_scope,
)
from argosy.solve.settings import (
    SCHEDULES,
    SearchProgress,
    Settings,
    for_powersgd,
    for_target,
    search_scope,
    without_deadlock,
)
from argosy.solve.uneven_parts import with_uneven_parts
from argosy.workload.chain import Chain

__all__ = [
    "SCHEDULES",
    "CapturedProgram",
    "SearchProgress",
    "Settings",
    "find_plan",
    "kept_plans",
    "search_scope",
]

# A global batch has at most this many samples; larger numbers are rejected as mistakes.
_MOST_SAMPLES = 10_000_000
# A plan is searched for at most this many layers. Tables have a number for every range of layers:
# 4,000 layers need up to 7 GB, 10,000 more than most machines have.
_MOST_LAYERS = 2_000
# kept_plans returns at most this many good plans of different sorts.
_KEPT = 16
# At most this many uniform pipelines get variants with several chunks, if no good plan has one.
_UNIFORM = 64


def find_plan(
    workload: Chain | CapturedProgram,
    cluster: Cluster,
    *,
    global_batch: int | None = None,
    settings: Settings | None = None,
    model: ComputeModel | None = None,
) -> Plan:
    """Return the best plan found with its certificate, prediction, search history and cost model.

    A captured program has a batch of its own, and is planned for that.
    """
    settings, model = settings or Settings(), model or ComputeModel()
    if isinstance(workload, CapturedProgram):
        if global_batch not in (None, workload.samples):
            expected = f"{workload.samples}, the samples of the program's batch"
            raise bad_input(expected, global_batch, "global_batch")
        return workload.complete(_find_for_program(workload.on(cluster), cluster, settings, model))
    if global_batch is None:
        raise bad_input("a number of samples", where="global_batch")
    return _find_for_chain(workload, cluster, global_batch, settings, model)


def _find_for_program(
    program: CapturedProgram, cluster: Cluster, settings: Settings, model: ComputeModel
) -> Plan:
    """Return the best plan that divides the program's batch, or a plan that does not divide it if
    that is faster."""
    reason: NothingFitsError | None = None
    divided: Plan | None = None
    try:
        divided = divided_plan(
            program,
            settings,
            lambda given: _find_for_chain(program.chain, cluster, program.samples, given, model),
        )
    except NothingFitsError as error:
        reason = error
    try:
        whole = undivided_plan(program, within_reach(cluster), settings, model)
    except NothingFitsError as error:
        if divided is None:
            raise (reason or error) from None
        return divided
    if divided is None or divided.certificate is None:
        return with_cost_model(whole, program.chain, cluster, model)
    best = min(divided, whole, key=_seconds)
    # All plans with an undivided batch were simulated, so the faster of both bounds holds for all.
    bound = min(divided.certificate.lower_bound_seconds, _seconds(best))
    certificate = replace(
        divided.certificate,
        lower_bound_seconds=bound,
        gap=_seconds(best) / bound - 1,
        scope=f"{divided.certificate.scope}, or {undivided_scope(program, cluster)}",
    )
    best = replace(best, certificate=certificate, search=divided.search)
    return with_cost_model(best, program.chain, cluster, model)


def _seconds(plan: Plan) -> float:
    return plan.predicted.iteration_seconds if plan.predicted else math.inf


def _find_for_chain(
    chain: Chain, cluster: Cluster, global_batch: int, settings: Settings, model: ComputeModel
) -> Plan:
    if not 1 <= global_batch <= _MOST_SAMPLES:
        raise bad_input(f"a global batch of 1 to {_MOST_SAMPLES:,}", global_batch, "global_batch")
    if len(chain.layers) > _MOST_LAYERS:
        most = f"at most {_MOST_LAYERS:,} layers; several layers can be described as one"
        raise bad_input(most, len(chain.layers), f"{chain.name}: layers")
    settings = for_powersgd(for_target(without_deadlock(settings, model), chain), chain)
    settings = replace(settings, progress=History(settings.progress))
    cluster = within_reach(cluster)  # devices that a link failure cuts off count as lost
    if interleaved := settings.interleaved:
        plan = _with_interleaved(chain, cluster, global_batch, settings, model, interleaved)
    elif _is_even(settings):
        plan = EvenSearch(chain, cluster, global_batch, settings, model).run()[0]
    else:
        search = PoolSearch(chain, cluster, global_batch, settings, model)
        plan = with_uneven_parts(search.run(), search, at_time_zero(cluster))
    return with_cost_model(with_history(plan, settings.progress), chain, cluster, model)


def _with_interleaved(
    chain: Chain,
    cluster: Cluster,
    global_batch: int,
    settings: Settings,
    model: ComputeModel,
    interleaved: tuple[ScheduleSpec, ...],
) -> Plan:
    """Return the best plan under the other schedules of the settings, or an interleaved variant of
    a good plan if that is faster.

    If no other schedule is allowed and no good plan has a variant, those of uniform pipelines are
    tried, which have many numbers of stages.
    """
    others = tuple(schedule for schedule in settings.schedules if schedule not in interleaved)
    base = replace(settings, schedules=others or (ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),))
    if _is_even(base):
        good = EvenSearch(chain, cluster, global_batch, base, model).run()
        plain = good[0]
    else:
        search = PoolSearch(chain, cluster, global_batch, base, model)
        plain = search.run()
        candidates = diverse(search.incumbents.found, _KEPT)
        variants = (placed(candidate, search.prices, cluster) for candidate in candidates)
        good = [plain, *variants]
        if not others and not any(can_be_chunked(plan, interleaved) for plan in good):
            job = search.prices, search.incumbents.judge, search.shapes, search.scope(search.units)
            uniform = uniform_candidates(*job, math.inf, _UNIFORM)
            good += (placed(candidate, search.prices, cluster) for candidate in uniform)
    return with_interleaved(
        plain, good, interleaved, chain, at_time_zero(cluster), model, must_be=not others
    )


def _is_even(settings: Settings) -> bool:
    """Return whether successive searches fix the properties that all stages share
    (``solve.even``)."""
    return settings.target is not None or (settings.even_shares and settings.replicas is None)


def kept_plans(
    chain: Chain,
    cluster: Cluster,
    *,
    global_batch: int,
    settings: Settings,
    model: ComputeModel,
    most: int = _KEPT,
) -> list[Plan]:
    """Return the best plan and other good ones of different sorts, on devices, without predictions
    and certificates.

    If the best plan comes from more than one search, only that one is returned.
    """
    settings = for_powersgd(for_target(without_deadlock(settings, model), chain), chain)
    if settings.interleaved or _is_even(settings):
        return [
            find_plan(
                chain, cluster, global_batch=global_batch, settings=settings, model=model
            ).bare
        ]
    cluster = within_reach(cluster)
    search = PoolSearch(chain, cluster, global_batch, settings, model)
    best = with_uneven_parts(search.run(), search, at_time_zero(cluster)).bare
    variants = [
        placed(candidate, search.prices, cluster)
        for candidate in diverse(search.incumbents.found, most)
    ]
    plans = (best, *(variant for variant in variants if variant != best))
    return [with_cost_model(plan, chain, cluster, model) for plan in plans]
