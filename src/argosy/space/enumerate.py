"""Enumerate the options of a sub-problem: the numbers of devices a stage may take from each pool,
and the ways to run a stage on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from argosy.cluster.host import Tier
from argosy.cost.memory import USABLE
from argosy.plan.offload import NO_OFFLOAD, Offload, choices
from argosy.plan.plan import Recompute
from argosy.plan.runnable import RECOMPUTE, ZERO
from argosy.space.option import Option, PoolPart, Vector
from argosy.space.pool import Pool
from argosy.space.price import Prices
from argosy.space.prune import Counters, fits_nowhere, without_dominated
from argosy.space.shares import most_samples, share_samples, share_within, whole_seconds
from argosy.space.widths import node_widths, tensor_widths
from argosy.workload.chain import Chain

# Sequences of at least this many tokens are cut into parts (context parallelism). Shorter sequences
# usually fit on the devices whole and gain nothing over tensor parallelism, and every further
# option costs search time.
LONG_SEQUENCE = 32_768

# Without mixed stages, pools of one device kind are still combined if a cluster has at most this
# many pools. More pools would give too many combinations.
_JOINED = 3


@dataclass(frozen=True, kw_only=True)
class Scope:
    """A description of the plans that are searched; a certificate states it."""

    units: Vector
    """Number of devices of each pool that are allocated together."""
    mixed: bool = True
    """Whether a stage may mix kinds of devices."""
    recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    zero: tuple[int, ...] = (1, 0, 2, 3)
    """ZeRO levels of stages with several replicas; a single replica has nothing to shard."""
    widths: tuple[int, ...] | None = None
    """Allowed sizes of tensor-parallel groups; by default every size that a node and the layers
    allow."""
    one_width: bool = False
    """Whether all tensor-parallel groups of a stage have one size."""
    spanning: bool = True
    """Whether tensor-parallel groups of whole sequences and whole experts may fill several
    nodes."""
    context: tuple[int, ...] | None = None
    """Allowed numbers of parts of a sequence; by default powers of two for long sequences
    (``wants_parts``), otherwise 1."""
    expert: tuple[int, ...] | None = None
    """Allowed numbers of holders that the experts are split over; by default every divisor of the
    number of experts."""
    max_context: int | None = None
    """Maximum number of parts of a sequence of any length; by default long sequences are cut as far
    as possible."""
    max_expert: int | None = None
    """Maximum number of holders that the experts of a stage are split over; by default the number
    of experts."""
    replicas: int | None = None
    """Number of replicas of every stage, with equal numbers of samples; by default any number of
    replicas with any shares."""
    offload: Offload = NO_OFFLOAD
    """State that a stage may keep outside its devices."""
    even: bool = False
    """Whether all replicas of a stage take equal numbers of samples."""
    prune: bool = True
    runnable: bool = False
    """Whether only plans that Argosy's own runtime executes are searched."""

    def counts(self, pools: Sequence[Pool]) -> Vector:
        """Return the number of units in each pool; a remainder of devices stays idle at this
        granularity."""
        return tuple(pool.count // unit for pool, unit in zip(pools, self.units, strict=True))

    def describe(self, pools: Sequence[Pool]) -> str:
        """Return the scope as text for a certificate, such as ``stages of multiples of 8x
        A100-80GB, 8x T4, along the nodes, of one kind each, ...``."""
        units = ", ".join(
            f"{unit}x {pool.name}" for unit, pool in zip(self.units, pools, strict=True)
        )
        kinds = "" if self.mixed or len(pools) == 1 else ", of one kind each"
        shares = ", samples by speed" if self.mixed and len(pools) > 1 else ""
        recompute = "/".join(self.recompute)
        zero = "/".join(map(str, sorted(self.zero)))
        width = (
            f", tensor width {'/'.join(map(str, self.widths))}" if self.widths is not None else ""
        )
        width += ", tensor-parallel groups of a stage of one width" if self.one_width else ""
        if any(len(pool.nodes) > 1 for pool in pools):
            width += f", groups {'also across' if self.spanning else 'inside'} nodes"
        even = ", equal shares" if self.even or self.replicas is not None else shares
        stages = f"stages of multiples of {units}, along the nodes{kinds}"
        splits = self._splits()
        offload = f", offload of {self.offload}" if self.offload else ""
        return f"{stages}, recompute {recompute}, ZeRO {zero}{offload}{width}{even}{splits}"

    def _splits(self) -> str:
        """Return ``, context 1/2/4, experts over 1/2``, without entries that allow 1 only."""
        named = (("context", self.context), ("experts over", self.expert))
        return "".join(
            f", {name} {'/'.join(map(str, allowed))}"
            for name, allowed in named
            if allowed and max(allowed) > 1
        )

    def allows_width(self, width: int) -> bool:
        return self.widths is None or width in self.widths

    def allows(self, pool: Pool, width: int) -> bool:
        """Return whether groups of this width are allowed; stages of whole nodes need a width that
        divides a node or fills several."""
        takes_nodes = self.units[pool.index] % pool.per_node == 0
        divides = pool.per_node % width == 0 or width % pool.per_node == 0
        return self.allows_width(width) and (divides or not takes_nodes)

    def allows_shares(self, parts: Sequence[PoolPart]) -> bool:
        """Return whether the shares are equal if ``even`` requires it and the number of replicas is
        the one that ``replicas`` requires."""
        if not self.even and self.replicas is None:
            return True
        equal = len({part.samples for part in parts}) == 1 and not any(part.extra for part in parts)
        return equal and self.replicas in (None, sum(part.replicas for part in parts))


def only_runnable(scope: Scope) -> Scope:
    """Return the part of a scope that Argosy's runtime executes."""
    return replace(
        scope,
        recompute=tuple(
            recompute for recompute in scope.recompute if str(recompute) in RECOMPUTE.runs
        ),
        zero=tuple(zero for zero in scope.zero if zero in ZERO.runs),
        offload=_only_run(scope.offload),
        runnable=True,
    )


def _only_run(offload: Offload) -> Offload:
    """Return the part of an offload that the runtime executes: optimizer state and activations in
    host memory."""
    optimizer, activations = (
        tier if tier is Tier.HOST else None for tier in (offload.optimizer, offload.activations)
    )
    return Offload(optimizer=optimizer, activations=activations)


def with_splits(scope: Scope, prices: Prices) -> Scope:
    """Return a scope that states how sequences and experts are split; the chain decides what the
    scope leaves open."""
    devices = sum(pool.count for pool in prices.pools)
    context, expert = scope.context, scope.expert
    if context is None:
        most = (
            min(prices.most_parts, devices)
            if scope.max_context is not None or wants_parts(prices)
            else 1
        )
        most = min(most, scope.max_context or most)
        context = tuple(2**power for power in range(most.bit_length()))
    if expert is None:
        most = prices.most_experts
        holders = min(most, devices, scope.max_expert or most)
        expert = tuple(number for number in range(1, holders + 1) if most % number == 0)
    return replace(scope, context=context, expert=expert)


def wants_parts(prices: Prices) -> bool:
    """Return whether sequences are cut: they have at least ``LONG_SEQUENCE`` tokens, or one sample
    of some layer, recomputed, fits on no tensor-parallel group inside a node."""
    if prices.chain.sequence_length >= LONG_SEQUENCE:
        return True
    layers = prices.chain.layers
    rooms = [
        USABLE * pool.device.kind.memory * max(node_widths(pool, prices.most_width))
        for pool in prices.pools
    ]
    return max(layer.activation_bytes for layer in layers) > max(rooms)


def vectors(pools: Sequence[Pool], scope: Scope) -> Iterator[Vector]:
    """Yield the vectors of devices, in units: any number from one pool, any numbers from two pools,
    and all devices if there are more than two pools.

    Without mixed stages, pools are combined only if there are few of them (``_JOINED``) and they
    hold one kind of device, at several sites or speeds.
    """
    counts = scope.counts(pools)
    empty = (0,) * len(pools)
    for index, count in enumerate(counts):
        for number in range(1, count + 1):
            yield (*empty[:index], number, *empty[index + 1 :])
    for (first, first_count), (second, second_count) in itertools.combinations(
        enumerate(counts), 2
    ):
        if not scope.mixed and (len(pools) > _JOINED or pools[first].name != pools[second].name):
            continue
        for number, partner in itertools.product(
            range(1, first_count + 1), range(1, second_count + 1)
        ):
            vector = list(empty)
            vector[first], vector[second] = number, partner
            yield tuple(vector)
    used = [pool for pool, count in zip(pools, counts, strict=True) if count]
    if len(used) > 2 and (
        scope.mixed or (len(pools) <= _JOINED and len({pool.name for pool in used}) == 1)
    ):
        yield counts


Shared = tuple[tuple[PoolPart, ...], Recompute]
"""The parts of a stage that share a micro-batch, and the stage's recomputation."""


def stage_parts(
    prices: Prices, micro_batch: int, scope: Scope, counters: Counters
) -> dict[Vector, list[Shared]]:
    """Return the parts and recomputations that a stage may have on every vector of devices.

    ZeRO and memory are not considered yet. Vectors without any possibility are omitted.
    """
    return _all_parts(prices, micro_batch, scope, counters, only_spanning=False)


def _all_parts(
    prices: Prices, micro_batch: int, scope: Scope, counters: Counters, *, only_spanning: bool
) -> dict[Vector, list[Shared]]:
    scope = with_splits(scope, prices)
    result: dict[Vector, list[Shared]] = {}
    for vector in vectors(prices.pools, scope):
        devices = tuple(number * unit for number, unit in zip(vector, scope.units, strict=True))
        ways = _parts_of(prices, micro_batch, devices, scope, counters, only_spanning=only_spanning)
        shared = list(ways)
        if shared:
            result[vector] = shared
    return result


def quick_parts(
    prices: Prices, parts: Mapping[Vector, Sequence[Shared]], most: float
) -> dict[Vector, list[Shared]]:
    """Return the parts that compute a micro-batch of the whole chain in less than ``most``
    seconds."""
    return {
        vector: [shared for shared in ways if whole_seconds(prices, *shared) < most]
        for vector, ways in parts.items()
    }


def stage_options(
    prices: Prices,
    micro_batch: int,
    scope: Scope,
    counters: Counters,
    parts: Mapping[Vector, Sequence[Shared]] | None = None,
) -> dict[Vector, list[Option]]:
    """Return all options by vector, without those that pruning rules remove and without vectors
    that have no option.

    ``parts`` is the result of ``stage_parts``, if the caller has it already.
    """
    result: dict[Vector, list[Option]] = {}
    for vector, ways in (
        parts if parts is not None else stage_parts(prices, micro_batch, scope, counters)
    ).items():
        devices = tuple(number * unit for number, unit in zip(vector, scope.units, strict=True))
        options: list[Option] = []
        known: dict[tuple[tuple[PoolPart, ...], int, Offload], Option] = {}
        for shared, offload in itertools.product(ways, choices(scope.offload)):
            if offload.activations is not None and shared[1] is Recompute.SELECTIVE:
                continue
            variants = list(_with_zero(prices, devices, *shared, offload, scope, counters, known))
            options += without_dominated(variants, counters) if scope.prune else variants
        if options:
            result[vector] = options
    return result


def spanning_parts(
    prices: Prices, micro_batch: int, scope: Scope, counters: Counters
) -> dict[Vector, list[Shared]]:
    """Return those parts of ``stage_parts`` that have a tensor-parallel group across nodes."""
    return _all_parts(prices, micro_batch, scope, counters, only_spanning=True)


def _parts_of(
    prices: Prices,
    micro_batch: int,
    devices: Vector,
    scope: Scope,
    counters: Counters,
    *,
    only_spanning: bool,
) -> Iterator[Shared]:
    divisions = _groups(prices, devices, scope, counters, only_spanning=only_spanning)
    fewest = _fewest_experts(prices.chain) if scope.runnable else 0
    for groups, context, spans in divisions:
        for expert in (1,) if spans else scope.expert or (1,):
            if any(replicas * context % expert for _, _, replicas in groups):
                continue
            if fewest and any(width // context * expert > fewest for _, width, _ in groups):
                continue  # the members of a group divide whole experts in a run
            for recompute in scope.recompute:
                parts = share_samples(
                    prices, groups, micro_batch, recompute, context=context, expert=expert
                )
                if parts is not None and not scope.allows_shares(parts):
                    parts = None
                if parts is None:
                    counters.add("divisibility")
                    break
                if not all(is_measured(prices, part) for part in parts):
                    counters.add("unmeasured")
                elif expert == 1 or not any(part.extra for part in parts):
                    yield parts, recompute
                    limited = _within_memory(prices, devices, (parts, recompute), scope)
                    yield from ((shares, recompute) for shares in limited)


def _fewest_experts(chain: Chain) -> int:
    """Return the least number of experts of a layer that has any; 0 if none has."""
    return min((layer.num_experts for layer in chain.layers if layer.num_experts), default=0)


def _within_memory(
    prices: Prices, devices: Vector, shared: Shared, scope: Scope
) -> list[tuple[PoolPart, ...]]:
    """Return shares by memory for a stage on several pools whose shares by speed fit nowhere."""
    parts, recompute = shared
    if len(parts) == 1 or parts[0].expert > 1 or scope.even or scope.replicas is not None:
        return []
    ways: dict[tuple[PoolPart, ...], None] = {}
    for zero in scope.zero:
        option = Option(prices=prices, vector=devices, parts=parts, recompute=recompute, zero=zero)
        limited = share_within(option, most_samples(option)) if fits_nowhere(option) else None
        if limited is not None and all(is_measured(prices, part) for part in limited):
            ways[limited] = None
    return [limited for limited in ways if limited != parts]


class _Groups(NamedTuple):
    """A division of the devices of a stage into groups."""

    replicas: list[tuple[int, int, int]]
    """For every pool: its number, the width of a replica, and the replicas."""
    context: int
    spans: bool
    """Whether a tensor-parallel group fills several nodes."""


def _groups(
    prices: Prices,
    devices: Vector,
    scope: Scope,
    counters: Counters,
    *,
    only_spanning: bool,
) -> Iterator[_Groups]:
    """Yield all divisions of the devices of a stage.

    A tensor-parallel group lies inside a node or, if sequences are whole, fills several. A replica
    has one group per part of the sequence, and takes an equal part of a node, or whole nodes.
    """
    taken = [(pool, number) for pool, number in enumerate(devices) if number]
    pools = [prices.pools[pool] for pool, _ in taken]
    most = prices.most_width
    widths = [
        [
            width
            for width in tensor_widths(pool, number, most, spanning=scope.spanning)
            if scope.allows(pool, width)
        ]
        for pool, (_, number) in zip(pools, taken, strict=True)
    ]
    for context, choice in itertools.product(scope.context or (1,), itertools.product(*widths)):
        spans = any(width > pool.per_node for pool, width in zip(pools, choice, strict=True))
        if (
            (scope.one_width and len(set(choice)) > 1)
            or (spans and context > 1)
            or (only_spanning and not spans)
        ):
            continue
        groups = [
            (pool, width * context, number // (width * context))
            for (pool, number), width in zip(taken, choice, strict=True)
        ]
        if any(
            number % width or (width > pool.per_node and width % pool.per_node)
            for (_, width, _), (_, number), pool in zip(groups, taken, pools, strict=True)
        ):
            continue
        if any(
            prices.sample_range(pool, width) is None
            for (pool, _), width in zip(taken, choice, strict=True)
        ):
            counters.add("unmeasured")
            continue
        yield _Groups(groups, context, spans)


def is_measured(prices: Prices, part: PoolPart) -> bool:
    """Return whether a profile has the times of a part's samples; if sequences are cut, fewer
    samples than were measured count as known."""
    known = prices.sample_range(part.pool, part.tensor_width)
    assert known is not None, "_groups leaves these out"
    return part.most <= known[1] * part.context and (part.context > 1 or part.samples >= known[0])


def _with_zero(
    prices: Prices,
    devices: Vector,
    parts: tuple[PoolPart, ...],
    recompute: Recompute,
    offload: Offload,
    scope: Scope,
    counters: Counters,
    known: dict[tuple[tuple[PoolPart, ...], int, Offload], Option],
) -> Iterator[Option]:
    """Yield an option for every ZeRO level; ``known`` holds options that differ in recomputation
    only."""
    alone = sum(part.replicas * part.context for part in parts) == 1
    for zero in (0,) if alone else scope.zero:
        if scope.runnable and offload.activations is not None and zero > 1:
            continue
        similar = known.get((parts, zero, offload))
        if similar is None:
            option = Option(
                prices=prices,
                vector=devices,
                parts=parts,
                recompute=recompute,
                zero=zero,
                offload=offload,
            )
            known[parts, zero, offload] = option
        else:
            option = similar.recomputing(recompute)
        if scope.prune and fits_nowhere(option):
            counters.add("memory")
        else:
            yield option
