"""Adapt batch shares to the speeds of replicas: the change of a plan that moves no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from argosy.adapt.watch import World
from argosy.cluster.topology import Cluster
from argosy.plan.plan import Plan, Stage
from argosy.workload.chain import Chain


def with_shares(plan: Plan, chain: Chain, cluster: Cluster, world: World) -> Plan:
    """Return the plan with every stage's samples in proportion to its replicas' speeds, at least
    one each.

    A tensor-parallel group is as fast as the member that takes longest for its share of the work.
    """
    speeds = dict(world.speeds)
    return replace(
        plan, stages=tuple(_shared(stage, chain, cluster, speeds) for stage in plan.stages)
    )


def _shared(stage: Stage, chain: Chain, cluster: Cluster, speeds: Mapping[str, float]) -> Stage:
    if len(stage.replicas) < 2:
        return stage
    paces = []
    for replica in stage.replicas:
        devices = [cluster.device(name) for name in replica.devices]
        kinds = [d.kind.peak(chain.dtype) * d.efficiency * speeds.get(d.name, 1.0) for d in devices]
        paces.append(
            max(min(kind / share for kind, share in zip(kinds, replica.shares, strict=True)), 1e-9)
        )
    counts = in_proportion(sum(replica.samples for replica in stage.replicas), paces)
    replicas = [replace(r, samples=count) for r, count in zip(stage.replicas, counts, strict=True)]
    return replace(stage, replicas=tuple(replicas))


def in_proportion(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers of at least 1 that sum to ``total``: each unit goes to the member that
    would finish it first."""
    counts = [1] * len(weights)
    for _ in range(total - len(weights)):
        at = min(
            range(len(weights)), key=lambda index: ((counts[index] + 1) / weights[index], index)
        )
        counts[at] += 1
    return counts
