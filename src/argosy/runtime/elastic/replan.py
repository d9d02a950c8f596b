"""A plan for who is left. Needs no torch.

Where the model's costs are known the planner searches again (level 1) on the cluster without the
devices that are not there. Where they are not, the first plan is kept as far as it goes: a stage
that has lost replicas gives their samples to the others, and the layers of a stage that has lost
them all go to the stage before it (or after, for the first). A tensor-parallel group that has lost
members goes on with the others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from argosy.cluster.lasting import with_only
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan, Replica, Stage
from argosy.plan.runnable import max_width_after
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.chain import Chain


@dataclass(frozen=True, kw_only=True)
class Replanner:
    """Finds plans for parts of a cluster."""

    first: Plan
    """What the user asked for; taken as it is while all of its devices are there."""
    cluster: Cluster
    chain: Chain | None = None
    model: ComputeModel | None = None
    """Predicts times; None for the default one."""
    is_compiled: bool = False
    """Whether stages are compiled."""

    @property
    def order(self) -> list[str]:
        """All hosts, as the cluster names them."""
        return [node.name for node in self.cluster.nodes]

    @property
    def hosts(self) -> set[str]:
        """Those of the first plan."""
        return {self.host_of(device) for device in self.first.devices}

    def host_of(self, device: str) -> str:
        return self.cluster.device(device).node

    def plan(self, devices: Collection[str]) -> Plan | None:
        """The best plan on these devices; None where none fits."""
        if set(self.first.devices) <= set(devices):
            return self.first
        if self.chain is None:
            return regrouped(self.first, devices)
        cluster = with_only(self.cluster, devices)
        max_width = max_width_after(self.first, is_compiled=self.is_compiled)
        settings = Settings(runnable=True, max_width=max_width, max_context=1, max_expert=1)
        try:
            batch = self.first.global_batch
            return find_plan(
                self.chain, cluster, global_batch=batch, settings=settings, model=self.model
            )
        except InfeasibleError:
            return None


def regrouped(plan: Plan, devices: Collection[str]) -> Plan | None:
    """The plan on those of its devices that are there."""
    if plan.schedule.kind.is_chunked:
        plan = _one_stage_per_worker(plan)
    stages: list[Stage] = []
    orphaned = 0
    for stage in plan.stages:
        here = _left_of(stage, devices)
        if here:
            shared = _shared(here, plan.micro_batch_size)
            stages.append(replace(stage, first=stage.first - orphaned, replicas=shared))
            orphaned = 0
        elif stages:
            stages[-1] = replace(stages[-1], end=stage.end)
        else:
            orphaned += stage.end - stage.first
    if not stages:
        return None
    same = len(stages) == len(plan.stages)
    schedule = plan.schedule if same else ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B)
    return replace(
        plan, stages=tuple(stages), schedule=schedule, predicted=None, certificate=None, policy=()
    )


def _one_stage_per_worker(plan: Plan) -> Plan:
    """One stage for each worker of a pipeline whose workers have several, layers cut evenly."""
    layers = plan.stages[-1].end
    count = len(plan.stages) // plan.schedule.stages_per_worker
    ends = [layers * at // count for at in range(count + 1)]
    stages = tuple(
        replace(plan.stages[at], first=ends[at], end=ends[at + 1]) for at in range(count)
    )
    return replace(plan, stages=stages, schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B))


def _left_of(stage: Stage, devices: Collection[str]) -> tuple[Replica, ...]:
    """The replicas of a stage that are whole; if none is, what is left of their tensor-parallel
    groups."""
    whole = tuple(replica for replica in stage.replicas if set(replica.devices) <= set(devices))
    if whole or stage.context > 1:
        return whole
    return tuple(
        left for replica in stage.replicas if (left := _shrunk(replica, devices)) is not None
    )


def _shrunk(replica: Replica, devices: Collection[str]) -> Replica | None:
    """A group without the members that are gone; the others do their work in proportion."""
    left = [
        (name, share)
        for name, share in zip(replica.devices, replica.shares, strict=True)
        if name in devices
    ]
    total = sum(share for _, share in left)
    if not total:
        return None
    ratios = tuple(share / total for _, share in left) if replica.ratios and len(left) > 1 else ()
    return replace(replica, devices=tuple(name for name, _ in left), ratios=ratios)


def _shared(replicas: tuple[Replica, ...], samples: int) -> tuple[Replica, ...]:
    """Every micro-batch divided as the replicas had it, no replica without a sample where there are
    enough."""
    wanted = [replica.samples for replica in replicas]
    counts = [samples * want // sum(wanted) for want in wanted]
    for _ in range(samples - sum(counts)):
        at = min(range(len(counts)), key=lambda index: (counts[index] / wanted[index], index))
        counts[at] += 1
    return tuple(
        replace(r, samples=count) for r, count in zip(replicas, counts, strict=True) if count
    )
