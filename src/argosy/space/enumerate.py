"""Every option of a sub-problem: the vectors of devices that a stage may take, and the ways to run
on each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from argosy.cluster.host import Tier
from argosy.cost.memory import USABLE
from argosy.plan.offload import NO_OFFLOAD, Offload, choices
from argosy.plan.plan import Recompute
from argosy.plan.runnable import ALONE, CONTEXT, RECOMPUTE, ZERO
from argosy.space.option import Option, PoolPart, Vector
from argosy.space.pool import Pool
from argosy.space.price import Prices, widest
from argosy.space.prune import Counters, fits_nowhere, without_dominated
from argosy.space.shares import share_samples, whole_seconds
from argosy.space.widths import node_widths, tensor_widths

LONG_SEQUENCE = 32_768
"""Tokens from which on sequences are cut into parts. Shorter ones fit without, as a rule, and gain
nothing that tensor parallelism does not give; and every further option costs search time."""

_JOINED = 3
"""Up to so many pools, those of one kind are taken together also without mixtures."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Which plans are searched; a certificate states it."""

    units: Vector
    """Devices of each pool that are taken together."""
    mixed: bool = True
    """Whether a stage may mix kinds of devices."""
    recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    zero: tuple[int, ...] = (1, 0, 2, 3)
    """For stages with several replicas; a single replica has nothing to share."""
    widths: tuple[int, ...] | None = None
    """Tensor-parallel groups of these sizes only; by default of every size that a node and the
    layers allow."""
    one_width: bool = False
    """Whether the tensor-parallel groups of a stage are all of one size."""
    context: tuple[int, ...] | None = None
    """Numbers of parts of a sequence; by default powers of two for long sequences
    (``wants_parts``), else 1."""
    expert: tuple[int, ...] | None = None
    """Numbers of holders that share out the experts; by default every one that divides their
    number."""
    max_context: int | None = None
    """At most so many parts of a sequence, of whatever length; by default long ones are cut as far
    as they can be."""
    max_expert: int | None = None
    """At most so many holders for the experts of a stage; by default as many as there are
    experts."""
    parts_alone: bool = False
    """Whether a part of a sequence has one device, not a tensor-parallel group."""
    replicas: int | None = None
    """Every stage has so many replicas, which take as many samples each; by default any number, any
    shares."""
    offload: Offload = NO_OFFLOAD
    """What a stage may keep outside its devices."""
    even: bool = False
    """Whether the replicas of a stage take as many samples each."""
    prune: bool = True
    runnable: bool = False
    """Whether only plans count that our own runtime executes."""

    def counts(self, pools: Sequence[Pool]) -> Vector:
        """Units in each pool; what is left over is not used at this granularity."""
        return tuple(pool.count // unit for pool, unit in zip(pools, self.units, strict=True))

    def describe(self, pools: Sequence[Pool]) -> str:
        """For a certificate: ``stages of multiples of 8x A100-80GB, 8x T4, along the nodes, of one
        kind each, ...``."""
        units = ", ".join(
            f"{unit}x {pool.name}" for unit, pool in zip(self.units, pools, strict=True)
        )
        kinds = "" if self.mixed or len(pools) == 1 else ", of one kind each"
        recompute = "/".join(self.recompute)
        zero = "/".join(map(str, sorted(self.zero)))
        width = (
            f", tensor width {'/'.join(map(str, self.widths))}" if self.widths is not None else ""
        )
        width += ", tensor-parallel groups of a stage of one width" if self.one_width else ""
        even = ", equal shares" if self.even or self.replicas is not None else ""
        stages = f"stages of multiples of {units}, along the nodes{kinds}"
        splits = self._splits()
        splits += (
            ", parts of sequences of one device" if self.parts_alone and "context" in splits else ""
        )
        offload = f", offload of {self.offload}" if self.offload else ""
        return f"{stages}, recompute {recompute}, ZeRO {zero}{offload}{width}{even}{splits}"

    def _splits(self) -> str:
        """``, context 1/2/4, experts over 1/2``; nothing for 1 alone."""
        named = (("context", self.context), ("experts over", self.expert))
        return "".join(
            f", {name} {'/'.join(map(str, each))}" for name, each in named if each and max(each) > 1
        )

    def allows_width(self, width: int) -> bool:
        return self.widths is None or width in self.widths

    def allows(self, pool: Pool, width: int) -> bool:
        """Where stages take whole nodes, so do their groups."""
        takes_nodes = self.units[pool.index] % pool.per_node == 0
        return self.allows_width(width) and not (takes_nodes and pool.per_node % width)

    def allows_shares(self, parts: Sequence[PoolPart]) -> bool:
        """Equal ones if ``even`` asks for them, and of the right number if ``replicas`` does."""
        if not self.even and self.replicas is None:
            return True
        equal = len({part.samples for part in parts}) == 1 and not any(part.extra for part in parts)
        return equal and self.replicas in (None, sum(part.replicas for part in parts))


def only_runnable(scope: Scope) -> Scope:
    """What of a scope our runtime executes."""
    return replace(
        scope,
        recompute=tuple(
            recompute for recompute in scope.recompute if str(recompute) in RECOMPUTE.runs
        ),
        zero=tuple(zero for zero in scope.zero if zero in ZERO.runs),
        parts_alone=CONTEXT.runs == (ALONE,),
        offload=_only_run(scope.offload),
        runnable=True,
    )


def _only_run(offload: Offload) -> Offload:
    """What of some offload our runtime executes: optimizer state and activations in host memory."""
    optimizer, activations = (
        tier if tier is Tier.HOST else None for tier in (offload.optimizer, offload.activations)
    )
    return Offload(optimizer=optimizer, activations=activations)


def with_splits(scope: Scope, prices: Prices) -> Scope:
    """A scope that says how sequences and experts are split, as the chain wants it where the scope
    leaves it open."""
    devices = sum(pool.count for pool in prices.pools)
    context, expert = scope.context, scope.expert
    if scope.parts_alone and prices.most_experts > 1:
        context, scope = (1,), replace(scope, widths=(1,))
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
    """Whether to cut sequences: they have ``LONG_SEQUENCE`` tokens or more, or one sample of some
    layer, recomputed, fits on no tensor-parallel group inside a node."""
    if prices.chain.sequence_length >= LONG_SEQUENCE:
        return True
    layers = prices.chain.layers
    rooms = [
        USABLE * pool.device.kind.memory * max(node_widths(pool, widest(layers)))
        for pool in prices.pools
    ]
    return max(layer.activation_bytes for layer in layers) > max(rooms)


def vectors(pools: Sequence[Pool], scope: Scope) -> Iterator[Vector]:
    """In units: any number from one pool; from two; and, of more than two pools, all there is.
    Without mixtures, pools are taken together only if they are of one kind, in several sites or at
    several speeds, and few."""
    counts = scope.counts(pools)
    empty = (0,) * len(pools)
    for index, count in enumerate(counts):
        for number in range(1, count + 1):
            yield (*empty[:index], number, *empty[index + 1 :])
    for (one, most), (other, at_most) in itertools.combinations(enumerate(counts), 2):
        if not scope.mixed and (len(pools) > _JOINED or pools[one].name != pools[other].name):
            continue
        for number, partner in itertools.product(range(1, most + 1), range(1, at_most + 1)):
            vector = list(empty)
            vector[one], vector[other] = number, partner
            yield tuple(vector)
    used = [pool for pool, count in zip(pools, counts, strict=True) if count]
    if len(used) > 2 and (
        scope.mixed or (len(pools) <= _JOINED and len({pool.name for pool in used}) == 1)
    ):
        yield counts


Shared = tuple[tuple[PoolPart, ...], Recompute]
"""A micro-batch shared out among the replicas of a stage that recomputes so much."""


def stage_parts(
    prices: Prices, micro_batch: int, scope: Scope, counters: Counters
) -> dict[Vector, list[Shared]]:
    """What a stage may do with every vector of devices, ZeRO and memory aside; vectors that are
    good for nothing are left out."""
    scope = with_splits(scope, prices)
    result: dict[Vector, list[Shared]] = {}
    for vector in vectors(prices.pools, scope):
        devices = tuple(number * unit for number, unit in zip(vector, scope.units, strict=True))
        found = list(_parts_of(prices, micro_batch, devices, scope, counters))
        if found:
            result[vector] = found
    return result


def quick_parts(
    prices: Prices, parts: Mapping[Vector, Sequence[Shared]], most: float
) -> dict[Vector, list[Shared]]:
    """The parts that compute a micro-batch of the whole chain in less than so many seconds."""
    return {
        vector: [one for one in each if whole_seconds(prices, *one) < most]
        for vector, each in parts.items()
    }


def stage_options(
    prices: Prices,
    micro_batch: int,
    scope: Scope,
    counters: Counters,
    parts: Mapping[Vector, Sequence[Shared]] | None = None,
) -> dict[Vector, list[Option]]:
    """All options by vector, less what the rules remove; vectors without options are left out.
    ``parts`` as ``stage_parts`` says, where that was asked already."""
    result: dict[Vector, list[Option]] = {}
    for vector, each in (
        parts if parts is not None else stage_parts(prices, micro_batch, scope, counters)
    ).items():
        devices = tuple(number * unit for number, unit in zip(vector, scope.units, strict=True))
        found: list[Option] = []
        known: dict[tuple[tuple[PoolPart, ...], int, Offload], Option] = {}
        for one, offload in itertools.product(each, choices(scope.offload)):
            if offload.activations is not None and one[1] is Recompute.SELECTIVE:
                continue
            alike = list(_with_zero(prices, devices, *one, offload, scope, counters, known))
            found += without_dominated(alike, counters) if scope.prune else alike
        if found:
            result[vector] = found
    return result


def _parts_of(
    prices: Prices, micro_batch: int, devices: Vector, scope: Scope, counters: Counters
) -> Iterator[Shared]:
    for groups, context in _groups(prices, devices, scope, counters):
        for expert in scope.expert or (1,):
            if any(replicas * context % expert for _, _, replicas in groups):
                continue
            for recompute in scope.recompute:
                parts = share_samples(
                    prices, groups, micro_batch, recompute, context=context, expert=expert
                )
                if parts is not None and not scope.allows_shares(parts):
                    parts = None
                if parts is None:
                    counters.add("divisibility")
                    break
                if not all(_is_measured(prices, part) for part in parts):
                    counters.add("unmeasured")
                elif expert == 1 or not any(part.extra for part in parts):
                    yield parts, recompute


def _groups(
    prices: Prices, devices: Vector, scope: Scope, counters: Counters
) -> Iterator[tuple[list[tuple[int, int, int]], int]]:
    """(pool, width, replicas) of every pool, and the parts of the sequence: tensor-parallel groups
    inside a node, as many side by side as there are parts; a replica takes an equal part of a node,
    or whole nodes."""
    taken = [(pool, number) for pool, number in enumerate(devices) if number]
    most = widest(prices.chain.layers)
    widths = [
        [
            width
            for width in tensor_widths(prices.pools[pool], number, most)
            if scope.allows(prices.pools[pool], width)
        ]
        for pool, number in taken
    ]
    for context, choice in itertools.product(scope.context or (1,), itertools.product(*widths)):
        if (scope.one_width and len(set(choice)) > 1) or (
            scope.parts_alone and context > 1 and max(choice) > 1
        ):
            continue
        groups = [
            (pool, width * context, number // (width * context))
            for (pool, number), width in zip(taken, choice, strict=True)
        ]
        sizes = [(number, prices.pools[pool].per_node) for pool, number in taken]
        pairs = zip(groups, sizes, strict=True)
        if any(
            number % width or (width > node and width % node)
            for (_, width, _), (number, node) in pairs
        ):
            continue
        if any(
            prices.sample_range(pool, width) is None
            for (pool, _), width in zip(taken, choice, strict=True)
        ):
            counters.add("unmeasured")
            continue
        yield groups, context


def _is_measured(prices: Prices, part: PoolPart) -> bool:
    """Whether the times of a part's samples are known; fewer than were measured are where a
    sequence is in parts."""
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
    """``known``: those with other recomputation."""
    alone = sum(part.replicas * part.context for part in parts) == 1
    for zero in (0,) if alone else scope.zero:
        if scope.runnable and offload.activations is not None and zero > 1:
            continue
        like = known.get((parts, zero, offload))
        if like is None:
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
            option = like.recomputing(recompute)
        if scope.prune and fits_nowhere(option):
            counters.add("memory")
        else:
            yield option
