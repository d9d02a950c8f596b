"""Interleaved variants of a plan: every worker takes its layers in several chunks, so that a pipeline fills sooner.

The bounds and the judge of the search know stages that are one run of layers on devices of their own. So interleaving
is not searched but tried: on a few good plans of different sorts, each worker's layers in equal chunks, piece c * S + w
on worker w of S. The exact engine plays the whole plan and says what it holds in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import NothingFitsError
from argosy.plan.plan import LeftOut, Plan, Predicted, Stage
from argosy.schedule import ScheduleSpec
from argosy.sim.choose import with_collectives
from argosy.sim.compile import compile_plan
from argosy.sim.exact import simulate_exact
from argosy.space.option import USABLE
from argosy.workload.chain import Chain

_MOST_TASKS = 20_000
"""Devices times micro-batches times chunks of a plan that is played."""


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
    """The best plan as it is, or the fastest variant of some good ones where that is faster or nothing else will do. Of
    a variant only the bound that holds whatever the granularity is certain."""
    assert plain.predicted is not None and plain.certificate is not None
    free = plain.certificate.free_bound_seconds
    assert free is not None
    variants = [one for plan in good for spec in specs for one in _variants(plan, spec)]
    played = ((_seconds(one, chain, cluster, model), number) for number, one in enumerate(variants))
    seconds, number = min(played, default=(math.inf, 0))
    if must_be and seconds == math.inf:
        raise NothingFitsError(f"no interleaved variant of the best plans of {chain.name} fits on {cluster!r}")
    if not must_be and plain.predicted.iteration_seconds <= seconds:
        return plain
    bound = min(free, seconds)
    return replace(
        with_collectives(variants[number], chain, cluster),
        predicted=Predicted(
            iteration_seconds=seconds,
            samples_per_second=plain.global_batch / seconds,
            peak_memory_bytes=(),
            bottleneck="",
        ),
        certificate=replace(
            plain.certificate,
            lower_bound_seconds=bound,
            gap=seconds / bound - 1,
            scope=f"{plain.certificate.scope}, interleaved variants of the best",
            free_bound_seconds=bound,
        ),
        search=plain.search,
        runner_ups=(),
        left_out=tuple(_left_out(plain, variants[number], cluster)),
    )


def _left_out(plain: Plan, variant: Plan, cluster: Cluster) -> Iterator[LeftOut]:
    known = {one.device: one for one in plain.left_out}
    for device in cluster.devices:
        if device.name not in variant.devices:
            reason = f"the plan whose interleaved variant is fastest has {len(variant.devices)} devices without it"
            yield known.get(device.name, LeftOut(device=device.name, reason=reason))


def _variants(plan: Plan, spec: ScheduleSpec) -> Iterator[Plan]:
    workers = len(plan.stages)
    is_small = len(plan.devices) * plan.num_micro_batches * spec.chunks <= _MOST_TASKS
    fewest = min(stage.end - stage.first for stage in plan.stages)
    if workers > 1 and is_small and plan.num_micro_batches % workers == 0 and fewest >= spec.chunks:
        yield replace(plan, schedule=spec, stages=tuple(_pieces(plan.stages, spec.chunks)), collectives=())


def _pieces(stages: Sequence[Stage], chunks: int) -> Iterator[Stage]:
    first = 0
    for chunk in range(chunks):
        for stage in stages:
            length = stage.end - stage.first
            end = first + length // chunks + (chunk < length % chunks)
            yield replace(stage, first=first, end=end)
            first = end


def _seconds(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> float:
    """Infinite where it does not fit."""
    timeline = simulate_exact(compile_plan(with_collectives(plan, chain, cluster), chain, cluster, model), cluster)
    room = {device.name: USABLE * device.kind.memory for device in cluster.devices}
    fits = all(peak <= room[name] for name, peak in timeline.peak_memory().items())
    return timeline.iteration_ends[0] if fits and timeline.iteration_ends else math.inf
