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
from dataclasses import dataclass, replace

from argosy.cluster.topology import Cluster, Link, Node, Route
from argosy.cluster.trace import total
from argosy.cost.collective import Pairs, seconds_alone
from argosy.cost.communicate import reduction_passes
from argosy.cost.compute import ComputeModel, StageSeconds, split_stage_seconds, update_seconds
from argosy.plan.plan import Collective, Plan, Replica, Stage
from argosy.schedule import ScheduleKind
from argosy.sim.engine.graph import Flow, TaskGraph
from argosy.sim.tasks.blocking import with_blocking_transfers
from argosy.sim.tasks.compile import Compiler, compile_plan
from argosy.sim.tasks.exchange import StageExchange, key_values, reduction, routed, weight_exchange
from argosy.sim.tasks.member import MemberCost, portion_of
from argosy.sim.tasks.split import overlaps, share_overlaps
from argosy.workload.chain import Chain

# The link number of a device that has no link to other devices of its node.
NOWHERE = -1


@dataclass(frozen=True)
class Bundle:
    """A group of equal neighbouring replicas that is simulated as one device."""

    name: str
    stage: int
    """The index of the first of its stages."""
    replicas: tuple[Replica, ...]
    nodes: frozenset[str]

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the names of the devices of all replicas."""
        return tuple(itertools.chain.from_iterable(replica.devices for replica in self.replicas))


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


def _num_workers(plan: Plan) -> int:
    """Return the number of stages with devices of their own; later stages reuse these devices."""
    chunks = plan.schedule.chunks if plan.schedule.kind is ScheduleKind.INTERLEAVED else 1
    return len(plan.stages) // chunks


def _has_bundles(plan: Plan) -> bool:
    """Return whether a plan can be folded.

    Every worker must have the same replicas in all of its stages, and no stage may give its holders
    different numbers of experts.
    """
    workers = _num_workers(plan)
    if any(stage.experts for stage in plan.stages):
        return False
    if workers == len(plan.stages):
        return True
    equal = all(
        stage.replicas == plan.stages[index % workers].replicas
        for index, stage in enumerate(plan.stages)
    )
    return workers > 1 and equal


def find_bundles(plan: Plan, cluster: Cluster) -> list[Bundle]:
    """Return runs of replicas with equal devices, widths and samples, worker by worker."""

    def look(replica: Replica) -> tuple[object, ...]:
        """Return what two replicas must have in common to be equal."""
        kinds = tuple(
            (d.kind.name, d.efficiency, d.speed) for d in map(cluster.device, replica.devices)
        )
        return kinds, replica.samples, replica.ratios

    bundles = []
    for index, stage in enumerate(plan.stages[: _num_workers(plan)]):
        runs = (tuple(run) for _, run in itertools.groupby(stage.replicas, key=look))
        for number, run in enumerate(runs):
            nodes = frozenset(
                cluster.device(name).node for replica in run for name in replica.devices
            )
            bundles.append(Bundle(f"stage{index}.{number}", index, run, nodes))
    return bundles


class Folder(Compiler):
    """A compiler that gives each bundle of a plan one device.

    Bytes that stay inside nodes flow from a bundle to a twin of itself.
    """

    def __init__(self, plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> None:
        self.whole = plan
        self.real = cluster
        self.bundles = find_bundles(plan, cluster)
        self.home = {name: at for at, bundle in enumerate(self.bundles) for name in bundle.devices}
        self.sites = _sites(self.bundles)
        links = FoldedLinks(cluster)
        self.outward = {name: links.outward(name) for name in self.home}
        self.num_outward = [
            len({self.outward[name] for name in bundle.devices}) for bundle in self.bundles
        ]
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
            split_stage_seconds(
                self.model, self.chain, stage, portion_of(self.real, stage, first_replica, at)
            )
            for at in range(first_replica.width)
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
        home = self.real.device(bundle.devices[0]).node
        near = [
            replica
            for replica in bundle.replicas
            if self.real.device(replica.devices[0]).node == home
        ]
        per_replica = [
            reduction(self.chain, stage, replica, self.real, algorithm) for replica in near
        ]
        exchanges = [exchange for exchange in per_replica if exchange is not None]
        if not exchanges:
            return 0.0
        pairs = {pair: size for exchange in exchanges for pair, size in exchange.pairs.items()}
        return seconds_alone(self.real, pairs, exchanges[0].rounds)

    def _weight_exchange(self, stages: tuple[int, ...], parameters: int) -> StageExchange:
        return weight_exchange(self.whole, self.chain, self.real, stages, parameters)

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
        moved: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for stage, following in itertools.pairwise(self.whole.stages):
            for source, target, samples in overlaps(stage.replicas, following.replicas):
                for sender, receiver, part in share_overlaps(source.shares, target.shares):
                    start, end = source.devices[sender], target.devices[receiver]
                    stays = self.real.device(start).node == self.real.device(end).node
                    for pair in (
                        (self.home[start], self.home[end]),
                        (self.home[end], self.home[start]),
                    ):
                        moved[pair][0] += samples * part
                        moved[pair][1] += samples * part * stays
        return {pair: stayed / whole for pair, (whole, stayed) in moved.items() if stayed}

    def _flows_of(self, pairs: Pairs, factor: float) -> tuple[Flow, ...]:
        """Return the flows of a collective as if all devices and NICs passed as much as the busiest
        (5)."""
        inside: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        between: dict[tuple[int, int], float] = defaultdict(float)
        leaving: dict[str, float] = defaultdict(float)
        entering: dict[str, float] = defaultdict(float)
        for (start, end), num_bytes in pairs.items():
            start_node, end_node = self.real.device(start).node, self.real.device(end).node
            if start_node == end_node:
                inside[self.home[start]][self.outward[start]] += num_bytes
            else:
                between[self.home[start], self.home[end]] += num_bytes
                leaving[start_node] += num_bytes
                entering[end_node] += num_bytes
        flows = [
            Flow(home, self._twin(home), factor * max(by_link.values()) * self.num_outward[home])
            for home, by_link in inside.items()
        ]
        for (home, target), num_bytes in between.items():
            crowd = max(self._crowd(home, leaving), self._crowd(target, entering))
            flows.append(Flow(home, target, factor * num_bytes * crowd))
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
        replica = bundle.replicas[0]
        stages = self.whole.stages[bundle.stage :: _num_workers(self.whole)]
        return max(
            sum(
                update_seconds(self.chain, stage, portion_of(self.real, stage, replica, member))
                for stage in stages
            )
            for member in range(replica.width)
        )

    def graph(self) -> TaskGraph:
        names = tuple(bundle.name for bundle in self.bundles)
        return replace(
            super().graph(), devices=(*names, *(f"{name}.inside" for name in names)), resident=()
        )


def bundles_of(plan: Plan, bundles: Sequence[Bundle], stage: int) -> list[Bundle]:
    """Return the bundles that run a stage, in the order of its replicas."""
    worker = stage % _num_workers(plan)
    return [bundle for bundle in bundles if bundle.stage == worker]


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


def folded_cluster(cluster: Cluster, bundles: Sequence[Bundle]) -> Cluster:
    """Build the cluster on which bundles run (1) to (3)."""
    builder = FoldedLinks(cluster)
    sites = _sites(bundles)
    routes: dict[tuple[str, str], tuple[Route, ...]] = {}
    for source, target in itertools.product(bundles, repeat=2):
        route = builder.between(source, target, sites)
        if route is not None:
            routes[source.name, target.name] = (route,)
    devices = []
    for bundle in bundles:
        devices.append(
            replace(cluster.device(bundle.devices[0]), name=bundle.name, node=bundle.name)
        )
        devices.append(replace(devices[-1], name=f"{bundle.name}.inside"))
        inside = builder.inside(bundle)
        if inside is not None:
            routes[bundle.name, f"{bundle.name}.inside"] = (inside,)
    nodes = tuple(Node(name=device.name, devices=(device.name,)) for device in devices)
    folded = Cluster(
        name=cluster.name, nodes=nodes, devices=tuple(devices), links=tuple(builder.links)
    )
    return folded.with_routes(routes)


def _sites(bundles: Sequence[Bundle]) -> dict[str, frozenset[str]]:
    """Return, per bundle, its nodes and those of all bundles that share nodes with it.

    Bundles may share nodes through a third one.
    """
    groups: list[set[str]] = []
    for bundle in bundles:
        joined = [group for group in groups if not group.isdisjoint(bundle.nodes)]
        groups = [group for group in groups if group.isdisjoint(bundle.nodes)]
        groups.append(set(bundle.nodes).union(*joined))
    return {b.name: frozenset(next(group for group in groups if b.nodes <= group)) for b in bundles}


class FoldedLinks:
    """The links of a folded cluster, which are built when a route first needs them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes = {node.name: node for node in cluster.nodes}
        self.nics = {link for node in cluster.nodes for link in node.nic or ()}
        self.links: list[Link] = []
        self.known: dict[tuple[object, ...], int] = {}

    def between(
        self, source: Bundle, target: Bundle, sites: dict[str, frozenset[str]]
    ) -> Route | None:
        """Return the route from any node of a bundle to a different node of another (1), (3).

        Returns None if all their devices are in one node.
        """
        ends = (
            (a, b) for a in source.devices for b in target.devices if self._node(a) != self._node(b)
        )
        pair = next(ends, None)
        if pair is None:
            return None
        links = self.cluster.routes(*pair)[0].links
        out, into = sites[source.name], sites[target.name]
        folded = []
        for link in links:
            if link not in self.nics:
                folded.append(self._link(("real", link), [link]))
            elif link == links[0]:
                folded.append(self._link(("out", out), self._nics(out, 0)))
            else:
                folded.append(self._link(("in", into), self._nics(into, 1)))
        return Route("folded", tuple(folded))

    def _nics(self, nodes: Iterable[str], direction: int) -> list[int]:
        """Return the links of the nodes' NICs: outgoing if ``direction`` is 0, incoming if it is
        1."""
        nics = [self.nodes[node].nic for node in sorted(nodes)]
        return [nic[direction] for nic in nics if nic is not None]

    def inside(self, bundle: Bundle) -> Route | None:
        """Return the route between the devices of a bundle inside their nodes (2); None if there is
        none."""
        members = sorted({self.outward(name) for name in bundle.devices} - {NOWHERE})
        return Route("inside", (self._link(("inside", *members), members),)) if members else None

    def outward(self, device: str) -> int:
        """Return the link from a device to others in its node; ``NOWHERE`` if there is none."""
        node, at = self.cluster.node_of[device]
        links = [medium.outward[at] for medium in node.media]
        if len(links) == 1:
            return links[0]
        return max(
            links, key=lambda link: self.cluster.links[link].bandwidth.at(0), default=NOWHERE
        )

    def _link(self, key: tuple[object, ...], members: Iterable[int]) -> int:
        """Return the number of a link with the total capacity of ``members``."""
        if key not in self.known:
            real = [self.cluster.links[member] for member in members]
            self.known[key] = len(self.links)
            self.links.append(replace(real[0], bandwidth=total(link.bandwidth for link in real)))
        return self.known[key]

    def _node(self, device: str) -> str:
        """Return the node of a device."""
        return self.cluster.device(device).node
