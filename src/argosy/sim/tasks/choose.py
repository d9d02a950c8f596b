"""Choose the algorithm of every group's collectives: the fastest on its routes without other
traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from argosy.cluster.topology import Cluster
from argosy.cost.collective import Rates, in_ring_order, rates_alone, seconds_alone, sliced
from argosy.cost.memory import stage_parameters
from argosy.plan.check import algorithms
from argosy.plan.plan import Algorithm, Collective, CollectiveChoice, Plan, Replica, Stage
from argosy.sim.tasks.exchange import StageExchange, reduction, weights
from argosy.sim.tasks.known import Known
from argosy.workload.chain import Chain


def with_collectives(
    plan: Plan, chain: Chain, cluster: Cluster, known: Known | None = None
) -> Plan:
    """The plan with an algorithm for everything that its groups do together.

    ``known`` has what was found for other plans of the cluster, and is added to.
    """
    return replace(plan, collectives=tuple(_choices(plan, chain, cluster, known or Known())))


def _choices(
    plan: Plan, chain: Chain, cluster: Cluster, known: Known
) -> Iterator[CollectiveChoice]:
    for index, stage in enumerate(plan.stages):
        distinct = known.of([stage.replicas], "distinct", partial(_distinct, stage, cluster))
        if max(replica.width for replica in distinct) > stage.context:
            algorithm = min(
                algorithms(Collective.TENSOR, stage),
                key=lambda candidate: _tensor_seconds(chain, stage, cluster, candidate, distinct),
            )
            yield CollectiveChoice(collective=Collective.TENSOR, stage=index, algorithm=algorithm)
        if stage.num_holders > 1:
            algorithm = min(
                algorithms(Collective.WEIGHTS, stage),
                key=lambda candidate: _weight_seconds(chain, stage, cluster, candidate, known),
            )
            yield CollectiveChoice(collective=Collective.WEIGHTS, stage=index, algorithm=algorithm)


def _distinct(stage: Stage, cluster: Cluster) -> list[Replica]:
    """Return one replica of each sort."""
    sorts = {
        (r.width, r.samples, r.ratios, _links(cluster, r.devices[0])): r for r in stage.replicas
    }
    return list(sorts.values())


def _tensor_seconds(
    chain: Chain,
    stage: Stage,
    cluster: Cluster,
    algorithm: Algorithm,
    distinct: Sequence[Replica],
) -> float:
    """Return the seconds of the slowest tensor-parallel group; equal groups are computed once."""
    exchanges = (reduction(chain, stage, replica, cluster, algorithm) for replica in distinct)
    return max(_seconds(cluster, exchange, 1) for exchange in exchanges if exchange is not None)


def _weight_seconds(
    chain: Chain, stage: Stage, cluster: Cluster, algorithm: Algorithm, known: Known
) -> float:
    rates = None
    if not chain.powersgd and stage.expert == 1:
        rates = known.of(
            [stage.replicas],
            ("rates", stage.context, algorithm),
            partial(_weight_rates, stage, cluster, algorithm),
        )
    if rates is None:
        return _seconds(cluster, weights(chain, [stage], cluster, algorithm), 2)
    num_bytes = stage_parameters(chain, stage) * chain.exchanged_bytes(stage.zero)
    return round(max(2 * (per_byte * num_bytes + latency) for per_byte, latency in rates), 12)


def _weight_rates(stage: Stage, cluster: Cluster, algorithm: Algorithm) -> Rates | None:
    """Return None if the fastest route between two devices may depend on the bytes."""
    node_of = cluster.node_names.__getitem__
    order = in_ring_order(stage.devices, node_of)
    pairs, rounds = sliced(algorithm, stage.holders, order, node_of)
    if any(len(cluster.routes(*pair)) > 1 for pair in pairs):
        return None
    return rates_alone(cluster, pairs, rounds)


def _seconds(cluster: Cluster, exchange: StageExchange, times: int) -> float:
    """Return the seconds of ``times`` exchanges without other traffic, rounded so that ties are
    equal."""
    pairs = {pair: times * size for pair, size in exchange.pairs.items()}
    return round(seconds_alone(cluster, pairs, times * exchange.rounds), 12)


def _links(cluster: Cluster, device: str) -> tuple[tuple[float, float], ...]:
    """Return bandwidth and latency of the links from a device to others in its node."""
    node, at = cluster.node_of[device]
    links = [cluster.links[medium.outward[at]] for medium in node.media]
    return tuple((link.bandwidth.at(0), link.latency.at(0)) for link in links)
