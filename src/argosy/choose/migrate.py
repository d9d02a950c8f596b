"""What it costs to go from one plan to another: bytes of state that change hands, over the links as they are then.

(1)  a device must receive weights and optimizer state of the layers that it holds under the new plan and did not
     under the old one, its share of each
(2)  from a device of its own node where one had the layer, over the node's best medium; else over its node's NIC
(3)  seconds = the longest that any device (inside) or any node (outside) takes to receive what it lacks
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from argosy.cluster.topology import Cluster, Node
from argosy.cost.memory import optimizer_bytes
from argosy.plan.plan import Plan
from argosy.workload.chain import Chain


@dataclass(frozen=True, kw_only=True)
class Migration:
    """(1) and (2): bytes to receive."""

    inside: tuple[tuple[str, float], ...]
    """Per device, from its own node."""
    outside: tuple[tuple[str, float], ...]
    """Per node, from others."""

    @property
    def bytes(self) -> float:
        return sum(size for _, size in (*self.inside, *self.outside))

    def seconds(self, cluster: Cluster, time: float) -> float:
        """(3), at the bandwidths of a moment; infinity while a link that is needed is down."""
        nodes = {node.name: node for node in cluster.nodes}
        times = [size / _inside(cluster, cluster.node_of[name][0], time) for name, size in self.inside if size]
        for name, size in self.outside:
            rate = _outside(cluster, nodes[name], time)
            times.append(size / rate if rate else float("inf"))
        return max(times, default=0.0)


def migration(old: Plan, new: Plan, chain: Chain, cluster: Cluster) -> Migration:
    """What has to move when one plan follows another."""
    before, after = _held(old), _held(new)
    home = {name: cluster.node_of[name][0].name for name in {*before, *after}}
    at_node: dict[str, set[int]] = defaultdict(set)
    for name, layers in before.items():
        at_node[home[name]].update(layers)
    per_weight = chain.dtype.bytes + optimizer_bytes(chain)
    inside: dict[str, float] = defaultdict(float)
    outside: dict[str, float] = defaultdict(float)
    for name, layers in after.items():
        for layer, share in layers.items():
            if layer in before.get(name, {}):
                continue
            size = share * per_weight * chain.layers[layer].parameters
            if layer in at_node[home[name]]:
                inside[name] += size
            else:
                outside[home[name]] += size
    return Migration(inside=tuple(sorted(inside.items())), outside=tuple(sorted(outside.items())))


def _held(plan: Plan) -> dict[str, dict[int, float]]:
    """Per device, the layers that it holds and its share of their tensors; ZeRO shares state, which must arrive whole
    once per stage."""
    held: dict[str, dict[int, float]] = defaultdict(dict)
    for stage in plan.stages:
        split = len(stage.replicas) if stage.zero else 1
        for replica in stage.replicas:
            for name, share in zip(replica.devices, replica.shares, strict=True):
                for layer in range(stage.first, stage.end):
                    held[name][layer] = max(held[name].get(layer, 0.0), share / split)
    return held


def _inside(cluster: Cluster, node: Node, time: float) -> float:
    return max(cluster.links[medium.inward[0]].bandwidth.at(time) for medium in node.media)


def _outside(cluster: Cluster, node: Node, time: float) -> float:
    """Bytes/s into a node: its NIC, or the widest wire to it."""
    rates = [cluster.links[node.nic[1]].bandwidth.at(time)] if node.nic else []
    for wire in cluster.wires:
        if wire.bypasses_nic and node.name in (*wire.one, *wire.other):
            rates.append(cluster.links[wire.forward if node.name in wire.other else wire.back].bandwidth.at(time))
    return max(rates, default=0.0)
