"""Find the bundles of a plan: equal neighbouring replicas that are simulated as one device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from argosy.cluster.topology import Cluster
from argosy.plan.plan import Plan, Replica
from argosy.schedule import ScheduleKind
from argosy.sim.tasks.known import Known

# The link number of a device that has no link to other devices of its node.
NOWHERE = -1


@dataclass(frozen=True, eq=False)
class ReplicaRun:
    """A group of equal neighbouring replicas that plans may have in common."""

    replicas: tuple[Replica, ...]
    devices: tuple[str, ...]
    """The names of the devices of all replicas."""
    nodes: frozenset[str]
    near: tuple[Replica, ...]
    """The replicas that begin in the first node."""
    outward: Mapping[str, int]
    """The link from each device to others in its node; ``NOWHERE`` if there is none."""
    inside: tuple[int, ...]
    """These links without repetitions."""


@dataclass(frozen=True, eq=False)
class Bundle:
    """A run of replicas that is simulated as one device."""

    name: str
    stage: int
    """The index of the first of its stages."""
    run: ReplicaRun

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return self.run.replicas

    @property
    def devices(self) -> tuple[str, ...]:
        return self.run.devices

    @property
    def nodes(self) -> frozenset[str]:
        return self.run.nodes


def num_workers(plan: Plan) -> int:
    """Return the number of stages with devices of their own; later stages reuse these devices."""
    chunks = plan.schedule.chunks if plan.schedule.kind is ScheduleKind.INTERLEAVED else 1
    return len(plan.stages) // chunks


def find_bundles(plan: Plan, cluster: Cluster, known: Known) -> list[Bundle]:
    """Return runs of replicas with equal devices, widths and samples, worker by worker."""
    bundles = []
    for index, stage in enumerate(plan.stages[: num_workers(plan)]):
        runs = known.of([stage.replicas], "runs", partial(_runs, stage.replicas, cluster))
        bundles += [Bundle(f"stage{index}.{at}", index, run) for at, run in enumerate(runs)]
    return bundles


def _runs(replicas: Sequence[Replica], cluster: Cluster) -> list[ReplicaRun]:
    def look(replica: Replica) -> tuple[object, ...]:
        """Return what two replicas must have in common to be equal."""
        kinds = tuple(
            (d.kind.name, d.efficiency, d.speed) for d in map(cluster.device, replica.devices)
        )
        return kinds, replica.samples, replica.ratios

    node_of, runs = cluster.node_names, []
    for _, group in itertools.groupby(replicas, key=look):
        run = tuple(group)
        devices = tuple(itertools.chain.from_iterable(replica.devices for replica in run))
        home = node_of[devices[0]]
        outward = {name: _outward(cluster, name) for name in devices}
        runs.append(
            ReplicaRun(
                replicas=run,
                devices=devices,
                nodes=frozenset(map(node_of.__getitem__, devices)),
                near=tuple(replica for replica in run if node_of[replica.devices[0]] == home),
                outward=outward,
                inside=tuple(sorted({*outward.values()})),
            )
        )
    return runs


def _outward(cluster: Cluster, device: str) -> int:
    """Return the link from a device to others in its node; ``NOWHERE`` if there is none."""
    node, at = cluster.node_of[device]
    links = [medium.outward[at] for medium in node.media]
    if len(links) == 1:
        return links[0]
    return max(links, key=lambda link: cluster.links[link].bandwidth.at(0), default=NOWHERE)


def bundles_of(plan: Plan, bundles: Sequence[Bundle], stage: int) -> list[Bundle]:
    """Return the bundles that run a stage, in the order of its replicas."""
    worker = stage % num_workers(plan)
    return [bundle for bundle in bundles if bundle.stage == worker]


def sites_of(bundles: Sequence[Bundle]) -> dict[str, frozenset[str]]:
    """Return, per bundle, its nodes and those of all bundles that share nodes with it.

    Bundles may share nodes through a third one.
    """
    groups: list[set[str]] = []
    for bundle in bundles:
        joined = [group for group in groups if not group.isdisjoint(bundle.nodes)]
        groups = [group for group in groups if group.isdisjoint(bundle.nodes)]
        groups.append(set(bundle.nodes).union(*joined))
    return {b.name: frozenset(next(group for group in groups if b.nodes <= group)) for b in bundles}
