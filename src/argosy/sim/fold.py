"""Fold a plan along its symmetries, so that its simulation cost does not grow with its replicas.

Equal neighbouring replicas of a stage do the same work at the same time. A *bundle* of them becomes
one device that computes as long as any of them, and their messages become one flow with all the
bytes:

    (1)  the NICs of a bundle's nodes become one link with their total capacity; bundles in the same
         nodes share it
    (2)  bytes between devices of one node cross a link with the total capacity of all the bundle's
         devices
    (3)  links in between (uplinks, wires, shared capacities) stay as they are
    (4)  reductions inside a tensor-parallel group take their closed form, as part of the compute
    (5)  in a collective, all devices and all NICs of a bundle pass as much as the busiest of them

The result is exact if the replicas of a bundle are equally loaded; transfers between stages take
the mean over the nodes. Conflicts, more than one route between two nodes, and memory are not
modelled. Under an interleaved schedule a bundle has several stages; a plan whose worker has
different replicas in its stages is not folded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from argosy.cluster.topology import Cluster
from argosy.cost.collective import Pairs, in_ring_order, seconds_alone, sliced
from argosy.cost.communicate import reduction_passes
from argosy.cost.compute import (
    ComputeModel,
    Portion,
    StageSeconds,
    split_stage_seconds,
    update_seconds,
)
from argosy.plan.plan import Algorithm, Collective, Plan, Replica, Stage
from argosy.sim.bundles import Bundle, bundles_of, find_bundles, num_workers, sites_of
from argosy.sim.engine.graph import Flow, TaskGraph
from argosy.sim.folded_links import folded_cluster
from argosy.sim.tasks.blocking import with_blocking_transfers
from argosy.sim.tasks.compile import Compiler, compile_plan
from argosy.sim.tasks.exchange import (
    StageExchange,
    key_values,
    passed_bytes,
    reduction,
    routed,
    weight_algorithm,
    weight_exchange,
)
from argosy.sim.tasks.known import Known
from argosy.sim.tasks.member import MemberCost, portion_of
from argosy.sim.tasks.split import overlaps, share_overlaps
from argosy.workload.chain import Chain


def fold_plan(
    plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel | None = None
) -> tuple[TaskGraph, Cluster]:
    """Build the task graph of one iteration on bundles, and the cluster it runs on.

    A plan that cannot be folded is compiled device by device.
    """
    model = model or ComputeModel()
    if plan.schedule.kind.is_v or plan.offloads or not _has_bundles(plan):
        return compile_plan(plan, chain, cluster, model), cluster
    folder = Folder(plan, chain, cluster, model)
    graph = folder.run()
    return with_blocking_transfers(graph, model.blocking), folded_cluster(cluster, folder.bundles)


def _has_bundles(plan: Plan) -> bool:
    """Return whether a plan can be folded.

    Every worker must have the same replicas in all of its stages, and no stage may give its holders
    different numbers of experts.
    """
    workers = num_workers(plan)
    if any(stage.experts for stage in plan.stages):
        return False
    if workers == len(plan.stages):
        return True
    equal = all(
        stage.replicas == plan.stages[index % workers].replicas
        for index, stage in enumerate(plan.stages)
    )
    return workers > 1 and equal


class Folder(Compiler):
    """A compiler that gives each bundle of a plan one device.

    Bytes that stay inside nodes flow from a bundle to a twin of itself.
    """

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        cluster: Cluster,
        model: ComputeModel,
        known: Known | None = None,
    ) -> None:
        """Prepare a plan; ``known`` has what was found for other plans of the cluster."""
        self.whole = plan
        self.real = cluster
        self.known = known or Known()
        self.bundles = find_bundles(plan, cluster, self.known)
        self.sites = sites_of(self.bundles)
        super().__init__(_one_device_each(plan, self.bundles), chain, cluster, model)
        self.num_holders = [stage.num_holders for stage in plan.stages]
        self.key_values = self._key_values()
        self.routed = [self._merged(routed(chain, stage)) for stage in plan.stages]
        self.inside = self._inside_shares()

    def _bundle(self, replica: Replica) -> Bundle:
        """Return the bundle that a replica of the folded plan stands for."""
        return self.bundles[self.index[replica.devices[0]]]

    def _member(self, stage_index: int, replica: Replica, member: int) -> MemberCost:
        """Return the cost of one micro-batch on the slowest device of a bundle."""
        bundle, stage = self._bundle(replica), self.whole.stages[stage_index]
        first_replica = bundle.replicas[0]
        per_device = [
            split_stage_seconds(self.model, self.chain, stage, portion)
            for portion in self._distinct_portions(stage, first_replica)
        ]
        reduce = self._reduce_seconds(stage_index, bundle)
        forward, backward, hidden_forward, hidden_backward = (
            max(values) for values in zip(*map(dataclasses.astuple, per_device), strict=True)
        )
        if stage.end > self.chain.first_backward:
            backward += reduce * reduction_passes(self.chain, stage.recompute)
        return MemberCost(
            seconds=StageSeconds(forward + reduce, backward, hidden_forward, hidden_backward)
        )

    def _distinct_portions(self, stage: Stage, replica: Replica) -> list[Portion]:
        """Return the work of one of all equal devices of a replica."""
        portions = (portion_of(self.real, stage, replica, at) for at in range(replica.width))
        sorts = {(id(p.device.kind), p.device.efficiency, p.share): p for p in portions}
        return list(sorts.values())

    def _reductions(self, index: int, stage: Stage) -> list[StageExchange | None]:
        """Return no exchange for any replica, because reductions are part of the compute (4)."""
        return [None for _ in stage.replicas]

    def _key_values(self) -> list[list[StageExchange | None]]:
        """Return, for each stage and bundle, the exchanges of keys and values of its replicas as
        one."""
        by_stage: list[list[StageExchange | None]] = []
        for index, stage in enumerate(self.whole.stages):
            by_stage.append([])
            for bundle in bundles_of(self.whole, self.bundles, index):
                per_replica = [
                    key_values(self.chain, stage, replica) for replica in bundle.replicas
                ]
                merged = self._merged(
                    [exchange for exchange in per_replica if exchange is not None]
                )
                by_stage[index].append(merged[0] if merged else None)
        return by_stage

    def _merged(self, exchanges: Iterable[StageExchange]) -> list[StageExchange]:
        """Merge the exchanges of the same bundles into one, on bundles."""
        merged: dict[tuple[str, ...], StageExchange] = {}
        for exchange in exchanges:
            names = tuple(
                self.bundles[at].name
                for at in sorted({self.home[name] for name in exchange.devices})
            )
            pairs = {**merged[names].pairs, **exchange.pairs} if names in merged else exchange.pairs
            merged[names] = StageExchange(names, pairs, exchange.rounds)
        return list(merged.values())

    def _reduce_seconds(self, index: int, bundle: Bundle) -> float:
        """Return the seconds of the reductions of a stage (4).

        All groups in the node of the first one are included, because they may share a medium.
        """
        stage, algorithm = self.whole.stages[index], self.whole.algorithm(Collective.TENSOR, index)
        per_replica = [
            reduction(self.chain, stage, replica, self.real, algorithm)
            for replica in bundle.run.near
        ]
        exchanges = [exchange for exchange in per_replica if exchange is not None]
        if not exchanges:
            return 0.0
        pairs = {pair: size for exchange in exchanges for pair, size in exchange.pairs.items()}
        return seconds_alone(self.real, pairs, exchanges[0].rounds)

    def _weights_once(
        self, stages: tuple[int, ...], parameters: int
    ) -> tuple[tuple[Flow, ...], int]:
        whole, factor = [self.whole.stages[at] for at in stages], 1 / self.model.reduction
        passed = passed_bytes(self.chain, whole, parameters)
        if passed.split:
            exchange = weight_exchange(self.whole, self.chain, self.real, stages, parameters)
            return self._flows_of(exchange.pairs, factor), exchange.rounds
        algorithm, places = weight_algorithm(self.whole, stages), self._places(stages)
        # How many NICs flows cross depends on other stages in the same nodes.
        sites = tuple(self.sites[self.bundles[at].name] for at in places)
        flows, rounds = self.known.of(
            [stage.replicas for stage in whole],
            ("around", tuple(stage.context for stage in whole), algorithm, sites),
            lambda: self._byte_once(whole, algorithm, places),
        )
        size, twins = factor * passed.common, [self._twin(at) for at in places]
        return tuple(
            Flow(places[source], twins[source] if target < 0 else places[target], size * share)
            for source, target, share in flows
        ), passed.num_sums * rounds

    def _places(self, stages: Sequence[int]) -> list[int]:
        """Return the numbers of the bundles of some stages."""
        workers = {stage % num_workers(self.whole) for stage in stages}
        return [at for at, bundle in enumerate(self.bundles) if bundle.stage in workers]

    def _byte_once(
        self, stages: Sequence[Stage], algorithm: Algorithm, places: Sequence[int]
    ) -> tuple[list[tuple[int, int, float]], int]:
        """Return the flows that pass one byte around the holders of stages with these bundles:
        source and target as positions in ``places``, -1 inside nodes, and bytes."""
        node_of = self.real.node_names.__getitem__
        holders = [holder for stage in stages for holder in stage.holders]
        order = in_ring_order([name for at in places for name in self.bundles[at].devices], node_of)
        once, rounds = sliced(algorithm, holders, order, node_of)
        position = {bundle: at for at, bundle in enumerate(places)}
        flows = [
            (position[flow.source], position.get(flow.target, -1), flow.bytes)
            for flow in self._flows_of(once, 1.0)
        ]
        return flows, rounds

    def _flows(self, source: int, target: int, num_bytes: float) -> tuple[Flow, ...]:
        inside = self.inside.get((source, target), 0.0)
        flows = (
            Flow(source, target, num_bytes * (1 - inside)),
            Flow(source, self._twin(source), num_bytes * inside),
        )
        return tuple(flow for flow in flows if flow.bytes > 0)

    def _twin(self, bundle: int) -> int:
        """Return the device that receives what a bundle sends inside its nodes."""
        return len(self.bundles) + bundle

    def _inside_shares(self) -> dict[tuple[int, int], float]:
        """Return, for each pair of bundles, the share of their traffic that stays inside nodes."""
        shares: dict[tuple[int, int], float] = {}
        for at, (stage, following) in enumerate(itertools.pairwise(self.whole.stages)):
            sources, targets = self._places([at]), self._places([at + 1])
            between = self.known.of(
                [stage.replicas, following.replicas],
                "inside",
                partial(self._inside_between, stage, following, sources, targets),
            )
            for (source, target), share in between.items():
                shares[sources[source], targets[target]] = share
                shares[targets[target], sources[source]] = share
        return shares

    def _inside_between(
        self, stage: Stage, following: Stage, sources: Sequence[int], targets: Sequence[int]
    ) -> dict[tuple[int, int], float]:
        """Return the share of the traffic between the bundles of two stages that stays inside
        nodes, by the positions of the bundles; shares of 0 are left out."""
        ends = itertools.product(sources, targets)
        if all(self.bundles[a].nodes.isdisjoint(self.bundles[b].nodes) for a, b in ends):
            return {}
        node_of, home = self.real.node_names, self.home
        common: dict[tuple[object, ...], list[tuple[int, int, float]]] = {}
        moved: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for source, target, samples in overlaps(stage.replicas, following.replicas):
            look = (source.width, source.ratios, target.width, target.ratios)
            if look not in common:
                common[look] = list(share_overlaps(source.shares, target.shares))
            pair = moved[home[source.devices[0]], home[target.devices[0]]]
            for sender, receiver, part in common[look]:
                pair[0] += samples * part
                if node_of[source.devices[sender]] == node_of[target.devices[receiver]]:
                    pair[1] += samples * part
        return {
            (sources.index(source), targets.index(target)): stayed / whole
            for (source, target), (whole, stayed) in moved.items()
            if stayed
        }

    @cached_property
    def home(self) -> dict[str, int]:
        """Return the bundle of each device."""
        return {name: at for at, bundle in enumerate(self.bundles) for name in bundle.devices}

    def _flows_of(self, pairs: Pairs, factor: float) -> tuple[Flow, ...]:
        """Return the flows of a collective as if all devices and NICs passed as much as the busiest
        (5)."""
        inside: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        between: dict[tuple[int, int], float] = defaultdict(float)
        leaving: dict[str, float] = defaultdict(float)
        entering: dict[str, float] = defaultdict(float)
        node_of, home = self.real.node_names, self.home
        for (start, end), num_bytes in pairs.items():
            start_node, end_node = node_of[start], node_of[end]
            if start_node == end_node:
                bundle = home[start]
                inside[bundle][self.bundles[bundle].run.outward[start]] += num_bytes
            else:
                between[home[start], home[end]] += num_bytes
                leaving[start_node] += num_bytes
                entering[end_node] += num_bytes
        flows = []
        for bundle, by_link in inside.items():
            links = len(self.bundles[bundle].run.inside)
            busiest = max(by_link.values())
            flows.append(Flow(bundle, self._twin(bundle), factor * busiest * links))
        for (source, target), num_bytes in between.items():
            crowd = max(self._crowd(source, leaving), self._crowd(target, entering))
            flows.append(Flow(source, target, factor * num_bytes * crowd))
        return tuple(flows)

    def _crowd(self, bundle: int, passing: Mapping[str, float]) -> float:
        """Return the load of the busiest NIC around a bundle over the mean load of these NICs."""
        nodes = self.sites[self.bundles[bundle].name]
        loads = [passing.get(node, 0.0) for node in nodes]
        return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0

    def _add_update(self, device: int, waits: list[int]) -> None:
        self._end_with_update(device, self._bundle_update(device), waits)

    def _bundle_update(self, device: int) -> float:
        """Return the update seconds of the slowest device of a bundle, for all of its stages."""
        bundle = self.bundles[device]
        stages = self.whole.stages[bundle.stage :: num_workers(self.whole)]
        return max(
            sum(update_seconds(self.chain, stage, portion) for stage in stages)
            for portion in self._distinct_portions(stages[0], bundle.replicas[0])
        )

    def graph(self) -> TaskGraph:
        names = tuple(bundle.name for bundle in self.bundles)
        return replace(
            super().graph(), devices=(*names, *(f"{name}.inside" for name in names)), resident=()
        )


def _one_device_each(plan: Plan, bundles: Sequence[Bundle]) -> Plan:
    """Return the plan with every bundle as one replica of one device."""
    stages = []
    for index, stage in enumerate(plan.stages):
        stage_bundles = bundles_of(plan, bundles, index)
        replicas = tuple(
            Replica(devices=(b.name,), samples=sum(r.samples for r in b.replicas))
            for b in stage_bundles
        )
        stages.append(replace(stage, replicas=replicas, context=1, expert=1))
    return replace(plan, stages=tuple(stages))
