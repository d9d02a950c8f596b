"""Price communication in closed form before devices are known: one bandwidth, one latency, no
contention.

    (1)  ring gather or scatter   = (n-1)/n bytes / bandwidth + (n-1) latency, with ``bytes`` in all
    (2)  all-reduce               = twice (1), or a tree:
                                    2 bytes / bandwidth + 2 ceil(log2 n) latency
    (3)  hierarchical all-reduce  = twice (1) inside nodes + (2) between them

``cost.collective`` does this on the routes of a cluster, for every algorithm; the simulator adds
the cost of contention.
"""

from __future__ import annotations

import math

from argosy.plan.plan import Recompute
from argosy.workload.chain import Chain, Layer
from argosy.workload.systems import Selective

# Bytes/s that stand for a link that is down: a plan that uses it becomes too slow to be chosen, and
# nothing divides by 0.
DOWN = 1.0


def ring_seconds(num_bytes: float, count: int, bandwidth: float, latency: float) -> float:
    """Return the seconds of a ring gather or scatter (1).

    >>> ring_seconds(8e6, 4, 1e9, 0.0)
    0.006
    """
    if count < 2 or num_bytes <= 0:
        return 0.0
    return num_bytes * (count - 1) / count / bandwidth + (count - 1) * latency


def all_reduce_seconds(num_bytes: float, count: int, bandwidth: float, latency: float) -> float:
    """Return the seconds of an all-reduce (2), by the faster of ring and tree.

    >>> all_reduce_seconds(8e6, 4, 1e9, 0.0)
    0.012
    >>> all_reduce_seconds(8e6, 1, 1e9, 1e-6)
    0.0
    """
    tree = 2 * num_bytes / bandwidth + 2 * math.ceil(math.log2(count)) * latency
    return min(2 * ring_seconds(num_bytes, count, bandwidth, latency), tree)


def hierarchical_seconds(
    num_bytes: float,
    nodes: int,
    per_node: int,
    *,
    inside: tuple[float, float],
    between: tuple[float, float],
) -> float:
    """Return the seconds of a hierarchical all-reduce (3).

    ``inside`` and ``between`` are pairs of bandwidth (of one device, or of one node) and latency.

    >>> hierarchical_seconds(8e9, 2, 4, inside=(1e11, 0.0), between=(1e10, 0.0))
    0.92
    """
    local = 2 * ring_seconds(num_bytes, per_node, *inside)
    return local + all_reduce_seconds(num_bytes, nodes, *between)


def num_reductions(layer: Layer) -> int:
    """Return the number of all-reduces that a tensor-parallel group does in one forward of a
    layer."""
    if not layer.reduced_bytes:
        return 0
    return max(1, round(layer.reduced_bytes / layer.output_bytes)) if layer.output_bytes else 1


def reduction_passes(chain: Chain, recompute: Recompute) -> float:
    """Return how often a backward does what a forward exchanges once in tensor-parallel groups.

    Gradients take one pass. If exchanges are repeated, full recomputation takes another; without
    the last projection of a block, also without the scatter that follows it, one of four halves.
    Otherwise groups of torchtitan gather the inputs of products again; those of Megatron-LM do so
    beside products.
    """
    if not chain.repeats_exchanges:
        return 1.0
    if recompute is Recompute.FULL:
        return 1.75 if chain.stops_early else 2.0
    gathers = chain.selective in (Selective.PRODUCTS, Selective.PRODUCTS_ALONE)
    return 1.5 if chain.splits_stream and gathers else 1.0
