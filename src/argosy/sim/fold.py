"""A plan folded along its symmetries, so that its simulation costs the same however many replicas it has.

Equal replicas that stand next to each other in a stage do the same at the same time. A *bundle* of them becomes one
device that computes as long as any of them, and what they send becomes one flow with all the bytes:

    (1)  the NICs of a bundle's nodes become one link with their capacity together; bundles in the same nodes share it
    (2)  bytes between devices of one node cross a link with the capacity of all the bundle's devices together
    (3)  links in between (uplinks, wires, shared capacities) stay as they are
    (4)  reductions inside a tensor-parallel group take their closed form, as part of the compute

Exact where the replicas of a bundle are equally loaded and neighbours in the ring; otherwise the mean over its nodes.
Not modelled: conflicts, more than one route between two nodes, memory, chunks of interleaved schedules.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from argosy.cluster.topology import Cluster, Link, Node, Route
from argosy.cluster.trace import total
from argosy.cost.communicate import num_reductions, ring_seconds
from argosy.cost.compute import ComputeModel, Portion, StageSeconds, split_stage_seconds, update_seconds
from argosy.plan.plan import Plan, Replica, Stage
from argosy.sim.blocking import with_blocking_transfers
from argosy.sim.compile import Compiler, Member
from argosy.sim.exchange import Exchange, Pairs, ReplicaExchange, reduction, routed, weight_pairs
from argosy.sim.graph import Flow, TaskGraph
from argosy.sim.split import overlaps, share_overlaps
from argosy.workload.chain import Chain


@dataclass(frozen=True)
class Bundle:
    """Equal neighbouring replicas of a stage."""

    name: str
    stage: int
    replicas: tuple[Replica, ...]
    nodes: frozenset[str]

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(replica.devices for replica in self.replicas))


def fold_plan(
    plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel | None = None
) -> tuple[TaskGraph, Cluster]:
    """The task graph of one iteration on bundles, and the cluster it runs on."""
    model = model or ComputeModel()
    folder = _Folder(plan, chain, cluster, model)
    graph = folder.run()
    return with_blocking_transfers(graph) if model.blocking else graph, folded_cluster(cluster, folder.bundles)


def find_bundles(plan: Plan, cluster: Cluster) -> list[Bundle]:
    """Runs of replicas with equal devices, widths and samples, stage by stage."""

    def look(replica: Replica) -> tuple[object, ...]:
        kinds = tuple((d.kind.name, d.efficiency, d.speed) for d in map(cluster.device, replica.devices))
        return kinds, replica.samples, replica.ratios

    bundles = []
    for index, stage in enumerate(plan.stages):
        runs = (tuple(run) for _, run in itertools.groupby(stage.replicas, key=look))
        for number, run in enumerate(runs):
            nodes = frozenset(cluster.device(name).node for replica in run for name in replica.devices)
            bundles.append(Bundle(f"stage{index}.{number}", index, run, nodes))
    return bundles


class _Folder(Compiler):
    """Compiles a plan of one device per bundle; what stays inside nodes goes from a bundle to a twin of itself."""

    def __init__(self, plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> None:
        self.whole = plan
        self.real = cluster
        self.bundles = find_bundles(plan, cluster)
        self.home = {name: at for at, bundle in enumerate(self.bundles) for name in bundle.devices}
        super().__init__(_one_device_each(plan, self.bundles), chain, cluster, model)
        self.num_holders = [stage.num_holders for stage in plan.stages]
        self.routed = [self._merged(routed(chain, stage)) for stage in plan.stages]
        self.inside = self._inside_shares()

    def _bundle(self, replica: Replica) -> Bundle:
        return self.bundles[self.index[replica.devices[0]]]

    def _member(self, stage_index: int, replica: Replica, member: int) -> Member:
        bundle, stage = self._bundle(replica), self.whole.stages[stage_index]
        one = bundle.replicas[0]
        each = [
            split_stage_seconds(self.model, self.chain, stage, self._real_portion(one, at)) for at in range(one.width)
        ]
        reduce = self._reduce_seconds(stage, one, bundle.devices)
        forward, backward, hidden_forward, hidden_backward = (
            max(values) for values in zip(*map(dataclasses.astuple, each), strict=True)
        )
        return Member(seconds=StageSeconds(forward + reduce, backward + reduce, hidden_forward, hidden_backward))

    def _per_replica(self, exchange: ReplicaExchange) -> list[list[Exchange | None]]:
        """What the replicas of a bundle do side by side; reductions are part of the compute."""
        found: list[list[Exchange | None]] = [[] for _ in self.plan.stages]
        for bundle in self.bundles:
            stage = self.whole.stages[bundle.stage]
            each = (
                [] if exchange is reduction else [exchange(self.chain, stage, replica) for replica in bundle.replicas]
            )
            merged = self._merged([one for one in each if one is not None])
            found[bundle.stage].append(merged[0] if merged else None)
        return found

    def _merged(self, exchanges: Iterable[Exchange]) -> list[Exchange]:
        """Those of the same bundles as one, on bundles."""
        found: dict[tuple[str, ...], Exchange] = {}
        for one in exchanges:
            names = tuple(self.bundles[at].name for at in sorted({self.home[name] for name in one.devices}))
            pairs = {**found[names].pairs, **one.pairs} if names in found else one.pairs
            found[names] = Exchange(names, pairs, one.rounds)
        return list(found.values())

    def _real_portion(self, replica: Replica, member: int) -> Portion:
        device, share = self.real.device(replica.devices[member]), replica.shares[member]
        return Portion(device=device, samples=replica.samples, share=share, width=replica.width)

    def _reduce_seconds(self, stage: Stage, replica: Replica, devices: Sequence[str]) -> float:
        """(4); a medium with one capacity for the node is shared by all of ``devices`` in it."""
        width = replica.width // stage.context
        if width < 2:
            return 0.0
        layers = self.chain.layers[stage.first : stage.end]
        payload = 2 * replica.samples * sum(layer.reduced_bytes for layer in layers) / stage.context
        route = self.real.fastest(replica.devices[0], replica.devices[1], 1e6)
        latency = 2 * (width - 1) * sum(map(num_reductions, layers)) * self.real.latency(route)
        bandwidth = self.real.bandwidth(route).at(0)
        if len(route.links) == 1:
            node = self.real.device(replica.devices[0]).node
            bandwidth /= sum(self.real.device(name).node == node for name in devices)
        return ring_seconds(payload, width, bandwidth, 0.0) + latency

    def _weight_pairs(self, stages: tuple[int, ...], parameters: int) -> Pairs:
        whole = [self.whole.stages[at] for at in stages]
        return weight_pairs(self.chain, whole, self.real.device_index.__getitem__, parameters)

    def _flows(self, source: int, target: int, num_bytes: float) -> tuple[Flow, ...]:
        inside = self.inside.get((source, target), 0.0)
        flows = (Flow(source, target, num_bytes * (1 - inside)), Flow(source, self._twin(source), num_bytes * inside))
        return tuple(flow for flow in flows if flow.bytes > 0)

    def _twin(self, bundle: int) -> int:
        return len(self.bundles) + bundle

    def _inside_shares(self) -> dict[tuple[int, int], float]:
        """Of what two bundles exchange, the share that stays inside nodes."""
        moved: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for one, other in itertools.pairwise(self.whole.stages):
            for source, target, samples in overlaps(one.replicas, other.replicas):
                for sender, receiver, part in share_overlaps(source.shares, target.shares):
                    start, end = source.devices[sender], target.devices[receiver]
                    stays = self.real.device(start).node == self.real.device(end).node
                    for pair in ((self.home[start], self.home[end]), (self.home[end], self.home[start])):
                        moved[pair][0] += samples * part
                        moved[pair][1] += samples * part * stays
        return {pair: stayed / whole for pair, (whole, stayed) in moved.items() if stayed}

    def _flows_of(self, pairs: Pairs, factor: float) -> tuple[Flow, ...]:
        """All the bytes that pass, bundle by bundle."""
        flows: dict[tuple[int, int], float] = defaultdict(float)
        for (start, end), num_bytes in pairs.items():
            stays = self.real.device(start).node == self.real.device(end).node
            flows[self.home[start], self._twin(self.home[start]) if stays else self.home[end]] += num_bytes
        return tuple(Flow(source, target, num_bytes * factor) for (source, target), num_bytes in flows.items())

    def _add_update(self, device: int, waits: list[int]) -> None:
        bundle = self.bundles[device]
        stage, one = self.whole.stages[bundle.stage], bundle.replicas[0]
        seconds = max(update_seconds(self.chain, stage, self._real_portion(one, m)) for m in range(one.width))
        self._end_with_update(device, seconds, waits)

    def graph(self) -> TaskGraph:
        names = tuple(bundle.name for bundle in self.bundles)
        return replace(super().graph(), devices=(*names, *(f"{name}.inside" for name in names)), resident=())


def _one_device_each(plan: Plan, bundles: Sequence[Bundle]) -> Plan:
    """The plan with every bundle as one replica of one device."""
    stages = []
    for index, stage in enumerate(plan.stages):
        mine = [bundle for bundle in bundles if bundle.stage == index]
        replicas = tuple(Replica(devices=(b.name,), samples=sum(r.samples for r in b.replicas)) for b in mine)
        stages.append(replace(stage, replicas=replicas, context=1, expert=1))
    return replace(plan, stages=tuple(stages))


def folded_cluster(cluster: Cluster, bundles: Sequence[Bundle]) -> Cluster:
    """(1) to (3)."""
    builder = _Links(cluster)
    sites = _sites(bundles)
    routes: dict[tuple[str, str], tuple[Route, ...]] = {}
    for one, other in itertools.product(bundles, repeat=2):
        route = builder.between(one, other, sites)
        if route is not None:
            routes[one.name, other.name] = (route,)
    devices = []
    for bundle in bundles:
        devices.append(replace(cluster.device(bundle.devices[0]), name=bundle.name, node=bundle.name))
        devices.append(replace(devices[-1], name=f"{bundle.name}.inside"))
        inside = builder.inside(bundle)
        if inside is not None:
            routes[bundle.name, f"{bundle.name}.inside"] = (inside,)
    nodes = tuple(Node(name=device.name, devices=(device.name,)) for device in devices)
    folded = Cluster(name=cluster.name, nodes=nodes, devices=tuple(devices), links=tuple(builder.links))
    return folded.with_routes(routes)


def _sites(bundles: Sequence[Bundle]) -> dict[str, frozenset[str]]:
    """Per bundle, its nodes and those of all bundles that share nodes with it, directly or not."""
    groups: list[set[str]] = []
    for bundle in bundles:
        joined = [group for group in groups if not group.isdisjoint(bundle.nodes)]
        groups = [group for group in groups if group.isdisjoint(bundle.nodes)]
        groups.append(set(bundle.nodes).union(*joined))
    return {b.name: frozenset(next(group for group in groups if b.nodes <= group)) for b in bundles}


class _Links:
    """The links of a folded cluster, made when a route first needs them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes = {node.name: node for node in cluster.nodes}
        self.nics = {link for node in cluster.nodes for link in node.nic or ()}
        self.links: list[Link] = []
        self.known: dict[tuple[object, ...], int] = {}

    def between(self, one: Bundle, other: Bundle, sites: dict[str, frozenset[str]]) -> Route | None:
        """(1) and (3): from any node of a bundle to another node of the other."""
        ends = ((a, b) for a in one.devices for b in other.devices if self._node(a) != self._node(b))
        pair = next(ends, None)
        if pair is None:
            return None
        links = self.cluster.routes(*pair)[0].links
        out, into = sites[one.name], sites[other.name]
        folded = []
        for link in links:
            if link not in self.nics:
                folded.append(self._link(("real", link), [link]))
            elif link == links[0]:
                folded.append(self._link(("out", out), [self.nodes[n].nic[0] for n in sorted(out)]))  # type: ignore[index]
            else:
                folded.append(self._link(("in", into), [self.nodes[n].nic[1] for n in sorted(into)]))  # type: ignore[index]
        return Route("folded", tuple(folded))

    def inside(self, bundle: Bundle) -> Route | None:
        """(2)."""
        members = []
        for name in bundle.devices:
            node, at = self.cluster.node_of[name]
            if node.media:
                best = max(node.media, key=lambda medium: self.cluster.links[medium.outward[at]].bandwidth.at(0))
                members.append(best.outward[at])
        if not members:
            return None
        link = self._link(("inside", bundle.name), list(dict.fromkeys(members)))
        return Route("inside", (link,))

    def _link(self, key: tuple[object, ...], members: Iterable[int]) -> int:
        """One link with the capacity of several."""
        if key not in self.known:
            real = [self.cluster.links[member] for member in members]
            self.known[key] = len(self.links)
            self.links.append(replace(real[0], bandwidth=total(link.bandwidth for link in real)))
        return self.known[key]

    def _node(self, device: str) -> str:
        return self.cluster.device(device).node
