"""Compute the gain of a change by simulating the plan with that change and nothing else.

    (1)  gain = T / T' - 1    with T and T' the seconds of the first iteration without the change
                              and with it

The gain holds for this plan; with the change, a planner might find a better one.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from argosy.cluster.host import Tier, host_bandwidth, tier_name
from argosy.cluster.topology import Cluster, HostMemory, Link, Node
from argosy.cluster.trace import Trace
from argosy.cost.compute import ComputeModel, Portion, stage_seconds
from argosy.cost.memory import USABLE
from argosy.errors import ArgosyError, InfeasibleError
from argosy.explain.load import EdgeLoad
from argosy.plan.offload import NO_OFFLOAD
from argosy.plan.plan import Plan, Recompute, Replica, Stage
from argosy.sim.simulate import simulate
from argosy.timeline import Timeline
from argosy.workload.chain import Chain

# Bytes/s that are added to an edge.
MORE_BANDWIDTH = 1e9
# The factor by which the devices of a stage become faster.
MORE_SPEED = 1.1
# The largest number of groups of edges that are tried.
_MOST_EDGES = 3


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A change, and the time that the plan would take with it."""

    change: str
    seconds: float
    """The seconds of an iteration with the change."""
    gain: float
    """The relative gain (1); negative if the plan would be slower."""
    missing: float = 0.0
    """The bytes that a device lacks, of the memory that a plan may fill; 0 if the change fits."""


def with_wider_edges(cluster: Cluster, edges: Iterable[str], more: float) -> Cluster:
    """Return the cluster with ``more`` bytes/s on every link of these edges, except while a link is
    down."""
    chosen = frozenset(edges)

    def widened(link: Link) -> Link:
        """Return a link with more bandwidth."""
        values = tuple(value + more if value > 0 else 0.0 for value in link.bandwidth.values)
        return replace(link, bandwidth=Trace(link.bandwidth.times, values))

    links = tuple(widened(link) if link.edge in chosen else link for link in cluster.links)
    nodes = tuple(
        replace(node, host_memory=_with_wider_host(cluster, node, more))
        if tier_name(node.name, Tier.HOST) in chosen
        else node
        for node in cluster.nodes
    )
    return replace(cluster, links=links, nodes=nodes)


def _with_wider_host(cluster: Cluster, node: Node, more: float) -> HostMemory:
    """Return the host memory of a node with more bandwidth."""
    return replace(node.host_memory, bandwidth=host_bandwidth(cluster, node.devices[0]) + more)


def with_faster_devices(cluster: Cluster, names: Iterable[str], factor: float) -> Cluster:
    """Return the cluster with the named devices faster by a factor."""
    chosen = frozenset(names)
    devices = [
        replace(device, efficiency=device.efficiency * factor) if device.name in chosen else device
        for device in cluster.devices
    ]
    return replace(cluster, devices=tuple(devices))


def cheaper_settings(stage: Stage) -> Iterator[tuple[str, Stage]]:
    """Yield a stage with settings that save time and cost memory, and the names of the settings.

    ZeRO 1 costs no more time than 0; 2 and 3 exchange gradients and weights with every micro-batch.
    """
    order = list(Recompute)
    for recompute in order[: order.index(stage.recompute)]:
        yield f"recompute {recompute}", replace(stage, recompute=recompute)
    for zero in range(1, stage.zero if stage.num_holders > 1 else 1):
        yield f"zero {zero}", replace(stage, zero=zero)
    if stage.offload:
        yield "no offload", replace(stage, offload=NO_OFFLOAD)
    if stage.offload.activations is not None and stage.recompute is not Recompute.FULL:
        kept = replace(stage.offload, activations=None)
        yield (
            "recompute full in place of offload",
            replace(stage, recompute=Recompute.FULL, offload=kept),
        )


def with_replica(
    plan: Plan,
    index: int,
    devices: tuple[str, ...],
    chain: Chain,
    cluster: Cluster,
    model: ComputeModel,
) -> Plan | None:
    """Return the plan with one more replica of a stage, its samples distributed by speed again.

    Returns None if there are fewer samples than replicas, or if the schedule is interleaved.
    """
    stage = plan.stages[index]
    replicas = [*stage.replicas, Replica(devices=devices, samples=1)]
    if len(replicas) > plan.micro_batch_size or plan.schedule.kind.is_chunked:
        return None
    pace = [_seconds_per_sample(chain, cluster, model, stage, replica) for replica in replicas]
    samples = [1] * len(replicas)
    for _ in range(plan.micro_batch_size - len(replicas)):
        soonest = min(range(len(replicas)), key=lambda at: ((samples[at] + 1) * pace[at], at))
        samples[soonest] += 1
    shared = tuple(
        replace(replica, samples=count) for replica, count in zip(replicas, samples, strict=True)
    )
    stages = [
        replace(other_stage, replicas=shared) if at == index else other_stage
        for at, other_stage in enumerate(plan.stages)
    ]
    left_out = tuple(left for left in plan.left_out if left.device not in devices)
    return replace(plan, stages=tuple(stages), left_out=left_out)


def _seconds_per_sample(
    chain: Chain, cluster: Cluster, model: ComputeModel, stage: Stage, replica: Replica
) -> float:
    """Return the seconds of one sample on the slowest device of a replica."""
    portions = [
        Portion(device=cluster.device(name), samples=1, share=share, width=replica.width)
        for name, share in replica.members
    ]
    return max(sum(stage_seconds(model, chain, stage, portion)) for portion in portions)


def first_iteration(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> Timeline:
    """Simulate the first iteration of a plan; raise ``InfeasibleError`` if it never ends."""
    timeline = simulate(plan, chain, cluster, model=model)
    if not timeline.iteration_ends:
        raise InfeasibleError(
            f"{plan.model.name} on {cluster.name}: no iteration ends, because {timeline.stalled}"
        )
    return timeline


class Question:
    """A plan on its cluster that can be simulated with changes."""

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        cluster: Cluster,
        model: ComputeModel,
        timeline: Timeline | None = None,
    ) -> None:
        """Use ``timeline`` as the first iteration of the unchanged plan, or simulate it."""
        self.plan = plan
        self.chain = chain
        self.cluster = cluster
        self.model = model
        self.timeline = timeline or first_iteration(plan, chain, cluster, model)

    def _what_if(
        self, change: str, *, plan: Plan | None = None, cluster: Cluster | None = None
    ) -> WhatIf:
        """Simulate a changed plan or cluster."""
        where = cluster or self.cluster
        timeline = first_iteration(plan or self.plan, self.chain, where, self.model)
        seconds = timeline.iteration_ends[0]
        gain = self.timeline.iteration_ends[0] / seconds - 1
        # A faster cluster needs no more memory.
        peaks = timeline.peak_memory().items() if plan is not None else ()
        lacks = [held - USABLE * where.device(name).kind.memory for name, held in peaks]
        return WhatIf(change=change, seconds=seconds, gain=gain, missing=max(0.0, *lacks, 0.0))

    def faster_stages(self, stages: Iterable[int]) -> Iterator[WhatIf]:
        """Yield the gains of faster devices in some stages."""
        for stage in sorted(stages):
            faster = with_faster_devices(self.cluster, self.plan.stages[stage].devices, MORE_SPEED)
            yield self._what_if(f"10 % more speed of stage {stage}'s devices", cluster=faster)

    def wider_edges(self, loads: Sequence[EdgeLoad]) -> Iterator[WhatIf]:
        """Yield the gains of more bandwidth on the busiest edges.

        Edges of one kind that are equally busy are widened together, because one alone would not
        help.
        """
        by_kind_and_load: dict[tuple[str, float], list[str]] = defaultdict(list)
        for load in loads:
            by_kind_and_load[load.edge.rpartition(".")[2], round(load.utilisation, 2)].append(
                load.edge
            )
        for edges in list(by_kind_and_load.values())[:_MOST_EDGES]:
            wider = with_wider_edges(self.cluster, edges, MORE_BANDWIDTH)
            others = f" and {len(edges) - 1} like it" if len(edges) > 1 else ""
            yield self._what_if(f"1 GB/s more on {edges[0]}{others}", cluster=wider)

    def settings(self, slowest: int) -> Iterator[WhatIf]:
        """Yield the gains of faster settings of the bottleneck, and of all stages that have
        them."""
        everywhere: dict[str, list[Stage]] = {}
        for index, stage in enumerate(self.plan.stages):
            for name, cheaper in cheaper_settings(stage):
                stages = everywhere.setdefault(name, list(self.plan.stages))
                stages[index] = cheaper
                if index == slowest:
                    alone = [
                        cheaper if at == index else unchanged
                        for at, unchanged in enumerate(self.plan.stages)
                    ]
                    yield self._what_if(
                        f"{name} in stage {index}", plan=replace(self.plan, stages=tuple(alone))
                    )
        for name, stages in everywhere.items():
            changed = [
                at
                for at, (new, old) in enumerate(zip(stages, self.plan.stages, strict=True))
                if new != old
            ]
            if changed != [slowest]:
                where = (
                    f"stage {changed[0]}"
                    if len(changed) == 1
                    else f"stages {', '.join(map(str, changed))}"
                )
                yield self._what_if(
                    f"{name} in {where}", plan=replace(self.plan, stages=tuple(stages))
                )

    def additions(self, stage: int) -> Iterator[WhatIf]:
        """Yield the gains of left-out devices, one group of each kind, as a further replica of a
        stage."""
        width = self.plan.stages[stage].replicas[0].width
        idle: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for left in self.plan.left_out:
            device = self.cluster.device(left.device)
            idle[device.kind.name][device.node].append(device.name)
        for nodes in idle.values():
            group = next(
                (tuple(names[:width]) for names in nodes.values() if len(names) >= width), ()
            )
            # There may be no route or no such dtype; the planner's own reason reports it.
            with contextlib.suppress(ArgosyError):
                plan = (
                    with_replica(self.plan, stage, group, self.chain, self.cluster, self.model)
                    if group
                    else None
                )
                if plan is not None:
                    yield self._what_if(
                        f"{', '.join(group)} as a further replica of stage {stage}", plan=plan
                    )
