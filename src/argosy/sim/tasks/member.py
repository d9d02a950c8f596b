"""Compute the cost of one micro-batch of a stage on one device: seconds and bytes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from argosy.cluster.topology import Cluster
from argosy.cost.compute import Portion, StageSeconds, update_seconds
from argosy.plan.plan import Plan, Replica, Stage
from argosy.schedule import ActionKind
from argosy.workload.chain import Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberCost:
    """The cost that one micro-batch of a stage has on one device."""

    seconds: StageSeconds
    kept: float = 0.0
    """Bytes that are held from the forward to the backward."""
    forward_bytes: float = 0.0
    """Bytes that are held during a forward only."""
    backward_bytes: float = 0.0
    """Bytes that are held during a backward only."""

    def of(self, kind: ActionKind) -> tuple[float, float]:
        """Return the seconds of an action, and those of them in which keys and values may
        arrive."""
        if kind is ActionKind.FORWARD:
            return self.seconds.forward, self.seconds.hidden_forward
        whole = self.seconds.backward if kind is ActionKind.BACKWARD else self.seconds.backward / 2
        return whole, min(whole, self.seconds.hidden_backward)


def portion_of(cluster: Cluster, stage: Stage, replica: Replica, member: int) -> Portion:
    """Return the work that one device of a replica does for its stage."""
    return Portion(
        device=cluster.device(replica.devices[member]),
        samples=replica.samples,
        share=replica.shares[member],
        width=replica.width,
        routed=routed_load(stage, replica),
    )


def routed_load(stage: Stage, replica: Replica) -> float:
    """Return the tokens that a replica's experts receive over the tokens that it routes.

    The result is 1 if the replicas of its group are equal, as all are that cut the sequence or have
    several devices.
    """
    if stage.expert == 1 or replica.width > 1:
        return 1.0
    at = stage.replicas.index(replica)
    group = stage.replicas[at - at % stage.expert :][: stage.expert]
    return (
        sum(member.samples for member in group)
        * stage.expert_shares[at % stage.expert]
        / replica.samples
    )


def updates_of(plan: Plan, chain: Chain, cluster: Cluster) -> dict[str, float]:
    """Return, by device, the seconds of the updates of all its stages."""
    seconds: dict[str, float] = defaultdict(float)
    for stage in plan.stages:
        for replica in stage.replicas:
            for member, name in enumerate(replica.devices):
                seconds[name] += update_seconds(
                    chain, stage, portion_of(cluster, stage, replica, member)
                )
    return seconds
