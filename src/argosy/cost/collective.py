"""List the bytes that a collective sends from device to device, and the seconds that it takes.

*Once* means one half of an all-reduce of B bytes over n devices: a reduce-scatter or an all-gather.

    (1)  ring          in the order of the devices: each sends (n-1)/n B to the next;
                       n - 1 latencies
    (2)  hierarchical  B along a chain through the devices of each node, to or from its first; a
                       ring (1) over the first devices of the N nodes, (N-1)/N B each;
                       N - 1 latencies
    (3)  tree          the chains of (2), and between the first devices two binary trees, each of
                       half the bytes: leaves of one are inner nodes of the other; log2 N latencies;
                       inside one node the trees span all devices
    (4)  padded        (1) of n times the largest shard, for unequal shards
    (5)  grouped       every shard goes round to all other devices on its own: each device passes on
                       all but the shard of the next device; n latencies

Chunks follow one another, so the phases of (2) and (3) overlap, and all flows of a collective begin
together. A tree has no halves, so it only does whole all-reduces. Devices that hold all of B in
unequal numbers of slices have a collective for each slice (``sliced``). A collective that has the
routes of a cluster to itself takes

    (6)  max over routes ( max over its links (all bytes that cross it / its bandwidth) + the
         latencies of the route ).

The latencies of the chains of (2) and (3), inside a node, are not counted.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from argosy.cluster.topology import Cluster
from argosy.plan.plan import Algorithm

Pairs = Mapping[tuple[str, str], float]
"""From a device to another: bytes, or a share of them."""
Rates = tuple[tuple[float, float], ...]
"""Per route: seconds per byte that goes once around, and latencies in seconds."""


def once_around(
    algorithm: Algorithm, devices: Sequence[str], node_of: Callable[[str], str]
) -> tuple[Pairs, int]:
    """Return the share of each pair for one byte over the devices in their order, by (1) to (3),
    and the number of latencies.

    >>> once_around(Algorithm.RING, ["a0.0", "a0.1"], lambda name: name[:2])
    ({('a0.0', 'a0.1'): 0.5, ('a0.1', 'a0.0'): 0.5}, 1)
    """
    count = len(devices)
    if count < 2:
        return {}, 0
    if algorithm is Algorithm.RING:
        return _ring(devices), count - 1
    nodes: dict[str, list[str]] = defaultdict(list)
    for name in devices:
        nodes[node_of(name)].append(name)
    if len(nodes) == 1:
        return (
            (_trees(devices), tree_depth(count))
            if algorithm is Algorithm.TREE
            else (_ring(devices), count - 1)
        )
    pairs: dict[tuple[str, str], float] = defaultdict(float)
    for members in nodes.values():
        for left, right in itertools.pairwise(members):
            pairs[left, right] += 0.5
            pairs[right, left] += 0.5
    first = [members[0] for members in nodes.values()]
    is_tree = algorithm is Algorithm.TREE
    for pair, share in (_trees(first) if is_tree else _ring(first)).items():
        pairs[pair] += share
    return pairs, tree_depth(len(first)) if is_tree else len(first) - 1


def _ring(devices: Sequence[str]) -> Pairs:
    count = len(devices)
    return {(devices[at], devices[(at + 1) % count]): (count - 1) / count for at in range(count)}


def _trees(devices: Sequence[str]) -> Pairs:
    """Return the shares of half an all-reduce by trees: a quarter of the bytes over each edge of
    each tree, both ways."""
    pairs: dict[tuple[str, str], float] = defaultdict(float)
    for order in (list(devices), list(reversed(devices))):
        for child in range(1, len(order)):
            parent = (child - 1) // 2
            pairs[order[child], order[parent]] += 0.25
            pairs[order[parent], order[child]] += 0.25
    return pairs


def tree_depth(count: int) -> int:
    """Return the number of latencies from the leaves of a binary tree to its root.

    >>> [tree_depth(count) for count in (2, 3, 4, 8)]
    [1, 1, 2, 3]
    """
    return count.bit_length() - 1


@cache
def tree_load(count: int) -> float:
    """Return the share of the bytes that the busiest of ``count`` devices sends in half an
    all-reduce by trees.

    >>> [tree_load(count) for count in (2, 3, 4, 8)]
    [0.5, 0.75, 0.75, 1.0]
    """
    sent: dict[str, float] = defaultdict(float)
    for (source, _), share in _trees([str(number) for number in range(count)]).items():
        sent[source] += share
    return max(sent.values())


def in_ring_order(devices: Sequence[str], node_of: Callable[[str], str]) -> dict[str, int]:
    """Return a position for every device so that devices of a node follow one another, otherwise in
    the given order."""
    nodes: dict[str, list[str]] = defaultdict(list)
    for name in devices:
        nodes[node_of(name)].append(name)
    return {name: at for at, name in enumerate(itertools.chain.from_iterable(nodes.values()))}


def sliced(
    algorithm: Algorithm,
    groups: Sequence[Sequence[str]],
    order: Mapping[str, int],
    node_of: Callable[[str], str],
) -> tuple[Pairs, int]:
    """Return once around groups of devices, each of which holds all of one byte in equal slices,
    and the number of latencies.

    A group of width w holds w slices, and each slice has a collective of its own.

    >>> order = {name: at for at, name in enumerate(("a0.0", "a0.1", "b0.0"))}
    >>> sliced(Algorithm.RING, [["a0.0", "a0.1"], ["b0.0"]], order, lambda name: name[:2])[0]
    {('a0.0', 'b0.0'): 0.25, ('b0.0', 'a0.0'): 0.25, ('a0.1', 'b0.0'): 0.25, ('b0.0', 'a0.1'): 0.25}
    """
    slices = math.lcm(*(len(group) for group in groups))
    pairs: dict[tuple[str, str], float] = defaultdict(float)
    rounds = 0
    for piece in range(slices):
        members = sorted(
            {group[piece * len(group) // slices] for group in groups}, key=order.__getitem__
        )
        once, latencies = once_around(algorithm, members, node_of)
        rounds = max(rounds, latencies)
        for pair, share in once.items():
            pairs[pair] += share / slices
    return dict(pairs), rounds


def uneven_once(
    algorithm: Algorithm, devices: Sequence[str], shares: Sequence[float]
) -> tuple[Pairs, int]:
    """Return the share of each pair for one byte of which each device holds a share, by (4) and
    (5), and the number of latencies; equal shares give a ring."""
    count = len(devices)
    if algorithm is Algorithm.GROUPED:
        passed = [
            (devices[at], devices[(at + 1) % count], 1 - shares[(at + 1) % count])
            for at in range(count)
        ]
        return {(source, target): share for source, target, share in passed}, count
    larger = count * max(shares)
    return {pair: share * larger for pair, share in _ring(devices).items()}, count - 1


def seconds_alone(cluster: Cluster, pairs: Pairs, rounds: int) -> float:
    """Return the seconds of (6); infinity if a link is down."""
    loads: dict[int, float] = defaultdict(float)
    routes = [cluster.fastest(*pair, num_bytes) for pair, num_bytes in pairs.items()]
    for route, num_bytes in zip(routes, pairs.values(), strict=True):
        for link in route.links:
            loads[link] += num_bytes
    rates = {link: cluster.links[link].bandwidth.at(0) for link in loads}
    seconds = {
        link: load / rates[link] if rates[link] else math.inf for link, load in loads.items()
    }
    ends = (
        max(seconds[link] for link in route.links) + rounds * cluster.latency(route)
        for route in set(routes)
    )
    return max(ends, default=0.0)


def rates_alone(cluster: Cluster, pairs: Pairs, rounds: int) -> Rates:
    """Return the rates of (6) for a collective of which each pair sends a share.

    Every pair uses its first route.
    """
    loads: dict[int, float] = defaultdict(float)
    routes = [cluster.routes(*pair)[0] for pair in pairs]
    for route, share in zip(routes, pairs.values(), strict=True):
        for link in route.links:
            loads[link] += share
    seconds = {
        link: load / max(cluster.links[link].bandwidth.at(0), 1e-9) for link, load in loads.items()
    }
    latencies = {link: cluster.links[link].latency.at(0) for link in loads}
    rates = {
        (
            max(map(seconds.__getitem__, route.links)),
            rounds * sum(map(latencies.__getitem__, route.links)),
        )
        for route in {id(route): route for route in routes}.values()  # hashing routes is slow
    }
    return tuple(sorted(rates))
