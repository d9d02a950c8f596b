"""Find the links that transfers between the stages of a complete plan cross, from the places of its
stages alone.

Stages are placed in rows of nodes (``space.place``), so the numbers of devices decide which node
every replica is in. As in ``sim.fold``, equal neighbouring replicas form a bundle, and

    (1)  bundles that share nodes, directly or not, form a site; its NICs are one link with their
         capacity together
    (2)  of the bytes between two bundles, the share between devices of one node crosses the medium
         of that node
    (3)  wires, uplinks and shared capacities are links of their own

For one byte of output per sample this gives a load on every link, per boundary and direction:

    (4)  alone   = max over the links of a boundary of (its own load / capacity)
    (5)  shared  = max over the links of a boundary of (the load of all boundaries and directions /
         capacity)
    (6)  busiest = max over all links of (load of all / capacity)

A transfer takes at least (4); it takes no more than (5) as long as no boundary has two
micro-batches on a link at once. M micro-batches take at least M times (6).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from argosy.cluster.topology import Cluster
from argosy.cost.communicate import DOWN
from argosy.space.option import Option, PoolPart
from argosy.space.place import Places, row_places
from argosy.space.pool import Pool

Load = tuple[int, float]
"""A link, and the seconds that it needs per output byte of a sample."""


@dataclass(frozen=True, slots=True, eq=False)
class _Bundle:
    """A bundle of equal replicas that are neighbours in a stage."""

    pool: int
    begin: int
    """First place in the row of the pool."""
    end: int
    width: int
    samples: int
    """Samples of a replica."""
    start: int
    """First sample of the micro-batch."""
    first_node: int
    last_node: int

    @property
    def replicas(self) -> int:
        return (self.end - self.begin) // self.width

    @property
    def stop(self) -> int:
        return self.start + self.replicas * self.samples


@dataclass(frozen=True, slots=True)
class Wiring:
    """The loads that all plans have whose stages consist of the same parts."""

    number: int
    """A number that identifies the wiring."""
    num_links: int
    boundaries: tuple[tuple[tuple[Load, ...], tuple[Load, ...]], ...]
    """For each boundary, the loads forward and back."""
    latency: tuple[float, ...]
    """Latency of each boundary, in seconds."""
    num_bundles: tuple[int, ...]
    """Number of bundles of each stage."""
    sites: tuple[tuple[int, ...], ...]
    """For each stage, the numbers of its sites."""
    places: tuple[Places, ...]
    """Places of each stage."""
    homes: tuple[str | None, ...]
    """For each stage, the name of its node; None if it has several."""

    def seconds(self, outputs: Sequence[float]) -> tuple[list[float], list[float], float]:
        """Return the seconds of a transfer alone (4) and with all others (5) for each boundary, and
        those of the busiest link (6), if ``outputs`` bytes per sample cross the boundaries."""
        total = [0.0] * self.num_links
        alone = []
        for both, output in zip(self.boundaries, outputs, strict=True):
            longest = 0.0
            for loads in both:
                for link, per_byte in loads:
                    seconds = per_byte * output
                    total[link] += seconds
                    longest = max(longest, seconds)
            alone.append(longest)
        shared = [
            max((total[link] for loads in both for link, _ in loads), default=0.0)
            for both in self.boundaries
        ]
        return alone, shared, max(total, default=0.0)


class Wirings:
    """A cache of the wiring that plans have on a cluster, by placement."""

    def __init__(self, cluster: Cluster, pools: Sequence[Pool]) -> None:
        self.cluster = cluster
        self.pools = pools
        self.nics = {link for node in cluster.nodes for link in node.nic or ()}
        self.known: dict[tuple[Option, ...], Wiring | None] = {}
        self.by_parts: dict[tuple[tuple[PoolPart, ...], ...], Wiring | None] = {}
        """The wirings by parts, slower to look up and with fewer entries."""
        self.routes: dict[tuple[str, str], tuple[tuple[int, ...], float]] = {}
        self.medium = [self._medium(pool) for pool in pools]
        homes = [pool.homes for pool in pools]
        self.are_apart = all(
            first.isdisjoint(second) for first, second in itertools.combinations(homes, 2)
        )
        """Whether no node has devices of two pools."""

    def _medium(self, pool: Pool) -> tuple[float, float]:
        """Return bandwidth and latency of the widest medium of a device."""
        node, at = self.cluster.node_of[pool.nodes[0][0]]
        links = [self.cluster.links[medium.outward[at]] for medium in node.media]
        widest = max(links, key=lambda link: link.bandwidth.at(0), default=None)
        return (widest.bandwidth.at(0), widest.latency.at(0)) if widest is not None else (0.0, 0.0)

    def of(self, options: tuple[Option, ...]) -> Wiring | None:
        """Return the wiring of stages, or None if a row is too short for them."""
        if options not in self.known:
            key = tuple(option.parts for option in options)
            if key not in self.by_parts:
                places = row_places(self.pools, options)
                self.by_parts[key] = self._wiring(key, places) if places is not None else None
            self.known[options] = self.by_parts[key]
        return self.known[options]

    def _wiring(self, parts: Sequence[tuple[PoolPart, ...]], places: Sequence[Places]) -> Wiring:
        stages = [self._bundles(stage, at) for stage, at in zip(parts, places, strict=True)]
        sites = self._sites(list(itertools.chain.from_iterable(stages)))
        numbers: dict[Hashable, int] = {}
        boundaries, latencies = [], []
        for senders, receivers in itertools.pairwise(stages):
            forward: dict[int, float] = {}
            back: dict[int, float] = {}
            latency = 0.0
            for source, target in itertools.product(senders, receivers):
                common = min(source.stop, target.stop) - max(source.start, target.start)
                if common > 0:
                    inside = common * self._inside_share(source, target)
                    for loads, start, end in ((forward, source, target), (back, target, source)):
                        over = self._add(
                            loads, start, end, (inside, common - inside), sites, numbers
                        )
                        latency = max(latency, over)
            boundaries.append((tuple(forward.items()), tuple(back.items())))
            latencies.append(latency)
        return Wiring(
            number=len(self.by_parts),
            num_links=len(numbers),
            boundaries=tuple(boundaries),
            latency=tuple(latencies),
            num_bundles=tuple(map(len, stages)),
            sites=tuple(tuple(sorted({sites[bundle][0] for bundle in stage})) for stage in stages),
            places=tuple(places),
            homes=tuple(map(self._home, stages)),
        )

    def _bundles(self, parts: Sequence[PoolPart], places: Places) -> list[_Bundle]:
        bundles: list[_Bundle] = []
        start = 0
        for part, (begin, _) in zip(parts, places, strict=True):
            size = self.pools[part.pool].per_node
            runs = ((part.extra, part.samples + 1), (part.replicas - part.extra, part.samples))
            for replicas, samples in runs:
                if not replicas:
                    continue
                end = begin + replicas * part.width
                bundles.append(
                    _Bundle(
                        pool=part.pool,
                        begin=begin,
                        end=end,
                        width=part.width,
                        samples=samples,
                        start=start,
                        first_node=begin // size,
                        last_node=(end - 1) // size,
                    )
                )
                begin = end
                start = bundles[-1].stop
        return bundles

    def _sites(self, bundles: Sequence[_Bundle]) -> dict[_Bundle, tuple[int, int]]:
        """Return for each bundle the number of its site, and the number of nodes of that site
        (1)."""
        rows: dict[int, list[list[_Bundle]]] = {}
        last: dict[int, int] = {}
        for bundle in bundles:  # bundles of a pool come in the order of its row
            row = rows.setdefault(bundle.pool, [])
            if row and bundle.first_node <= last[bundle.pool]:
                row[-1].append(bundle)
            else:
                row.append([bundle])
            last[bundle.pool] = bundle.last_node
        groups = list(itertools.chain.from_iterable(rows.values()))
        sizes = [group[-1].last_node - group[0].first_node + 1 for group in groups]
        return {bundle: (at, sizes[at]) for at, group in enumerate(groups) for bundle in group}

    def _add(
        self,
        loads: dict[int, float],
        source: _Bundle,
        target: _Bundle,
        samples: tuple[float, float],
        sites: dict[_Bundle, tuple[int, int]],
        numbers: dict[Hashable, int],
    ) -> float:
        """Add what one bundle sends another, inside nodes and between them, to the loads of a
        boundary; return its latency."""
        inside, outside = samples
        latency = 0.0
        if inside:
            pool = self.pools[source.pool]
            bandwidth, latency = self.medium[source.pool]
            nodes = (source.first_node, source.last_node)
            key: Hashable = (
                ("medium", source.pool, nodes) if pool.intra_is_shared else ("medium", source)
            )
            lanes = nodes[1] - nodes[0] + 1 if pool.intra_is_shared else source.end - source.begin
            _load(loads, numbers, key, inside / (lanes * max(bandwidth, DOWN)))
        if outside:
            links, over = self._route(source, target)
            latency = max(latency, over)
            for link in links:
                key, lanes = link, 1
                if link in self.nics:
                    is_out = link == links[0]
                    site, lanes = sites[source if is_out else target]
                    key = ("out" if is_out else "in", site)
                capacity = lanes * self.cluster.links[link].bandwidth.at(0)
                _load(loads, numbers, key, outside / capacity if capacity else math.inf)
        return latency

    def _route(self, source: _Bundle, target: _Bundle) -> tuple[tuple[int, ...], float]:
        """Return links and latency from any node of a bundle to another node of the other
        bundle."""
        source_nodes, target_nodes = self.pools[source.pool].nodes, self.pools[target.pool].nodes
        pairs = itertools.product(
            source_nodes[source.first_node : source.last_node + 1],
            target_nodes[target.first_node : target.last_node + 1],
        )
        start, end = next(
            (a[0], b[0]) for a, b in pairs if a[0].partition(".")[0] != b[0].partition(".")[0]
        )
        known = self.routes.get((start, end))
        if known is None:
            route = self.cluster.routes(start, end)[0]
            known = self.routes[start, end] = (route.links, self.cluster.latency(route))
        return known

    def _inside_share(self, source: _Bundle, target: _Bundle) -> float:
        """Return the share of bytes between two bundles that stays inside nodes (2)."""
        if source.pool != target.pool:
            return float(self._share_one_node(source, target))
        if source.first_node > target.last_node or target.first_node > source.last_node:
            return 0.0
        if source.first_node == source.last_node == target.first_node == target.last_node:
            return 1.0
        return _share_inside(source, target, self.pools[source.pool].per_node)

    def _share_one_node(self, source: _Bundle, target: _Bundle) -> bool:
        """Return whether two bundles of different pools are all in one node."""
        if self.are_apart:
            return False
        source_nodes, target_nodes = self.pools[source.pool].nodes, self.pools[target.pool].nodes
        nodes = {
            source_nodes[at][0].partition(".")[0]
            for at in range(source.first_node, source.last_node + 1)
        }
        nodes |= {
            target_nodes[at][0].partition(".")[0]
            for at in range(target.first_node, target.last_node + 1)
        }
        return len(nodes) == 1

    def _home(self, bundles: Sequence[_Bundle]) -> str | None:
        places = {
            (bundle.pool, node)
            for bundle in bundles
            for node in (bundle.first_node, bundle.last_node)
        }
        nodes = {self.pools[pool].nodes[node][0].partition(".")[0] for pool, node in places}
        return nodes.pop() if len(nodes) == 1 else None


def _load(
    loads: dict[int, float], numbers: dict[Hashable, int], key: Hashable, seconds: float
) -> None:
    link = numbers.setdefault(key, len(numbers))
    loads[link] = loads.get(link, 0.0) + seconds


def _share_inside(source: _Bundle, target: _Bundle, per_node: int) -> float:
    """Return the share of samples that stays inside nodes (2), device by device: each has its share
    of every sample of its replica."""
    width = 1 / math.lcm(source.width, target.width)
    both = 0
    stays = 0.0
    for sender in range(source.replicas):
        begin = source.start + sender * source.samples
        first = max(0, (begin - target.start) // target.samples)
        for receiver in range(first, target.replicas):
            start = target.start + receiver * target.samples
            common = min(begin + source.samples, start + target.samples) - max(begin, start)
            if common <= 0:
                break
            both += common
            stays += common * _slices_inside(source, sender, target, receiver, per_node) * width
    return stays / both if both else 0.0


def _slices_inside(
    source: _Bundle, sender: int, target: _Bundle, receiver: int, per_node: int
) -> int:
    """Return how many of the equal slices of a sample two replicas hold in the same node."""
    slices = math.lcm(source.width, target.width)
    starts = (source.begin + sender * source.width, target.begin + receiver * target.width)
    widths = (source.width, target.width)
    count = 0
    for at in range(slices):
        here, there = (
            start + at * width // slices for start, width in zip(starts, widths, strict=True)
        )
        count += here // per_node == there // per_node
    return count
