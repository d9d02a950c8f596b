"""Seconds of communication in closed form, every transfer alone on the network: what the search prices with.

    (1)  point to point           = bytes / bandwidth + latency
    (2)  ring gather or scatter   = (n-1)/n bytes / bandwidth + (n-1) latency      of ``bytes`` in all
    (3)  ring all-reduce          = twice (2)
    (4)  tree all-reduce          = 2 bytes / bandwidth + 2 ceil(log2 n) latency
    (5)  hierarchical all-reduce  = scatter inside nodes + all-reduce of 1/m between them + gather inside, m per node
    (6)  uneven shards            = padded: (2) with n times the largest shard; grouped: every shard is broadcast alone

The simulator moves the same bytes as flows and adds what contention costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from argosy.workload.chain import Layer


def ring_seconds(num_bytes: float, count: int, bandwidth: float, latency: float) -> float:
    """(2)."""
    if count < 2 or num_bytes <= 0:
        return 0.0
    return num_bytes * (count - 1) / count / bandwidth + (count - 1) * latency


def all_reduce_seconds(num_bytes: float, count: int, bandwidth: float, latency: float) -> float:
    """The better of (3) and (4).

    >>> all_reduce_seconds(8e6, 4, 1e9, 0.0)
    0.012
    """
    if count < 2:
        return 0.0
    tree = 2 * num_bytes / bandwidth + 2 * math.ceil(math.log2(count)) * latency
    return min(2 * ring_seconds(num_bytes, count, bandwidth, latency), tree)


def hierarchical_seconds(
    num_bytes: float, nodes: int, per_node: int, *, inside: tuple[float, float], between: tuple[float, float]
) -> float:
    """(5); ``inside`` and ``between`` are (bandwidth of one device, or of one node; latency).

    >>> hierarchical_seconds(8e9, 2, 4, inside=(1e11, 0.0), between=(1e10, 0.0))
    0.92
    """
    local = 2 * ring_seconds(num_bytes, per_node, *inside)
    return local + all_reduce_seconds(num_bytes, nodes, *between)


def uneven_gather_seconds(shards: Sequence[float], bandwidth: float, latency: float) -> tuple[float, str]:
    """(6): the cheaper way to gather unequal shards, and its name.

    >>> uneven_gather_seconds([10.0, 1.0, 1.0], 1.0, 0.0)
    (12.0, 'grouped')
    """
    count = len(shards)
    padded = ring_seconds(count * max(shards), count, bandwidth, latency)
    grouped = sum(shards) / bandwidth + count * latency
    return (padded, "padded") if padded <= grouped else (grouped, "grouped")


def num_reductions(layer: Layer) -> int:
    """All-reduces that a tensor-parallel group does in one forward of a layer."""
    if not layer.reduced_bytes:
        return 0
    return max(1, round(layer.reduced_bytes / layer.output_bytes)) if layer.output_bytes else 1
