"""The options of a stage: how a number of devices of each pool runs *some* range of layers.

An option fixes everything but the layers: tensor width and samples of each part, recomputation and ZeRO. Its times
and bytes are running sums over the layers, so one object prices every range. For layers a..b-1 and n micro-batches in
flight:

    (1)  slowest(a, b)  = max over parts of forward + backward     what limits the rate of the stage
    (2)  quickest(a, b) = min over parts of forward + backward     what a micro-batch needs at least to pass through
         and back
    (3)  memory(a, b)   = weights + gradients + optimizer + n kept + receive buffers + what is recomputed at a time
    (4)  exchange(a, b) = seconds of gradient exchange that cannot overlap with the stage's own compute
    (5)  loaded(a, b)   = seconds per micro-batch that ZeRO 2 and 3 keep the network busy

A part is a group of equal replicas from one pool. Samples are shared out one by one to the replica that would finish
first, which minimises (1) over integer shares.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from argosy.plan.plan import Recompute
from argosy.space.pool import Pool
from argosy.space.price import FloatArray, Prices

Vector = tuple[int, ...]
"""Devices taken from each pool."""

USABLE = 0.92
"""Share of a device's memory that a plan may fill: the rest is workspace and fragmentation."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Equal replicas from one pool."""

    pool: int
    width: int
    replicas: int
    samples: int
    """Of a replica."""
    extra: int = 0
    """How many of the replicas take one sample more."""

    @property
    def most(self) -> int:
        return self.samples + (self.extra > 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """One way to run a stage on a vector of devices."""

    prices: Prices
    vector: Vector
    parts: tuple[Part, ...]
    recompute: Recompute
    zero: int

    @cached_property
    def replicas(self) -> int:
        return sum(part.replicas for part in self.parts)

    @cached_property
    def forward(self) -> FloatArray:
        """(parts, layers + 1): running sums for the replica with most samples."""
        return np.stack([self._seconds(part, part.most)[0] for part in self.parts])

    @cached_property
    def backward(self) -> FloatArray:
        return np.stack([self._seconds(part, part.most)[1] for part in self.parts])

    @cached_property
    def least(self) -> tuple[FloatArray, FloatArray]:
        """As ``forward`` and ``backward``, for the replica with fewest samples."""
        pairs = [self._seconds(part, part.samples) for part in self.parts]
        return np.stack([pair[0] for pair in pairs]), np.stack([pair[1] for pair in pairs])

    def _seconds(self, part: Part, samples: int) -> tuple[FloatArray, FloatArray]:
        return self.prices.seconds(part.pool, part.width, samples, self.recompute)

    @cached_property
    def slowest(self) -> FloatArray:
        """(1) as a table [a, b]; never less than (5), nor than what the NIC needs for what comes and goes."""
        table: FloatArray = _ranges(self.forward + self.backward).max(axis=0)
        np.maximum(table, self.loaded(_range(self.prices.parameters)), out=table)
        outputs = self.prices.outputs
        for part, pool in zip(self.parts, self._pools, strict=True):
            if part.width * part.replicas >= pool.node_size and pool.nic_bandwidth:
                samples = part.samples * min(part.replicas, pool.per_node // part.width)
                np.maximum(table, (outputs[:, None] + outputs[None, :]) * (samples / pool.nic_bandwidth), out=table)
        return table

    @cached_property
    def quickest(self) -> FloatArray:
        """(2) as a table [a, b]."""
        table: FloatArray = _ranges(self.least[0] + self.least[1]).min(axis=0)
        return table

    @cached_property
    def quickest_forward(self) -> FloatArray:
        table: FloatArray = _ranges(self.least[0]).min(axis=0)
        return table

    @cached_property
    def _pools(self) -> list[Pool]:
        return [self.prices.pools[part.pool] for part in self.parts]

    @cached_property
    def spans_nodes(self) -> bool:
        """Whether its replicas sit in more than one node, wherever they are placed."""
        fits = all(
            part.width * part.replicas <= pool.per_node for part, pool in zip(self.parts, self._pools, strict=True)
        )
        homes = [{node[0].partition(".")[0] for node in pool.nodes} for pool in self._pools]
        return not fits or not set.intersection(*homes)

    @cached_property
    def ring(self) -> tuple[float, float]:
        """(bandwidth, latency) at which the replicas exchange the whole weights of the stage, ring by ring."""
        if self.spans_nodes:
            return min(pool.nic_bandwidth for pool in self._pools), max(pool.nic_latency for pool in self._pools)
        width = min(part.width for part in self.parts)
        slowest = min(pool.intra_bandwidth for pool in self._pools)
        return slowest * width, max(pool.intra_latency for pool in self._pools)

    def exchange(self, weights: FloatArray | float) -> FloatArray | float:
        """(4) for so many weights: all-reduce; under ZeRO 2 only the gather is left at the end, under ZeRO 3
        nothing."""
        if self.replicas < 2 or self.zero == 3:
            return 0.0 * weights
        once = _ring(weights * self.prices.chain.dtype.bytes, self.replicas, *self.ring)
        return once if self.zero == 2 else 2 * once

    def loaded(self, weights: FloatArray | float) -> FloatArray | float:
        """(5): ZeRO 2 scatters gradients after every backward; ZeRO 3 also gathers weights twice."""
        if self.replicas < 2 or self.zero < 2:
            return 0.0 * weights
        once = _ring(weights * self.prices.chain.dtype.bytes, self.replicas, *self.ring)
        return once if self.zero == 2 else 3 * once

    @cached_property
    def hop(self) -> tuple[float, float]:
        """(seconds per output byte and sample, latency) of handing a micro-batch on, at the least."""
        choices = []
        for part, pool in zip(self.parts, self._pools, strict=True):
            inside = (part.samples / (pool.intra_bandwidth * part.width), pool.intra_latency)
            outside = (part.samples / pool.nic_bandwidth, pool.nic_latency) if pool.nic_bandwidth else inside
            fills_node = part.width * part.replicas >= pool.node_size
            choices.append(outside if fills_node else min(inside, outside))
        return min(choice[0] for choice in choices), min(choice[1] for choice in choices)

    def tail(self, weights: FloatArray) -> FloatArray:
        """(4) and the update, for tables of weights."""
        seconds = np.zeros_like(weights) + self.exchange(weights)
        slowest = min(p.device.efficiency * p.device.kind.memory_bandwidth * q.width for p, q in self._both)
        return seconds + weights * (2 * self._bytes_per_weight / slowest)

    @property
    def _both(self) -> list[tuple[Pool, Part]]:
        return list(zip(self._pools, self.parts, strict=True))

    @cached_property
    def _bytes_per_weight(self) -> float:
        weight_bytes, gradient_bytes, optimizer = map(float, self.prices.state_bytes)
        weight_bytes /= self.replicas if self.zero >= 3 else 1
        gradient_bytes /= self.replicas if self.zero >= 2 else 1
        optimizer /= self.replicas if self.zero >= 1 else 1
        return weight_bytes + gradient_bytes + optimizer

    def memory(self, group: int) -> tuple[FloatArray, FloatArray]:
        """(3) over what a device may use, as tables [a, b] of the fullest part: what is always held, and what each
        micro-batch in flight adds. Their sum is at most 1 where the layers fit."""
        prices = self.prices
        held = _range(prices.parameters)
        for index, partner, weights in prices.tied:
            held[: min(index, partner) + 1, max(index, partner) + 1 :] -= weights
        passing = prices.transient(self.recompute) + (2 * group + 1) * prices.outputs.max()
        kept = _range(prices.kept(self.recompute))
        room = [(USABLE * pool.device.kind.memory * part.width, part.most) for pool, part in self._both]
        fixed = np.maximum.reduce(
            [(self._bytes_per_weight * held + samples * passing) / size for size, samples in room]
        )
        each = np.maximum.reduce([samples * kept / size for size, samples in room])
        return fixed, each

    def __repr__(self) -> str:
        parts = " + ".join(f"{p.replicas}x{p.width} {self.prices.pools[p.pool].name} n={p.most}" for p in self.parts)
        return f"{parts}, zero {self.zero}, recompute {self.recompute}"


def _ring(num_bytes: FloatArray | float, count: int, bandwidth: float, latency: float) -> FloatArray | float:
    return num_bytes * ((count - 1) / count / bandwidth) + (count - 1) * latency


def _range(sums: FloatArray) -> FloatArray:
    """[a, b] = sums[b] - sums[a]."""
    return sums[None, :] - sums[:, None]


def _ranges(sums: FloatArray) -> FloatArray:
    """The same for every part."""
    return sums[:, None, :] - sums[:, :, None]


def share_samples(
    prices: Prices, groups: Sequence[tuple[int, int, int]], micro_batch: int, recompute: Recompute
) -> tuple[Part, ...] | None:
    """Integer shares of a micro-batch for (pool, width, replicas) groups that minimise the slowest replica; None if
    there are more replicas than samples."""
    total = sum(replicas for _, _, replicas in groups)
    if total > micro_batch:
        return None
    if len(groups) == 1:
        pool, width, replicas = groups[0]
        samples, extra = divmod(micro_batch, replicas)
        return (Part(pool=pool, width=width, replicas=replicas, samples=samples, extra=extra),)

    def finish(group: int, samples: int) -> float:
        pool, width, _ = groups[group]
        forward, backward = prices.seconds(pool, width, samples, recompute)
        return float(forward[-1] + backward[-1])

    given = [1] * len(groups)
    more = [0] * len(groups)
    left = micro_batch - total
    heap = [(finish(group, 2), group) for group in range(len(groups))]
    heapq.heapify(heap)
    while left:
        _, group = heap[0]
        step = min(left, groups[group][2] - more[group])
        more[group] += step
        left -= step
        if more[group] == groups[group][2]:
            given[group], more[group] = given[group] + 1, 0
            heapq.heapreplace(heap, (finish(group, given[group] + 1), group))
    return tuple(
        Part(pool=pool, width=width, replicas=replicas, samples=given[at], extra=more[at])
        for at, (pool, width, replicas) in enumerate(groups)
    )


def tensor_widths(pool: Pool, devices: int, most: int) -> Iterator[int]:
    """Widths of tensor-parallel groups inside a node that ``devices`` of a pool can be cut into."""
    for width in range(1, min(pool.per_node, devices, most) + 1):
        if pool.per_node % width == 0 and devices % width == 0:
            yield width
