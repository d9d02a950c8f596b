"""Seconds of communication in closed form before devices are known: one bandwidth, one latency, alone on the network.

    (1)  ring gather or scatter   = (n-1)/n bytes / bandwidth + (n-1) latency      of ``bytes`` in all;  a sum: twice

``cost.collective`` does the same on the routes of a cluster, for every algorithm; the simulator adds what contention
costs.
"""

from __future__ import annotations

from argosy.workload.chain import Layer


def ring_seconds(num_bytes: float, count: int, bandwidth: float, latency: float) -> float:
    """(1)

    >>> ring_seconds(8e6, 4, 1e9, 0.0)
    0.006
    """
    if count < 2 or num_bytes <= 0:
        return 0.0
    return num_bytes * (count - 1) / count / bandwidth + (count - 1) * latency


def num_reductions(layer: Layer) -> int:
    """All-reduces that a tensor-parallel group does in one forward of a layer."""
    if not layer.reduced_bytes:
        return 0
    return max(1, round(layer.reduced_bytes / layer.output_bytes)) if layer.output_bytes else 1
