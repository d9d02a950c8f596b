"""Try interleaved variants of a plan: every worker takes its layers in several chunks, so that a
pipeline fills sooner.

The bounds and the judge of the search assume stages of consecutive layers on devices of their own.
So workers and devices are those of a few good plans of different sorts. Each worker's layers are
first cut into equal chunks, piece c * S + w on worker w of S; in a V-shaped schedule the second
chunks go back from the last worker to the first. Then the cuts of the fastest plan are improved:

    (1)  one layer moves from a piece to any other piece, as long as that makes the plan faster.

The exact engine simulates every whole plan and computes its memory. If only such schedules are
allowed, the certificate covers all their plans:

    (2)  an iteration takes at least M times the throughput bound of its micro-batches
         (``space.rate``), over the numbers M of micro-batches that at least two workers can run.

Filling and draining are not in (2), because the first pieces of all workers may be one layer each.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.prediction import Played
from argosy.solve.feasible import batch_shapes
from argosy.solve.finalists.variant import in_place_of, played_if_it_fits
from argosy.solve.search.reach import shape_bounds
from argosy.space.pool import able_pools
from argosy.space.price import Prices
from argosy.units import counted
from argosy.workload.chain import Chain

# A plan is simulated only if its devices times micro-batches times chunks are at most this many.
_MOST_TASKS = 20_000
# Cuts are improved by simulating at most this many plans, and devices times micro-batches times
# chunks of all of them together are at most _MOST_MOVED.
_MOST_MOVES, _MOST_MOVED = 400, 20_000


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

    The certificate of a variant keeps only the bound that holds for any granularity or, if
    ``must_be`` leaves no other schedule, states (2).
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
    if seconds == math.inf:
        if must_be:
            raise InfeasibleError(_why_none(plans, specs, chain, cluster))
        return plain
    best, result = with_better_cuts(variants[number], played[number], chain, cluster, model)
    if not must_be and plain.predicted.iteration_seconds <= result.seconds:
        return plain
    if must_be:
        plain = _certified(plain, specs, chain, cluster, model)
    unused = (
        f"the plan whose interleaved variant is fastest has {len(best.devices)} devices without it"
    )
    scope = "any cuts and devices" if must_be else "interleaved variants of the best"
    return in_place_of(plain, best, result, chain, cluster, scope=scope, unused=unused)


def can_be_chunked(plan: Plan, specs: Sequence[ScheduleSpec]) -> bool:
    """Return whether a plan has a variant under one of some schedules, which may still not fit."""
    return any(_obstacle(plan, spec) is None for spec in specs)


def with_better_cuts(
    plan: Plan, played: Played, chain: Chain, cluster: Cluster, model: ComputeModel
) -> tuple[Plan, Played]:
    """Return the plan after moves by (1), each of them faster and within memory, with its
    simulation; a plan that is large gets few moves or none."""
    tasks = len(plan.devices) * plan.num_micro_batches * plan.schedule.stages_per_worker
    moves_left = min(_MOST_MOVES, _MOST_MOVED // tasks)
    improved = True
    while improved:
        improved = False
        for moved in _moved(plan):
            if moves_left == 0:
                return plan, played
            moves_left -= 1
            result = played_if_it_fits(moved, chain, cluster, model)
            if result.seconds < played.seconds * (1 - 1e-9):
                plan, played, improved = moved, result, True
                break
    return plan, played


def _moved(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with one layer moved from any piece to any other, near pieces first."""
    lengths = [stage.end - stage.first for stage in plan.stages]
    pairs = itertools.permutations(range(len(lengths)), 2)
    for source, target in sorted(pairs, key=lambda pair: (abs(pair[0] - pair[1]), pair)):
        if lengths[source] == 1:
            continue
        changed = [*lengths]
        changed[source], changed[target] = lengths[source] - 1, lengths[target] + 1
        ends = list(itertools.accumulate(changed))
        triples = zip(plan.stages, changed, ends, strict=True)
        stages = (replace(stage, first=end - size, end=end) for stage, size, end in triples)
        yield replace(plan, stages=tuple(stages))


def _certified(
    plain: Plan, specs: Sequence[ScheduleSpec], chain: Chain, cluster: Cluster, model: ComputeModel
) -> Plan:
    """Return a plan whose certificate states the bound (2) of all plans under ``specs``."""
    assert plain.certificate is not None and plain.certificate.free_bound_seconds is not None
    bound = chunked_bound(
        specs, plain.global_batch, Prices(chain, able_pools(chain, cluster, model), model)
    )
    kinds = " or ".join(dict.fromkeys(map(repr, specs)))
    certificate = replace(
        plain.certificate,
        free_bound_seconds=max(bound, plain.certificate.free_bound_seconds),
        granularity=1,
        scope=f"all plans under {kinds}, tensor-parallel groups also across nodes",
    )
    return replace(plain, certificate=certificate)


def chunked_bound(specs: Sequence[ScheduleSpec], global_batch: int, prices: Prices) -> float:
    """Return a lower bound in seconds on every plan under ``specs`` (2)."""
    devices = sum(pool.count for pool in prices.pools)
    bounds = []
    for spec in specs:
        most = min(devices, prices.num_layers // spec.stages_per_worker)
        shapes = [
            shape
            for shape in batch_shapes(global_batch, (spec,))
            if _can_run(spec, shape.num_micro_batches, most)
        ]
        bounds += shape_bounds(prices, shapes, spanning=True)
    return min(bounds, default=0.0)


def _can_run(spec: ScheduleSpec, num_micro_batches: int, most_workers: int) -> bool:
    """Return whether two or more workers can run this many micro-batches under a schedule."""
    if spec.kind is ScheduleKind.INTERLEAVED:
        return any(num_micro_batches % number == 0 for number in range(2, most_workers + 1))
    fewest = 4 if spec.kind is ScheduleKind.DUALPIPE_V else 1
    return most_workers >= 2 and num_micro_batches >= fewest


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
