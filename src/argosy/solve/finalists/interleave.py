"""Try interleaved variants of a plan: every worker takes its layers in several chunks, so that a
pipeline fills sooner.

The bounds and the judge of the search assume stages of consecutive layers on devices of their own.
So interleaving is not searched but tried: on a few good plans of different sorts, each worker's
layers are cut into equal chunks, piece c * S + w on worker w of S; in a V-shaped schedule the
second chunks go back from the last worker to the first. The exact engine simulates the whole plan
and computes its memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.solve.finalists.variant import in_place_of, played_if_it_fits
from argosy.units import counted
from argosy.workload.chain import Chain

# A plan is simulated only if its devices times micro-batches times chunks are at most this many.
_MOST_TASKS = 20_000


def with_interleaved(
    plain: Plan,
    good: Iterable[Plan],
    specs: Sequence[ScheduleSpec],
    chain: Chain,
    cluster: Cluster,
    model: ComputeModel,
    *,
    must_be: bool,
) -> Plan:
    """Return the best plan, or the fastest variant of some good plans if that is faster or
    ``must_be`` requires one.

    The certificate of a variant keeps only the bound that holds for any granularity.
    """
    assert plain.predicted is not None and plain.certificate is not None
    assert plain.certificate.free_bound_seconds is not None
    plans = list(good)
    variants = [
        _variant(plan, spec) for plan in plans for spec in specs if _obstacle(plan, spec) is None
    ]
    played = [played_if_it_fits(variant, chain, cluster, model) for variant in variants]
    seconds, number = min(
        ((result.seconds, at) for at, result in enumerate(played)), default=(math.inf, 0)
    )
    if must_be and seconds == math.inf:
        raise InfeasibleError(_why_none(plans, specs, chain, cluster))
    if not must_be and plain.predicted.iteration_seconds <= seconds:
        return plain
    best = variants[number]
    unused = (
        f"the plan whose interleaved variant is fastest has {len(best.devices)} devices without it"
    )
    scope = "interleaved variants of the best"
    return in_place_of(plain, best, played[number], chain, cluster, scope=scope, unused=unused)


def _obstacle(plan: Plan, spec: ScheduleSpec) -> str | None:
    """Return why a plan has no variant under a schedule; None if it has one, which may still not
    fit."""
    workers = len(plan.stages)
    if workers == 1:
        return "one stage"
    if spec.kind is ScheduleKind.INTERLEAVED and plan.num_micro_batches % workers:
        count = counted(plan.num_micro_batches, "micro-batch", "micro-batches")
        return f"{count}, which {workers} stages do not divide"
    if spec.kind is ScheduleKind.DUALPIPE_V and plan.num_micro_batches < 2 * workers:
        return f"fewer micro-batches than the {2 * workers} stages of {spec.kind}"
    chunks = spec.stages_per_worker
    if min(stage.end - stage.first for stage in plan.stages) < chunks:
        return f"a stage of fewer layers than {chunks} chunks"
    if len(plan.devices) * plan.num_micro_batches * chunks > _MOST_TASKS:
        return "too many devices and micro-batches to play"
    return None


def _why_none(
    plans: Sequence[Plan], specs: Sequence[ScheduleSpec], chain: Chain, cluster: Cluster
) -> str:
    """Return the obstacles of the plans that were tried, the most common first."""
    reasons = Counter(
        _obstacle(plan, spec) or "too little memory" for plan in plans for spec in specs
    )
    listed = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    tried = "the best plan" if len(plans) == 1 else f"the {len(plans)} best plans"
    summary = f"no interleaved variant of {tried} of {chain.name} on {cluster!r} works: {listed}"
    return f"{summary}; --schedule 1f1b beside --schedule interleaved has a plan"


def _variant(plan: Plan, spec: ScheduleSpec) -> Plan:
    return replace(plan, schedule=spec, stages=tuple(_pieces(plan.stages, spec)), collectives=())


def _pieces(stages: Sequence[Stage], spec: ScheduleSpec) -> Iterator[Stage]:
    first, chunks = 0, spec.stages_per_worker
    for chunk in range(chunks):
        for stage in stages[::-1] if spec.kind.is_v and chunk else stages:
            length = stage.end - stage.first
            end = first + length // chunks + (chunk < length % chunks)
            yield replace(stage, first=first, end=end)
            first = end
