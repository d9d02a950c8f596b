"""Price the options of a stage: how numbers of devices of each pool run *any* range of layers.

An option fixes everything but the layers: tensor width and samples of each part, recomputation,
ZeRO and offload (``space.offloaded``). Its times and bytes are running sums over the layers, so one
object prices every range. For layers a..b-1 and n micro-batches in flight:

    (1)  slowest(a, b)  = max over parts of forward + backward, which limits the rate of the stage
    (2)  quickest(a, b) = min over parts of forward + backward, the least time in which a
         micro-batch passes through the stage and back
    (3)  memory(a, b)   = weights + gradients + optimizer + n kept + receive buffers + what is
         recomputed at a time + what ZeRO 2 and 3 hold whole of a layer
    (4)  exchange(a, b) = seconds of gradient exchange that cannot overlap with the stage's own
         compute
    (5)  loaded(a, b)   = seconds per micro-batch that ZeRO 2 and 3 keep the network busy
    (6)  stretch(a, b)  = seconds between a backward under ZeRO 3 and the stage's next action:
         gradients are scattered, then weights gathered; the gather for a backward overlaps with the
         forward before it, as far as it is shorter; 0 if the cost model sets ``prefetch``, which
         lets all of it overlap with compute

A part is a group of equal replicas from one pool. Samples are assigned one by one to the replica
that would finish first, which minimises (1) over integer shares.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from argosy.cost.collective import tree_depth, tree_load
from argosy.cost.compute import FACTOR_PASSES
from argosy.cost.memory import USABLE, error_bytes, times_whole
from argosy.cost.offload import overlapped
from argosy.cost.taken import num_exchanges, sent_shares
from argosy.plan.offload import NO_OFFLOAD, Offload
from argosy.plan.plan import Recompute, Replica, Stage
from argosy.space.exchange import routed_crowding
from argosy.space.offloaded import (
    copied_ranges,
    copied_weights,
    copy_seconds,
    inside_ranges,
    limit_in_flight,
    moment_rates,
    rate_of,
    weight_rates,
)
from argosy.space.part import PoolPart as PoolPart
from argosy.space.pool import Pool, line_between_sites
from argosy.space.price import FloatArray, Prices, Rates
from argosy.workload.optimizer import OPTIMIZERS

Vector = tuple[int, ...]
"""The number of devices taken from each pool."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """A way to run a stage that takes a vector of devices; ``solve.search.tables`` tabulates
    many."""

    prices: Prices
    vector: Vector
    parts: tuple[PoolPart, ...]
    recompute: Recompute
    zero: int
    offload: Offload = NO_OFFLOAD

    @cached_property
    def replicas(self) -> int:
        return sum(part.replicas for part in self.parts)

    @cached_property
    def num_devices(self) -> int:
        return sum(part.devices for part in self.parts)

    @property
    def context(self) -> int:
        return self.parts[0].context

    @property
    def expert(self) -> int:
        return self.parts[0].expert

    @cached_property
    def way(self) -> int:
        """Return a number for the fields in which options on the same devices may differ: equal
        numbers for equal fields."""
        fields = (self.parts, self.recompute, self.zero, self.offload)
        return self.prices.ways.setdefault(fields, len(self.prices.ways))

    @property
    def holders(self) -> int:
        """Return the number of tensor-parallel groups that hold the weights once each (apart from
        experts)."""
        return self.replicas * self.context

    def recomputing(self, recompute: Recompute) -> Option:
        """Return a copy with another recomputation that shares this option's cached values: only
        times and activations depend on recomputation, and these are not cached here."""
        copied = copy.copy(self)
        object.__setattr__(copied, "recompute", recompute)
        copied.__dict__.pop("way", None)
        return copied

    def sums(self, part: PoolPart, samples: int) -> tuple[FloatArray, FloatArray]:
        """Return running sums of the forward and backward seconds of a replica with ``samples``
        samples."""
        way = (part.pool, part.width, samples, self.recompute)
        return self.prices.seconds(
            *way, context=part.context, expert=part.expert, devices=self.num_devices
        )

    def stage(self, first: int, end: int, replicas: tuple[Replica, ...]) -> Stage:
        """Return a stage that runs these layers on ``replicas``; experts are split only if a layer
        has some."""
        has_experts = any(layer.num_experts for layer in self.prices.chain.layers[first:end])
        return Stage(
            first=first,
            end=end,
            replicas=replicas,
            recompute=self.recompute,
            zero=self.zero,
            context=self.context,
            expert=self.expert if has_experts else 1,
            offload=self.offload,
        )

    @cached_property
    def pools(self) -> list[Pool]:
        """Return the pool of each part."""
        return [self.prices.pools[part.pool] for part in self.parts]

    def seconds(self, first: int, end: int) -> tuple[float, float]:
        """Return the forward and backward seconds of the slowest replica; (5) and (6) lengthen the
        backward."""
        forward, backward = self._compute(first, end)
        if self.zero == 2:
            backward += max(0.0, self.once_around(first, end) - forward - backward)
        elif self.zero == 3 and self.prefetches:
            backward += max(0.0, 3 * self.once_around(first, end) - forward - backward)
        elif self.zero == 3:
            around = self.once_around(first, end)
            backward += 2 * around + max(0.0, around - forward)
        return forward, backward

    def _compute(self, first: int, end: int) -> tuple[float, float]:
        """Return the forward and backward seconds of the slowest replica, with what exchanges take
        ((3) and (4) of ``cost.taken``) and copies beside them ((5) of ``cost.offload``)."""
        forward = backward = 0.0
        for part, pool in zip(self.parts, self.pools, strict=True):
            more = self._crowding(part, pool, first, end)
            ahead, back = (float(s[end] - s[first]) + more for s in self.sums(part, part.most))
            if self.zero > 1:
                taken = self.prices.weigh_range(self._taken(part, pool), first, end)
                forwards, backwards = num_exchanges(self.zero)
                ahead, back = ahead + forwards * taken, back + backwards * taken
            if self.offload:
                copied = copy_seconds(self, part, first, end)
                ahead = overlapped(ahead, float(copied[0]), end - first)
                back = overlapped(back, float(copied[1]), end - first)
            forward, backward = max(forward, ahead), max(backward, back)
        return forward, backward

    def _taken(self, part: PoolPart, pool: Pool) -> Rates:
        """Return the seconds that an exchange takes from a device's compute, as rates."""
        shares = sent_shares(self.holders, self.expert)
        rate = part.tensor_width * pool.exchange_rate / self.prices.chain.exchanged_bytes(self.zero)
        return shares[0] / rate, shares[1] / rate, 0.0

    def once_around(self, first: int, end: int) -> float:
        """Return the seconds of one gather of the weights, or of one scatter of the gradients."""
        return self.prices.weigh_range(self._times_around(1), first, end)

    def _crowding(self, part: PoolPart, pool: Pool, first: int, end: int) -> float:
        """Return the seconds that other groups of a node add: to reductions if all share one bus,
        and to routing."""
        prices, seconds = self.prices, 0.0
        if part.expert > 1:
            routed = 2 * part.most * float(prices.routed[end] - prices.routed[first])
            seconds = routed * routed_crowding(pool, part.split, part.replicas)
        if part.width < 2 or not pool.intra_is_shared:
            return seconds
        others = min(part.replicas, max(1, pool.per_node // part.width)) - 1
        width = part.tensor_width
        payload = 2 * part.most * float(prices.reduced[end] - prices.reduced[first])
        return seconds + others * payload * (width - 1) / pool.intra_bandwidth

    def tail(self, first: int, end: int) -> float:
        """Return the seconds after the last backward: (4) by the best algorithm, and the update.
        Nothing follows the last backward under ZeRO 2 that its scatter could delay."""
        exchange = min(self.prices.weigh_range(way, first, end) for way in self.exchanges)
        if self.prefetches and self.zero > 1:
            exchange += self.once_around(first, end) / (end - first)
        elif self.zero == 2:
            exchange -= max(0.0, self.once_around(first, end) - sum(self._compute(first, end)))
        return exchange + self.prices.weigh_range(self.update, first, end)

    @cached_property
    def width(self) -> int:
        """Return the width of the widest tensor-parallel group."""
        return max(part.tensor_width for part in self.parts)

    def fits(self, first: int, end: int, in_flight: int, group: int) -> bool:
        """Return whether the layers can be split this way and fit into memory (3); a stage holds 2
        k + 1 receive buffers."""
        prices = self.prices
        if self.width > 1 and self.width > prices.widest[first, end]:
            return False
        held = self.state_range(first, end) + self.whole_bytes(first, end)
        passing = float(self.transient[first, end])
        kept = in_flight * float(self.kept_ranges[first, end])
        if self.offload and float(limit_in_flight(self, first, end)) < in_flight:
            return False
        sample_bytes = passing + kept + (2 * group + 1) * prices.largest_output
        return all(held + samples * sample_bytes <= size for size, samples in self.room)

    @property
    def kept_ranges(self) -> FloatArray:
        """Return [a, b]: activation bytes per sample that stay on the devices of a replica."""
        if self.offload.activations is not None:
            return inside_ranges(self.prices, self.recompute, self.width)
        return self.prices.kept_ranges(self.recompute, self.width)

    @property
    def transient(self) -> FloatArray:
        """Return [a, b]: bytes per sample that a backward holds for a moment."""
        passing = self.prices.transient(self.recompute, self.width)
        if self.offload.activations is None:
            return passing
        return passing + copied_ranges(self.prices, self.recompute, self.width)

    @property
    def frozen(self) -> FloatArray | None:
        """Return [a, b]: bytes of frozen weights on the devices of a replica, per part of the
        sequence."""
        return None if self.offload.weights is not None else self.prices.frozen(self.expert)

    def state_range(self, first: int, end: int) -> float:
        """Return the bytes of weights, gradients and optimizer state of a range of layers on all
        devices of a replica."""
        held = self.prices.weigh_range(self.state, first, end)
        frozen = self.frozen
        return held if frozen is None else held + self.context * float(frozen[first, end])

    def whole_bytes(self, first: int, end: int) -> float:
        """Return the bytes that a backward holds of one whole layer for a moment, on all devices of
        a replica (``cost.memory``, (8))."""
        gathered = (
            self.whole * float(self.prices.largest_layer(self.expert)[first, end])
            if self.whole
            else 0.0
        )
        return gathered + float(copied_weights(self, first, end)) if self.offload else gathered

    @cached_property
    def whole(self) -> float:
        """Return the bytes per weight of a layer that a backward holds whole for a moment, on all
        devices of a replica."""
        return (
            times_whole(self.zero, self.holders, backward=True)
            * self.prices.chain.dtype.bytes
            * self.context
        )

    @cached_property
    def nodes_of_copies(self) -> list[int]:
        """Return for each part over how many nodes one copy of the weights extends."""
        both = zip(self.parts, self.pools, strict=True)
        return [max(1, part.tensor_width // pool.per_node) for part, pool in both]

    @property
    def has_spanning_group(self) -> bool:
        """Return whether a tensor-parallel group fills several nodes."""
        return max(self.nodes_of_copies) > 1

    @cached_property
    def ways_out(self) -> list[float]:
        """Return for each part the bytes/s at which the nodes of one copy of the weights send it to
        other nodes: each sends its own slices."""
        both = zip(self.nodes_of_copies, self.pools, strict=True)
        return [nodes * pool.nic_bandwidth for nodes, pool in both]

    @cached_property
    def spans_nodes(self) -> bool:
        """Return whether the replicas use more than one node in every placement."""
        if any(
            part.devices > pool.per_node for part, pool in zip(self.parts, self.pools, strict=True)
        ):
            return True
        return len(self.parts) > 1 and not frozenset.intersection(
            *(pool.homes for pool in self.pools)
        )

    @cached_property
    def least_nodes(self) -> int:
        """Return the least number of nodes that the holders of any slice of the weights can use."""
        both = zip(self.parts, self.pools, self.nodes_of_copies, strict=True)
        counts = [math.ceil(part.devices / pool.per_node / nodes) for part, pool, nodes in both]
        apart = all(
            first.homes.isdisjoint(second.homes)
            for first, second in itertools.combinations(self.pools, 2)
        )
        return max(sum(counts) if apart else max(counts), 2 if self.spans_nodes else 1)

    @cached_property
    def ring(self) -> Rates:
        """Return lower bounds on the seconds to pass the stage's weights once around their holders.

        The three rates are seconds per byte of the weights that all holders have, seconds per byte
        of experts' weights, and seconds of latency; no algorithm is better in any of the three. If
        experts have several holders and the stage spans nodes, at least one copy goes from node to
        node.
        """
        ways = self._ways_around
        return min(way[0] for way in ways), min(way[1] for way in ways), min(way[2] for way in ways)

    @cached_property
    def _ways_around(self) -> list[Rates]:
        """Return the rates of ``ring`` for each algorithm; they are computed once for all options
        with these holders."""
        holders = tuple(
            (part.pool, part.width, part.replicas, part.context, part.expert) for part in self.parts
        )
        known, key = self.prices.ways_around, (self.zero > 0, holders)
        if key not in known:
            known[key] = self._find_ways_around()
        return known[key]

    def _find_ways_around(self) -> list[Rates]:
        """Return the rates of a ring (of one device per node, if there are several nodes) and, if
        nothing is scattered or gathered separately, trees.

        A node whose group extends over several passes on its part of each slice only.
        """
        if self.holders < 2:
            return [(0.0, 0.0, 0.0)]
        copies = self.holders // self.expert
        split = (copies - 1) / copies / self.expert
        if self.spans_nodes:
            count, latency = self.least_nodes, max(pool.nic_latency for pool in self.pools)
            slow, fast = min(self.ways_out), max(self.ways_out)
            rate, seconds = line_between_sites(self.pools)
            slow, latency = min(slow, rate), max(latency, seconds)
            ring = (count - 1) / count / slow
            # Leaves of the tree need not be nodes with fast NICs.
            tree = max(0.5 / slow, tree_load(count) / fast)
            split = min(split, 0.5 / self.expert) / fast
        else:
            count, latency = self.holders, max(pool.intra_latency for pool in self.pools)
            bandwidth = min(pool.intra_bandwidth for pool in self.pools)
            bandwidth *= min(part.tensor_width for part in self.parts)
            shared = any(pool.intra_is_shared for pool in self.pools)
            if shared:
                bandwidth = min(pool.intra_bandwidth for pool in self.pools) / self.holders
            ring, split = (count - 1) / count / bandwidth, split / bandwidth
            tree = ring if shared else tree_load(count) / bandwidth
        alone = self.expert == 1
        ways = [(ring, ring if alone else split, (count - 1) * latency)]
        return (
            ways
            if self.zero
            else [*ways, (tree, tree if alone else split, tree_depth(count) * latency)]
        )

    @cached_property
    def exchange(self) -> Rates:
        """Return a lower bound over all algorithms on the seconds of gradient exchange (4), as
        rates."""
        return self._times_around(self._exchanges_at_the_end)

    @cached_property
    def exchanges(self) -> list[Rates]:
        """Return the seconds of gradient exchange by each algorithm (4), as rates."""
        return [self._times_around(self._exchanges_at_the_end, way) for way in self._ways_around]

    @property
    def _exchanges_at_the_end(self) -> int:
        """Return how often the weights go around the holders after the last backward.

        A sum is twice around, and so are the last scatter and the gather of ZeRO 2. Under ZeRO 3
        only the last scatter remains, minus (6), which every backward is charged with. With
        ``prefetch`` the last scatter overlaps with the backward before it.
        """
        if self.prefetches:
            return {2: 1, 3: 0}.get(self.zero, 2)
        return -1 if self.zero == 3 else 2

    @property
    def prefetches(self) -> bool:
        """Return whether weights and gradients are exchanged layer by layer while the stage
        computes."""
        return self.prices.model.prefetch

    @cached_property
    def stretch(self) -> Rates:
        """Return a lower bound on the seconds between a backward under ZeRO 3 and the next action
        (6), as rates."""
        return self._times_around(2 if self.zero == 3 and not self.prefetches else 0)

    @cached_property
    def load(self) -> Rates:
        """Return a lower bound on the seconds per micro-batch that ZeRO keeps the network busy (5),
        as rates: ZeRO 2 scatters gradients after every backward; ZeRO 3 also gathers weights
        twice."""
        return self._times_around({2: 1, 3: 3}.get(self.zero, 0))

    def _times_around(self, times: int, way: Rates | None = None) -> Rates:
        """Return the rates of passing the weights around ``times`` times; by default by the lower
        bound ``ring``."""
        way = way or self.ring
        width = self.prices.exchanged_bytes(self.zero)
        return times * way[0] * width, times * way[1] * width, times * way[2]

    @cached_property
    def update(self) -> Rates:
        """Return the seconds of the update, as rates: the optimizer reads and writes all its state,
        and offloaded state is copied first."""
        rates = [
            pool.memory_bandwidth * part.width
            for pool, part in zip(self.pools, self.parts, strict=True)
        ]
        passes = 2 * OPTIMIZERS[self.prices.chain.optimizer].passes
        common, split = (
            (passes * held + FACTOR_PASSES * self._error_bytes) / min(rates)
            for held in self._updated[:2]
        )
        for kept, tier in (
            (moment_rates(self), self.offload.optimizer),
            (weight_rates(self), self.offload.weights),
        ):
            if tier is not None:
                slowest = max(
                    1 / (rate_of(self, part, tier, alone=True) * part.width) for part in self.parts
                )
                common, split = common + kept[0] * slowest, split + kept[1] * slowest
        return common, split, 0.0

    @property
    def _error_bytes(self) -> int:
        """Return the bytes of PowerSGD's error per weight on all devices of a replica."""
        chain = self.prices.chain
        return self.context * error_bytes(chain, self.holders) if chain.powersgd else 0

    @cached_property
    def state(self) -> Rates:
        """Return the bytes of trained weights, gradients and optimizer state on all devices of a
        replica, as rates."""
        errors = float(self._error_bytes)
        if not self.offload:
            return self._updated[0] + errors, self._updated[1] + errors, 0.0
        outside = zip(moment_rates(self), weight_rates(self), strict=True)
        common, split, _ = (
            total - sum(kept) for total, kept in zip(self._updated, outside, strict=True)
        )
        return common + errors, split + errors, 0.0

    @cached_property
    def _updated(self) -> Rates:
        """Return the bytes of ``state`` together with offloaded state, without PowerSGD's
        errors."""
        common = split = 0.0
        for width, level in zip(self.prices.state_bytes, (3, 2, 1), strict=True):
            shared = self.zero >= level
            common += self.context * width / (self.holders if shared else 1)
            split += self.context * width / (self.holders if shared else self.expert)
        return common, split, 0.0

    @cached_property
    def room(self) -> list[tuple[float, int]]:
        """Return for each part the bytes that a replica may use, without buffers for transfers
        between its devices, and its samples."""
        known = self.prices.rooms
        if self.parts not in known:
            known[self.parts] = self._find_room()
        return known[self.parts]

    def _find_room(self) -> list[tuple[float, int]]:
        buffers = self.prices.exchange_buffers(self.context, self.expert)
        both = zip(self.pools, self.parts, strict=True)
        return [
            (
                max(USABLE * pool.device.kind.memory * part.width - part.most * buffers, 1e-9),
                part.most,
            )
            for pool, part in both
        ]

    def __repr__(self) -> str:
        parts = " + ".join(
            f"{p.replicas}x{p.width} {self.prices.pools[p.pool].name} n={p.most}"
            for p in self.parts
        )
        splits = f", context {self.context}" if self.context > 1 else ""
        splits += f", expert {self.expert}" if self.expert > 1 else ""
        splits += f", offload {self.offload}" if self.offload else ""
        return f"{parts}{splits}, zero {self.zero}, recompute {self.recompute}"
