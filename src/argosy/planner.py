"""How should this run? The story of the search in one place.

    (1)  Equal devices that reach each other equally form pools (``space.pool``); a stage takes so
         many of each, in the order in which they stand (``space.place``).
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
from argosy.solve.finalists.interleave import with_interleaved
from argosy.solve.finalists.verdict import placed
from argosy.solve.history import History, with_history
from argosy.solve.pool_search import PoolSearch
from argosy.solve.program_plans import CapturedProgram, divided_plan, undivided_plan
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

_MOST_SAMPLES = 10_000_000
"""Of a global batch."""
_KEPT = 16
"""Good plans of different sorts that ``kept_plans`` returns."""


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
            raise bad_input(expected, global_batch, where="global_batch")
        return workload.complete(_find_for_program(workload.on(cluster), cluster, settings, model))
    if global_batch is None:
        raise bad_input("a number of samples", where="global_batch")
    return _find_for_chain(workload, cluster, global_batch, settings, model)


def _find_for_program(
    program: CapturedProgram, cluster: Cluster, settings: Settings, model: ComputeModel
) -> Plan:
    """The best plan that can divide the program's batch, or one that does not divide it, if that is
    faster."""
    reason: NothingFitsError | None = None
    found: Plan | None = None
    try:
        found = divided_plan(
            program,
            settings,
            lambda given: _find_for_chain(program.chain, cluster, program.samples, given, model),
        )
    except NothingFitsError as error:
        reason = error
    try:
        whole = undivided_plan(program, within_reach(cluster), model)
    except NothingFitsError as error:
        if found is None:
            raise (reason or error) from None
        return found
    if found is None or _seconds(whole) < _seconds(found):
        return with_cost_model(_beside(whole, found), program.chain, cluster, model)
    return found


def _seconds(plan: Plan) -> float:
    return plan.predicted.iteration_seconds if plan.predicted else math.inf


def _beside(whole: Plan, found: Plan | None) -> Plan:
    """A plan that no search contains, with the certificate of the search that it beats."""
    certificate = found.certificate if found is not None else None
    if found is None or certificate is None:
        return whole
    bound = min(certificate.lower_bound_seconds, _seconds(whole))
    certificate = replace(certificate, lower_bound_seconds=bound, gap=_seconds(whole) / bound - 1)
    return replace(whole, certificate=certificate, search=found.search)


def _find_for_chain(
    chain: Chain, cluster: Cluster, global_batch: int, settings: Settings, model: ComputeModel
) -> Plan:
    if not 1 <= global_batch <= _MOST_SAMPLES:
        raise bad_input(
            f"a global batch of 1 to {_MOST_SAMPLES:,}", global_batch, where="global_batch"
        )
    settings = for_powersgd(for_target(without_deadlock(settings, model)), chain)
    settings = replace(settings, progress=History(settings.progress))
    cluster = within_reach(cluster)  # what a link that is down cuts off counts as lost
    if woven := settings.interleaved:
        plan = _with_interleaved(chain, cluster, global_batch, settings, model, woven)
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
    woven: tuple[ScheduleSpec, ...],
) -> Plan:
    """The best plan under the other schedules that are asked for, or an interleaved variant of a
    good one."""
    others = tuple(one for one in settings.schedules if one not in woven)
    base = replace(settings, schedules=others or (ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),))
    if _is_even(base):
        good = EvenSearch(chain, cluster, global_batch, base, model).run()
        plain = good[0]
    else:
        search = PoolSearch(chain, cluster, global_batch, base, model)
        plain = search.run()
        good = [
            plain,
            *(
                placed(one, search.prices, cluster)
                for one in diverse(search.incumbents.found, _KEPT)
            ),
        ]
    return with_interleaved(
        plain, good, woven, chain, at_time_zero(cluster), model, must_be=not others
    )


def _is_even(settings: Settings) -> bool:
    """Whether what stages have in common is fixed by searches one after the other
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
    """The best plan and other good ones of as many sorts as there are, on devices, without what is
    said about them; the best alone where it comes from more than one search."""
    settings = for_powersgd(for_target(without_deadlock(settings, model)), chain)
    if settings.interleaved or _is_even(settings):
        return [
            find_plan(
                chain, cluster, global_batch=global_batch, settings=settings, model=model
            ).bare
        ]
    cluster = within_reach(cluster)
    search = PoolSearch(chain, cluster, global_batch, settings, model)
    best = search.run().bare
    others = [
        placed(candidate, search.prices, cluster)
        for candidate in diverse(search.incumbents.found, most)
    ]
    found = (best, *(other for other in others if other != best))
    return [with_cost_model(plan, chain, cluster, model) for plan in found]
