"""Describe what the devices of a stage send each other, beside the transfers between stages.

For a replica of n samples, device m with share r_m of its work, sequence in c parts, experts over e
holders; per pass and layer:

    (1)  tensor-parallel group  all-reduce of n / c of the layer's reduced bytes in every part
    (2)  parts of the sequence  a ring of the devices that hold the same heads: each sends the
                                layer's key and value bytes of all parts, n r_m of each, except
                                those of the next device
    (3)  holders of experts     all-to-all: each device sends every other holder its share of the
                                experts, 1 / e unless the stage gives it, of its n r_m routed bytes
    (4)  weights and gradients  once around all holders for what they all hold; for experts, around
                                the holders of the same experts

The plan's choice of algorithm decides how (1) and (4) go around (``cost.collective``).

A forward does (2) once and (3) twice, there and back; a backward does (2) twice, for keys and
values again and for their gradients, and (3) twice; full recomputation adds a forward's.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from argosy.cluster.topology import Cluster
from argosy.cost.collective import Pairs, in_ring_order, once_around, sliced, uneven_once
from argosy.cost.communicate import num_reductions, reduction_passes
from argosy.cost.memory import shared_parameters, stage_parameters, summed_parameters
from argosy.plan.plan import Algorithm, Collective, Plan, Recompute, Replica, Stage
from argosy.schedule import ActionKind
from argosy.workload.chain import SUMMED_BYTES, Chain


@dataclass(frozen=True)
class StageExchange:
    """A communication that some devices of a stage do together once per pass."""

    devices: tuple[str, ...]
    pairs: Pairs
    rounds: int
    """The number of latencies that are paid after the last byte has left."""


def reduction(
    chain: Chain, stage: Stage, replica: Replica, cluster: Cluster, algorithm: Algorithm
) -> StageExchange | None:
    """Return the tensor-parallel reductions of a replica (1), summed over the layers of a stage."""
    parts = replica.parts(stage.context)
    width = len(parts[0])
    if width < 2:
        return None
    layers = chain.layers_of(stage)
    payload = 2 * replica.samples * sum(layer.reduced_bytes for layer in layers) / stage.context
    pairs: dict[tuple[str, str], float] = {}
    rounds = 0
    for part in parts:
        if algorithm in (Algorithm.PADDED, Algorithm.GROUPED):
            shares = [share * stage.context for share in replica.shares[:width]]
            once, rounds = uneven_once(algorithm, part, shares)
        else:
            once, rounds = once_around(algorithm, part, cluster.node_names.__getitem__)
        pairs |= {pair: share * payload for pair, share in once.items()}
    return StageExchange(replica.devices, pairs, 2 * rounds * sum(map(num_reductions, layers)))


def key_values(chain: Chain, stage: Stage, replica: Replica) -> StageExchange | None:
    """Return the exchange of keys and values of a replica (2), summed over the layers of a
    stage."""
    layers = [layer for layer in chain.layers_of(stage) if layer.key_value_bytes]
    if stage.context < 2 or not layers:
        return None
    payload = replica.samples * sum(layer.key_value_bytes for layer in layers)
    width = replica.width // stage.context
    pairs = {}
    for at, device in enumerate(replica.devices):
        following = (at + width) % replica.width
        sent = sum(replica.shares[at % width :: width]) - replica.shares[following]
        pairs[device, replica.devices[following]] = payload * sent
    return StageExchange(replica.devices, pairs, (stage.context - 1) * len(layers))


def routed(chain: Chain, stage: Stage) -> list[StageExchange]:
    """Return the exchange of routed tokens of each group of holders (3), summed over a stage's
    layers."""
    layers = [layer for layer in chain.layers_of(stage) if layer.routed_bytes]
    if stage.expert < 2 or not layers:
        return []
    payload = sum(layer.routed_bytes for layer in layers)
    sent = {
        device: replica.samples * share * payload
        for replica in stage.replicas
        for device, share in replica.members
    }
    exchanges = []
    for group in stage.expert_groups:
        held = zip(group, stage.expert_shares, strict=True)
        pairs = {
            (source, target): sent[source] * part
            for sender, (receiver, part) in itertools.permutations(held, 2)
            for source, target in zip(sender[0], receiver, strict=True)
        }
        devices = tuple(itertools.chain.from_iterable(group))
        exchanges.append(StageExchange(devices, pairs, len(layers)))
    return exchanges


def weights(
    chain: Chain,
    stages: Sequence[Stage],
    cluster: Cluster,
    algorithm: Algorithm,
    parameters: int = 0,
) -> StageExchange:
    """Return the exchange that passes the weights of a stage around all holders once (4).

    If ``parameters`` is given, only this number of parameters, which several stages share, is
    passed.
    """
    passed = passed_bytes(chain, stages, parameters)
    pairs: dict[tuple[str, str], float] = defaultdict(float)
    most = 0
    groups = [([holder for stage in stages for holder in stage.holders], passed.common)]
    if passed.split:
        copies = zip(stages[0].expert_copies, stages[0].expert_shares, strict=True)
        groups += [(list(holders), passed.split * share) for holders, share in copies]
    devices = tuple(name for stage in stages for name in stage.devices)
    node_of = cluster.node_names.__getitem__
    order = in_ring_order(devices, node_of)
    for holders, num_bytes in groups:
        once, rounds = sliced(algorithm, holders, order, node_of)
        most = max(most, passed.num_sums * rounds)
        for pair, share in once.items():
            pairs[pair] += share * num_bytes
    return StageExchange(devices, pairs, most)


class PassedBytes(NamedTuple):
    """A record that holds the bytes of exchange (4)."""

    common: float
    """Bytes of what every holder has."""
    split: float
    """Bytes of experts' weights, over which the holders of a group are divided."""
    num_sums: int
    """Number of sums that follow one another."""


def passed_bytes(chain: Chain, stages: Sequence[Stage], parameters: int) -> PassedBytes:
    """Return the bytes of the weights of a stage, or of ``parameters`` that several share."""
    if parameters:
        return PassedBytes(parameters * chain.exchanged_bytes(0), 0.0, 2 if chain.powersgd else 1)
    if chain.powersgd:  # the second factors are summed after the first
        return PassedBytes(summed_parameters(chain, stages[0]) * SUMMED_BYTES, 0.0, 2)
    common, split = shared_parameters(chain, stages[0])
    width = chain.exchanged_bytes(stages[0].zero)
    return PassedBytes(common * width, split * width, 1)


def weight_exchange(
    plan: Plan, chain: Chain, cluster: Cluster, stages: tuple[int, ...], parameters: int = 0
) -> StageExchange:
    """Return exchange (4) with the algorithm that the plan chooses.

    Weights that several stages share go around a ring.
    """
    algorithm = weight_algorithm(plan, stages)
    return weights(chain, [plan.stages[at] for at in stages], cluster, algorithm, parameters)


def weight_algorithm(plan: Plan, stages: tuple[int, ...]) -> Algorithm:
    """Return the algorithm by which the weights of some stages go around their holders."""
    return plan.algorithm(Collective.WEIGHTS, stages[0]) if len(stages) == 1 else Algorithm.RING


def gradient_groups(
    plan: Plan, chain: Chain, num_holders: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield (stages, parameters or 0 for all of a stage, times around the ring) of the final
    exchanges.

    All holders of these stages take part. A sum goes around twice; under ZeRO 2 only the gather of
    the new weights remains, under ZeRO 3 nothing.
    """
    for index, stage in enumerate(plan.stages):
        if num_holders[index] > 1 and stage_parameters(chain, stage):
            yield (index,), 0, {2: 1, 3: 0}.get(stage.zero, 2)
    ends = [stage.end for stage in plan.stages]
    for layers, parameters in chain.shared:
        homes = sorted({bisect_right(ends, layer) for layer in layers})
        if len(homes) > 1:
            yield tuple(homes), parameters, 2


def reduced_passes(chain: Chain, kind: ActionKind, recompute: Recompute) -> float:
    """Return how often an action does exchange (1)."""
    return 1.0 if kind is ActionKind.FORWARD else reduction_passes(chain, recompute)


def key_value_passes(kind: ActionKind, recompute: Recompute) -> int:
    """Return how often an action does exchange (2)."""
    if kind is ActionKind.FORWARD:
        return 1
    return 0 if kind is ActionKind.WEIGHT_GRADIENT else 2 + (recompute is Recompute.FULL)


def routed_passes(kind: ActionKind, recompute: Recompute) -> int:
    """Return how often an action does exchange (3)."""
    if kind is ActionKind.WEIGHT_GRADIENT:
        return 0
    return 4 if kind is not ActionKind.FORWARD and recompute is Recompute.FULL else 2
