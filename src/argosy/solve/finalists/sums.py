"""Compute how long the stages of a complete plan need to sum their gradients, on the links between
the devices that hold them.

For weights of B bytes that go once around the holders of one or more stages by an algorithm of
``cost.collective``:

    (1)  seconds = max over routes ( max over links of (share of B that crosses it / bandwidth) B +
         its latencies )

A sum is twice around. ``space.option`` has a closed form for stages in one node, and for stages
whose nodes have nothing but NICs between them and a medium inside that is ample beside these; (1)
is for all others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from argosy.cluster.topology import Cluster
from argosy.cost.collective import Rates, in_ring_order, rates_alone, sliced
from argosy.plan.plan import Algorithm
from argosy.space.option import PoolPart
from argosy.space.place import Places
from argosy.space.pool import Pool

# Links between NICs are negligible if their latency is at most this share of that of the NICs.
_FAR = 0.1
# A link with at least this factor times the bandwidth of a NIC does not slow an exchange: trees
# cross it twice.
_AMPLE = 2.0


class Sums:
    """A cache of the rates that exchanges have, by the places of the devices."""

    def __init__(self, cluster: Cluster, pools: Sequence[Pool]) -> None:
        self.cluster = cluster
        self.pools = pools
        self.rows = [tuple(itertools.chain(*pool.nodes)) for pool in pools]
        self.is_plain = not (
            cluster.wires or cluster.shared or any(node.uplinks for node in cluster.nodes)
        )
        """Whether there is nothing between any two NICs."""
        self.has_ample_medium = [self._has_ample_medium(pool) for pool in pools]
        self.is_simple = self.is_plain and all(self.has_ample_medium)
        """Whether stages in several nodes are always in closed form."""
        self.rates: dict[tuple[object, ...], list[Rates]] = {}
        self.ample: dict[tuple[str, str], bool] = {}

    def _has_ample_medium(self, pool: Pool) -> bool:
        """Return whether bytes between devices of a node never wait longer for the medium than for
        the NIC."""
        crowd = pool.node_size if pool.intra_is_shared else 1
        return pool.intra_bandwidth >= crowd * pool.nic_bandwidth

    def seconds(
        self,
        stages: Sequence[tuple[tuple[PoolPart, ...], Places]],
        algorithms: tuple[Algorithm, ...],
        num_bytes: float,
    ) -> float:
        """Return the seconds of summing gradients, twice around, by the best of the algorithms
        (1)."""
        key = (*stages, algorithms)
        if key not in self.rates:
            self.rates[key] = [self._rates(stages, algorithm) for algorithm in algorithms]
        return min(
            max((2 * (per_byte * num_bytes + latency) for per_byte, latency in rates), default=0.0)
            for rates in self.rates[key]
        )

    def is_in_closed_form(self, stages: Sequence[tuple[tuple[PoolPart, ...], Places]]) -> bool:
        """Return whether only NICs slow the exchange between the devices of some stages, or the
        stage is in one node."""
        nodes: list[str] = []
        for parts, places in stages:
            nodes += self._nodes(parts, places)
        if len(set(nodes)) == 1:
            return len(stages) == 1
        has_ample_media = all(
            self.has_ample_medium[part.pool] for parts, _ in stages for part in parts
        )
        return has_ample_media and (
            self.is_plain
            or all(self._is_ample(source, target) for source, target in itertools.pairwise(nodes))
        )

    def _nodes(self, parts: Sequence[PoolPart], places: Places) -> list[str]:
        """Return the first device in each node of a stage, in order."""
        names = []
        for part, (begin, end) in zip(parts, places, strict=True):
            size = self.pools[part.pool].per_node
            names += [
                self.rows[part.pool][at * size]
                for at in range(begin // size, (end - 1) // size + 1)
            ]
        return names

    def _is_ample(self, source: str, target: str) -> bool:
        key = (source, target)
        if key not in self.ample:
            self.ample[key] = self._find_ample(source, target)
        return self.ample[key]

    def _find_ample(self, source: str, target: str) -> bool:
        if self.cluster.node_of[source][0] is self.cluster.node_of[target][0]:
            return True
        route = self.cluster.routes(source, target)[0]
        widths = [self.cluster.links[link].bandwidth.at(0) for link in route.links]
        latencies = [self.cluster.links[link].latency.at(0) for link in route.links]
        if len(widths) < 2:
            return False
        is_near = sum(latencies[1:-1]) <= _FAR * (latencies[0] + latencies[-1])
        return is_near and min(widths[1:-1], default=math.inf) >= _AMPLE * min(
            widths[0], widths[-1]
        )

    def _rates(
        self, stages: Sequence[tuple[tuple[PoolPart, ...], Places]], algorithm: Algorithm
    ) -> Rates:
        """Return for each route the seconds per byte of weights that go once around, and the
        latency (1)."""
        holders: list[tuple[str, ...]] = []
        for parts, places in stages:
            for part, (begin, end) in zip(parts, places, strict=True):
                row = self.rows[part.pool]
                holders += [row[at : at + part.width] for at in range(begin, end, part.width)]

        def node_of(name: str) -> str:
            return self.cluster.device(name).node

        order = in_ring_order([name for holder in holders for name in holder], node_of)
        return rates_alone(self.cluster, *sliced(algorithm, holders, order, node_of))
