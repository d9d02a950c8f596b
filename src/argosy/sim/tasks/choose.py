"""Which algorithm every group of a plan uses for its collectives: the fastest on its routes, alone
there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from argosy.cluster.topology import Cluster
from argosy.cost.collective import seconds_alone
from argosy.plan.check import algorithms
from argosy.plan.plan import Algorithm, Collective, CollectiveChoice, Plan, Stage
from argosy.sim.tasks.exchange import StageExchange, reduction, weights
from argosy.workload.chain import Chain


def with_collectives(plan: Plan, chain: Chain, cluster: Cluster) -> Plan:
    """The plan with an algorithm for everything that its groups do together."""
    return replace(plan, collectives=tuple(_choices(plan, chain, cluster)))


def _choices(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[CollectiveChoice]:
    for index, stage in enumerate(plan.stages):
        if max(replica.width for replica in stage.replicas) > stage.context:
            algorithm = min(
                algorithms(Collective.TENSOR, stage),
                key=lambda one: _tensor_seconds(chain, stage, cluster, one),
            )
            yield CollectiveChoice(collective=Collective.TENSOR, stage=index, algorithm=algorithm)
        if stage.num_holders > 1:
            algorithm = min(
                algorithms(Collective.WEIGHTS, stage),
                key=lambda one: _weight_seconds(chain, stage, cluster, one),
            )
            yield CollectiveChoice(collective=Collective.WEIGHTS, stage=index, algorithm=algorithm)


def _tensor_seconds(chain: Chain, stage: Stage, cluster: Cluster, algorithm: Algorithm) -> float:
    """Of the slowest group, one of each look."""
    looks = {
        (r.width, r.samples, r.ratios, _links(cluster, r.devices[0])): r for r in stage.replicas
    }
    found = (reduction(chain, stage, replica, cluster, algorithm) for replica in looks.values())
    return max(_seconds(cluster, exchange, 1) for exchange in found if exchange is not None)


def _weight_seconds(chain: Chain, stage: Stage, cluster: Cluster, algorithm: Algorithm) -> float:
    return _seconds(cluster, weights(chain, [stage], cluster, algorithm), 2)


def _seconds(cluster: Cluster, exchange: StageExchange, times: int) -> float:
    pairs = {pair: times * size for pair, size in exchange.pairs.items()}
    return round(seconds_alone(cluster, pairs, times * exchange.rounds), 12)


def _links(cluster: Cluster, device: str) -> tuple[tuple[float, float], ...]:
    """Bandwidth and latency of what a device's node talks over."""
    node, at = cluster.node_of[device]
    links = [cluster.links[medium.outward[at]] for medium in node.media]
    return tuple((link.bandwidth.at(0), link.latency.at(0)) for link in links)
