"""What it takes to go from one plan to another: the bytes that change hands, and how long they take.

A device needs the weights and optimizer state of its layers under the new plan; what it holds already stays.

    (1)  bytes of device d   = state of the layers that d holds under the new plan and not under the old
    (2)  seconds             = max over devices of (1) over its narrowest link, and a pause for the switch itself

Gradients do not move: plans change between steps.
"""

from __future__ import annotations

from collections import defaultdict

from argosy.cluster.topology import Cluster
from argosy.cost.memory import optimizer_bytes
from argosy.plan.plan import Plan
from argosy.workload.chain import Chain

PAUSE = 0.5
"""Seconds that a switch takes beside its bytes: groups are formed anew."""


def moved_bytes(old: Plan, new: Plan, chain: Chain) -> dict[str, float]:
    """(1) by device; tensor-parallel groups hold a part of each layer."""
    per_weight = chain.dtype.bytes + optimizer_bytes(chain)
    before, after = _held(old), _held(new)
    bytes_by_device: dict[str, float] = defaultdict(float)
    for device, layers in after.items():
        for layer, share in layers.items():
            missing = max(share - before.get(device, {}).get(layer, 0.0), 0.0)
            bytes_by_device[device] += missing * chain.layers[layer].parameters * per_weight
    return {device: amount for device, amount in bytes_by_device.items() if amount > 0}


def _held(plan: Plan) -> dict[str, dict[int, float]]:
    """Per device, the share of each layer that it holds."""
    held: dict[str, dict[int, float]] = defaultdict(dict)
    for stage in plan.stages:
        for replica in stage.replicas:
            for device, share in zip(replica.devices, replica.shares, strict=True):
                held[device].update(dict.fromkeys(range(stage.first, stage.end), share))
    return held


def moving_seconds(old: Plan, new: Plan, chain: Chain, cluster: Cluster) -> float:
    """(2) on a cluster as it is at time 0; infinite where a device cannot be reached."""
    slowest = 0.0
    sources = old.devices
    for device, amount in moved_bytes(old, new, chain).items():
        source = next((name for name in sources if name != device), None)
        if source is None:
            continue
        rate = max(cluster.bandwidth(cluster.fastest(name, device, amount)).at(0) for name in sources if name != device)
        slowest = max(slowest, amount / rate if rate > 0 else float("inf"))
    return slowest + PAUSE if slowest else 0.0
