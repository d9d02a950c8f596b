"""Price compute and collectives of a group of devices that share every tensor.

For n devices, S bytes in all, a largest share m of them (1/n when even), ring bandwidth B and
latency L:

    (1)  all-gather, reduce-scatter
             padded:   m S (n-1) / B + (n-1) L           every shard grown to the largest
             grouped:  S (1 - smallest share) / B + n L  each shard broadcast or reduced alone
    (2)  all-reduce   2 S (n-1)/n / B + 2 (n-1) L, in even pieces for any shares, or hierarchical
    (3)  all-to-all   m S p (n-p)/n / B + (n-1) L        p devices behind one NIC (1 inside a node)
    (4)  compute      FLOP x share / speed + bytes x share / memory bandwidth + launch

The cheapest method is taken per tensor and its name kept. If collectives were measured, their rates
replace (1)-(3): bytes (n times the largest shard for padded ones) over bytes per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from argosy.cluster.topology import Cluster
from argosy.cost.communicate import DOWN, all_reduce_seconds, hierarchical_seconds, ring_seconds
from argosy.dtype import Dtype

# Seconds to start one kernel: a transformer block has about 20 kernels, which take 0.3 ms
# (``cost.compute``).
LAUNCH = 15e-6


class GroupCollective(StrEnum):
    """A collective that moves a tensor from one state to another."""

    NONE = "none"
    SLICE = "slice"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"


class CollectiveMethod(StrEnum):
    """A method that carries out a collective."""

    LOCAL = "local"
    PADDED = "padded"
    GROUPED = "grouped"
    RING = "ring"
    HIERARCHICAL = "hierarchical"
    MEASURED = "measured"


@dataclass(frozen=True, kw_only=True)
class CollectiveRates:
    """A set of measured rates (bytes/s) that collectives over a group reach, padded and as grouped
    calls."""

    all_gather: float
    grouped_all_gather: float
    all_reduce: float
    reduce_scatter: float
    grouped_reduce_scatter: float
    all_to_all: float


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """A group of devices, which are in the order of their shares."""

    names: tuple[str, ...]
    flops: tuple[float, ...]
    """FLOP/s that matrix products reach."""
    memory_bandwidths: tuple[float, ...]
    """Bytes/s."""
    bandwidth: float
    """Bytes/s of the narrowest hop of a ring through all devices."""
    latency: float
    """Seconds of latency of the slowest hop of the ring."""
    nodes: int = 1
    """Number of nodes if several take part with equally many devices each, else 1."""
    inside: tuple[float, float] = (0.0, 0.0)
    """Bandwidth and latency inside a node if several nodes take part with equally many devices
    each, else zeros."""
    per_node: int = 1
    """Largest number of devices of one node, which share its NIC."""
    launch: float = LAUNCH
    rates: CollectiveRates | None = None

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def even(self) -> tuple[float, ...]:
        return (1 / len(self),) * len(self)

    @cached_property
    def by_speed(self) -> tuple[float, ...]:
        """Return ratios in proportion to speed."""
        return tuple(speed / sum(self.flops) for speed in self.flops)

    def compute_seconds(self, flop: float, num_bytes: float, shares: Sequence[float]) -> float:
        """Return the seconds of compute (4) on the device that takes longest."""
        times = (
            share * (flop / speed + num_bytes / moving)
            for share, speed, moving in zip(shares, self.flops, self.memory_bandwidths, strict=True)
        )
        return max(times) + self.launch

    def transfer_seconds(
        self, kind: GroupCollective, num_bytes: float, shares: Sequence[float]
    ) -> tuple[float, CollectiveMethod]:
        """Return the seconds of the cheapest method for a collective by (1) to (3), and the
        method."""
        if kind in (GroupCollective.NONE, GroupCollective.SLICE) or len(self) == 1:
            return 0.0, CollectiveMethod.LOCAL
        if self.rates is not None:
            return _measured(self.rates, kind, num_bytes, len(self) * max(shares))
        count, largest = len(self), max(shares)
        if kind is GroupCollective.ALL_REDUCE:
            methods = [
                (
                    all_reduce_seconds(num_bytes, count, self.bandwidth, self.latency),
                    CollectiveMethod.RING,
                )
            ]
            if self.nodes > 1 and count > self.nodes:
                between = (self.bandwidth, self.latency)
                seconds = hierarchical_seconds(
                    num_bytes, self.nodes, count // self.nodes, inside=self.inside, between=between
                )
                methods.append((seconds, CollectiveMethod.HIERARCHICAL))
            return min(methods)
        if kind is GroupCollective.ALL_TO_ALL:
            together = self.per_node if self.per_node < count else 1
            sent = largest * num_bytes * together * (count - together) / count
            return sent / self.bandwidth + (count - 1) * self.latency, CollectiveMethod.RING
        padded = ring_seconds(count * largest * num_bytes, count, self.bandwidth, self.latency)
        grouped = num_bytes * (1 - min(shares)) / self.bandwidth + count * self.latency
        return min((padded, CollectiveMethod.PADDED), (grouped, CollectiveMethod.GROUPED))


def _measured(
    rates: CollectiveRates, kind: GroupCollective, num_bytes: float, padding: float
) -> tuple[float, CollectiveMethod]:
    if kind is GroupCollective.ALL_REDUCE:
        return num_bytes / rates.all_reduce, CollectiveMethod.MEASURED
    if kind is GroupCollective.ALL_TO_ALL:
        return num_bytes * padding / rates.all_to_all, CollectiveMethod.MEASURED
    gather = kind is GroupCollective.ALL_GATHER
    padded, grouped = (
        (rates.all_gather, rates.grouped_all_gather)
        if gather
        else (rates.reduce_scatter, rates.grouped_reduce_scatter)
    )
    return min(
        (num_bytes * padding / padded, CollectiveMethod.PADDED),
        (num_bytes / grouped, CollectiveMethod.GROUPED),
    )


class RingState(NamedTuple):
    """A snapshot that describes a ring at one time; its fields mean the same as those of
    ``DeviceGroup``."""

    bandwidth: float
    latency: float
    inside: tuple[float, float]


class RingNetwork:
    """A model of the network over time that connects devices in their order and back to the
    first."""

    def __init__(self, cluster: Cluster, names: Sequence[str]) -> None:
        self.cluster = cluster
        hops = [
            (source, target)
            for source, target in zip(names, [*names[1:], names[0]], strict=True)
            if source != target
        ]
        self.bandwidths = {
            hop: {r: cluster.bandwidth(r) for r in cluster.routes(*hop)} for hop in hops
        }
        home_of = {name: cluster.device(name).node for name in names}
        self.homes = list(home_of.values())
        count = len(set(self.homes))
        even = len({self.homes.count(home) for home in self.homes}) == 1
        self.is_regular = count > 1 and even and len(names) > count
        """Whether several nodes take part, with equally many devices each."""
        self.within = [hop for hop in hops if home_of[hop[0]] == home_of[hop[1]]]

    @cached_property
    def changes(self) -> list[float]:
        """Return the times, 0 first, at which a link of the ring may change."""
        routes = (route for traces in self.bandwidths.values() for route in traces)
        indices = {index for route in routes for index in route.links}
        links = [self.cluster.links[index] for index in indices]
        times = (time for link in links for time in (*link.bandwidth.times, *link.latency.times))
        return sorted({0.0, *times})

    def at(self, time: float) -> RingState:
        """Return the state of the ring at a time, over the route of each hop that is fastest
        then."""
        rates, waits = {}, {}
        for hop, known in self.bandwidths.items():
            route = next(iter(known)) if len(known) == 1 else self.cluster.fastest(*hop, 1e6, time)
            rates[hop], waits[hop] = (
                max(DOWN, known[route].at(time)),
                self.cluster.latency(route, time),
            )
        inside = (
            min((rates[hop] for hop in self.within), default=0.0),
            max((waits[hop] for hop in self.within), default=0.0),
        )
        return RingState(
            bandwidth=min(rates.values(), default=1.0),
            latency=max(waits.values(), default=0.0),
            inside=inside if self.is_regular else (0.0, 0.0),
        )


def device_group(cluster: Cluster, names: Sequence[str], dtype: Dtype) -> DeviceGroup:
    """Return the group of the named devices of a cluster, at the speeds and bandwidths of time
    0."""
    devices = [cluster.device(name) for name in names]
    ring = RingNetwork(cluster, names)
    now, homes = ring.at(0.0), ring.homes
    health = [device.efficiency * device.speed.at(0.0) for device in devices]
    return DeviceGroup(
        names=tuple(names),
        flops=tuple(
            h * d.kind.reached.share(dtype) * d.kind.peak(dtype)
            for h, d in zip(health, devices, strict=True)
        ),
        memory_bandwidths=tuple(
            h * d.kind.memory_bandwidth for h, d in zip(health, devices, strict=True)
        ),
        bandwidth=now.bandwidth,
        latency=now.latency,
        nodes=len(set(homes)) if ring.is_regular else 1,
        inside=now.inside,
        per_node=max(homes.count(home) for home in homes),
    )
