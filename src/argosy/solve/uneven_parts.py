"""Try variants of a plan in which unequal devices share one sequence, or the experts, in proportion
to their speeds.

The pools of the search consist of equal devices, and a replica comes from one pool. So parts of a
sequence and of experts are equal there, and a replica of unequal devices is not searched but tried,
on the best plan and on one stage of all devices:

    (1)  the devices of a stage as one replica, which cuts the sequence into parts by speed
    (2)  the replicas of a stage as one group, which shares its experts by speed

with micro-batches as they are or of any smaller size that divides them. A device's speed is one
over the seconds of a stage on it alone. The exact engine simulates the whole plan and computes its
memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from argosy.cluster.topology import Cluster
from argosy.cost.compute import Portion, stage_seconds
from argosy.plan.plan import Plan, Replica, Stage
from argosy.solve.finalists.variant import in_place_of, played_if_it_fits
from argosy.solve.pool_search import PoolSearch
from argosy.space.enumerate import Scope
from argosy.space.operations.sharding import unit_counts
from argosy.space.price import Prices

# A replica or group of unequal devices has at most this many devices.
_MOST_DEVICES = 8
# A variant is simulated only if its devices times micro-batches are at most this many.
_MOST_STEPS = 1024
# At most this many sizes of micro-batches are tried.
_MOST_SIZES = 4
# Times that differ by less than this share count as equal.
_FASTER = 1 - 1e-9


def with_uneven_parts(plain: Plan, search: PoolSearch, cluster: Cluster) -> Plan:
    """Return the best plan, or its fastest variant if that is faster.

    The certificate of a variant keeps only the bound that holds for any granularity. ``cluster`` is
    the cluster at time 0.
    """
    assert plain.predicted is not None and plain.certificate is not None
    chain, model = search.prices.chain, search.prices.model
    seconds, best, played = plain.predicted.iteration_seconds, plain, None
    for variant in _variants(plain, search, cluster):
        result = played_if_it_fits(variant, chain, cluster, model)
        if result.seconds < seconds * _FASTER:
            seconds, best, played = result.seconds, variant, result
    if played is None:
        return plain
    scope = "uneven parts of sequences and experts in variants of the best"
    unused = "the fastest variant with uneven parts does not use it"
    return in_place_of(plain, best, played, chain, cluster, scope=scope, unused=unused)


def _variants(plain: Plan, search: PoolSearch, cluster: Cluster) -> Iterator[Plan]:
    """Yield the variants (1) and (2), unless the settings fix the replicas or widths."""
    settings = search.settings
    if len(search.pools) < 2 or settings.replicas is not None or settings.width not in (None, 1):
        return
    scope = search.scope((1,) * len(search.pools))
    for base in (plain.bare, *_on_all_devices(plain, search, scope)):
        for size in _sizes(base.micro_batch_size):
            if len(base.devices) * base.global_batch // size > _MOST_STEPS:
                continue
            if max(scope.context or (1,)) > 1:
                yield from _changed(
                    base, size, lambda stage: _one_sequence(stage, search.prices, cluster)
                )
            if max(scope.expert or (1,)) > 1:
                yield from _changed(
                    base, size, lambda stage: _shared_experts(stage, search.prices, cluster)
                )


def _on_all_devices(plain: Plan, search: PoolSearch, scope: Scope) -> Iterator[Plan]:
    """Yield plans of one stage on all devices before they are joined: the first device has all
    samples."""
    names = [name for pool in search.pools for node in pool.nodes for name in node]
    if len(names) > _MOST_DEVICES:
        return
    first = Replica(devices=(names[0],), samples=plain.global_batch)
    replicas = (first, *(Replica(devices=(name,), samples=0) for name in names[1:]))
    for recompute, zero in itertools.product(scope.recompute, {min(scope.zero), max(scope.zero)}):
        end = len(search.prices.chain.layers)
        stage = Stage(first=0, end=end, replicas=replicas, recompute=recompute, zero=zero)
        yield replace(
            plain.bare,
            micro_batch_size=plain.global_batch,
            num_micro_batches=1,
            schedule=replace(search.settings.schedules[0], depth=None),
            stages=(stage,),
            collectives=(),
        )


def _sizes(size: int) -> list[int]:
    """Return the largest few divisors of a micro-batch size, and 1."""
    divisors = [number for number in range(1, size + 1) if size % number == 0]
    return sorted({*divisors[-_MOST_SIZES:], 1}, reverse=True)


def _changed(base: Plan, size: int, change: Callable[[Stage], Stage | None]) -> Iterator[Plan]:
    """Yield a plan with micro-batches of a size and every possible stage changed; none if nothing
    changes."""
    resized = [_resized(stage, size, base.micro_batch_size) for stage in base.stages]
    changed = [change(stage) for stage in resized]
    stages = [new or old for new, old in zip(changed, resized, strict=True)]
    if any(changed) and all(replica.samples for stage in stages for replica in stage.replicas):
        count = base.global_batch // size
        yield replace(
            base,
            micro_batch_size=size,
            num_micro_batches=count,
            stages=tuple(stages),
            collectives=(),
        )


def _resized(stage: Stage, size: int, before: int) -> Stage:
    """Return a stage whose replicas have their shares of a smaller micro-batch if these are whole;
    otherwise the first has all of it."""
    shares = [replica.samples * size / before for replica in stage.replicas]
    if all(share == int(share) >= 1 for share in shares):
        samples = [int(share) for share in shares]
    else:
        samples = [size, *(0 for _ in shares[1:])]
    pairs = zip(stage.replicas, samples, strict=True)
    return replace(
        stage, replicas=tuple(replace(replica, samples=count) for replica, count in pairs)
    )


def _one_sequence(stage: Stage, prices: Prices, cluster: Cluster) -> Stage | None:
    """Return a stage changed by (1), or None if the devices are equal, form tensor-parallel groups,
    or are too many for the sequence."""
    devices, layers = stage.devices, prices.chain.layers[stage.first : stage.end]
    most = min(layer.max_context for layer in layers)
    if not stage.parts_are_alone or not 2 <= len(devices) <= min(most, _MOST_DEVICES):
        return None
    samples = sum(replica.samples for replica in stage.replicas)
    joined = replace(stage, context=1, expert=1, experts=())
    speeds = [_speed(joined, device, samples, prices, cluster) for device in devices]
    if len(set(speeds)) == 1:
        return None
    replica = Replica(devices=devices, samples=samples, ratios=_shares(speeds))
    return replace(joined, replicas=(replica,), context=len(devices))


def _shared_experts(stage: Stage, prices: Prices, cluster: Cluster) -> Stage | None:
    """Return a stage changed by (2), or None if the devices are equal or form groups, or there are
    fewer experts than devices."""
    counts = {layer.num_experts for layer in prices.chain.layers[stage.first : stage.end]} - {0}
    devices = stage.devices
    samples = sum(replica.samples for replica in stage.replicas)
    alone = stage.context == 1 and stage.parts_are_alone
    if (
        not alone
        or len(counts) != 1
        or not 2 <= len(devices) <= min(*counts, samples, _MOST_DEVICES)
    ):
        return None
    speeds = [_speed(stage, device, 1, prices, cluster) for device in devices]
    if len(set(speeds)) == 1:
        return None
    shares = _shares(speeds)
    pairs = zip(stage.replicas, unit_counts(samples, shares), strict=True)
    replicas = tuple(replace(replica, samples=count) for replica, count in pairs)
    return replace(
        stage, replicas=replicas, expert=len(devices), experts=unit_counts(counts.pop(), shares)
    )


def _speed(stage: Stage, device: str, samples: int, prices: Prices, cluster: Cluster) -> float:
    """Return the speed of a device that runs a stage alone."""
    where = cluster.device(device)
    portion = Portion(device=where, samples=samples)
    alone = replace(
        stage,
        replicas=(Replica(devices=(device,), samples=samples),),
        context=1,
        expert=1,
        experts=(),
    )
    return where.speed.at(0) / sum(stage_seconds(prices.model, prices.chain, alone, portion))


def _shares(speeds: Sequence[float]) -> tuple[float, ...]:
    """Return shares that sum to 1, rounded as in a plan's file."""
    shares = [round(speed / sum(speeds), 6) for speed in speeds]
    return (1 - math.fsum(shares[1:]), *shares[1:])
