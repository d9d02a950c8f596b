"""Count the bytes that a stage copies between its devices and the host, and those that its nodes
hold.

With K the bytes that a forward keeps of a micro-batch outside the device, W the weights and S the
moments that are kept there (``cost.memory``, (11)), per device:

    (1)  forward   copies K out and W in
    (2)  backward  copies K and W in
    (3)  update    copies S in and out, and trained weights out
    (4)  outside   = S + W + (micro-batches in flight) K

Copies run beside the computation that they belong to, on links of their own (``cluster.host``). In
a stage with L layers the first layer is computed before there is anything to copy, and the last one
after its data has arrived:

    (5)  seconds of an action = t / L + max(t - t / L, copy seconds)     t those of its computation
    (6)  seconds of an update = copy seconds + those of the update

The exact engine simulates these copies as flows, so that devices that share the link of their host
slow each other down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from argosy.cluster.host import Tier, tier_size
from argosy.cluster.topology import Cluster
from argosy.cost.memory import activation_bytes, kept_bytes, state_bytes
from argosy.plan.plan import Plan, Stage
from argosy.schedule import most_in_flight
from argosy.workload.chain import Chain


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy that moves bytes between a device and the tier where a stage keeps them."""

    tier: Tier
    out: float = 0.0
    into: float = 0.0


def action_copies(
    chain: Chain, stage: Stage, samples: int, share: float, *, backward: bool
) -> list[Copy]:
    """Return the copies of a forward (1) or a backward (2) of one device."""
    copies = []
    if stage.offload.activations is not None and stage.end > chain.first_backward:
        moved = outside_activations(chain, stage, samples, share)
        copies.append(
            Copy(
                tier=stage.offload.activations,
                out=0.0 if backward else moved,
                into=moved if backward else 0.0,
            )
        )
    if stage.offload.weights is not None:
        state = state_bytes(chain, stage, share)
        copies.append(
            Copy(tier=stage.offload.weights, into=state.outside_weights + state.outside_frozen)
        )
    return [copy for copy in copies if copy.out or copy.into]


def update_copies(chain: Chain, stage: Stage, share: float) -> list[Copy]:
    """Return the copies of an update (3) of one device."""
    state, copies = state_bytes(chain, stage, share), []
    if stage.offload.optimizer is not None:
        copies.append(
            Copy(
                tier=stage.offload.optimizer, out=state.outside_moments, into=state.outside_moments
            )
        )
    if stage.offload.weights is not None:
        copies.append(Copy(tier=stage.offload.weights, out=state.outside_weights))
    return [copy for copy in copies if copy.out or copy.into]


def outside_activations(chain: Chain, stage: Stage, samples: int, share: float) -> float:
    """Return K, the bytes of activations that one device keeps outside."""
    if stage.offload.activations is None:
        return 0.0
    return kept_bytes(chain, stage, samples, share) - activation_bytes(chain, stage, samples, share)


def overlapped(seconds: float, copying: float, num_layers: int) -> float:
    """Return the seconds (5) of an action with copies."""
    first = seconds / num_layers
    return first + max(seconds - first, copying)


@dataclass(frozen=True, kw_only=True)
class HostUse:
    """A record of the bytes that a plan keeps in the memory or on the drive of a node."""

    node: str
    tier: Tier
    moments: float
    weights: float
    activations: float
    capacity: float
    """Bytes that a plan may use there."""

    @property
    def total(self) -> float:
        return self.moments + self.weights + self.activations


def host_uses(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[HostUse]:
    """Yield the use (4) of every node and tier that a plan uses."""
    depths = most_in_flight(plan.schedule, len(plan.stages), plan.num_micro_batches)
    held: dict[tuple[str, Tier], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for depth, stage in zip(depths, plan.stages, strict=True):
        for replica in stage.replicas if stage.offload else ():
            for name, share in replica.members:
                node = cluster.device(name).node
                state = state_bytes(chain, stage, share)
                kept = depth * outside_activations(chain, stage, replica.samples, share)
                sizes = (state.outside_moments, state.outside_weights + state.outside_frozen, kept)
                tiers = (stage.offload.optimizer, stage.offload.weights, stage.offload.activations)
                for at, (tier, num_bytes) in enumerate(zip(tiers, sizes, strict=True)):
                    if tier is not None:
                        held[node, tier][at] += num_bytes
    nodes = {node.name: node for node in cluster.nodes}
    for (name, tier), (moments, weights, activations) in held.items():
        capacity = tier_size(cluster, nodes[name], tier)
        yield HostUse(
            node=name,
            tier=tier,
            moments=moments,
            weights=weights,
            activations=activations,
            capacity=capacity,
        )
