"""Plan for the remaining devices. Needs no torch.

If the model's costs are known, the planner searches again (level 1) on the cluster without the
missing devices. Otherwise the first plan is kept as far as possible: a stage that has lost replicas
gives their samples to the others, and the layers of a stage that has lost them all go to the stage
before it (or after, for the first). A tensor-parallel group that has lost members continues with
the others, and so do devices that share a sequence or experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from argosy.cluster.lasting import with_only
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan, Replica, Stage
from argosy.plan.runnable import splits_after
from argosy.planner import find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.solve.settings import continuing
from argosy.workload.chain import Chain


@dataclass(frozen=True, kw_only=True)
class Replanner:
    """A planner that finds plans for parts of a cluster."""

    first: Plan
    """The plan that the user gave, which is used unchanged while all of its devices are present."""
    cluster: Cluster
    chain: Chain | None = None
    model: ComputeModel | None = None
    """The model that predicts times; None for the default one."""
    is_compiled: bool = False
    """True if stages are compiled."""

    @property
    def order(self) -> list[str]:
        """Return the names of all hosts, in the order of the cluster."""
        return [node.name for node in self.cluster.nodes]

    @property
    def hosts(self) -> set[str]:
        """Return the hosts of the first plan."""
        return {self.host_of(device) for device in self.first.devices}

    def host_of(self, device: str) -> str:
        return self.cluster.device(device).node

    def plan(self, devices: Collection[str]) -> Plan | None:
        """Return the best plan on these devices; None if none fits."""
        if set(self.first.devices) <= set(devices):
            return self.first
        if self.chain is None:
            return regrouped(self.first, devices)
        cluster = with_only(self.cluster, devices)
        settings = continuing(splits_after(self.first, is_compiled=self.is_compiled))
        try:
            batch = self.first.global_batch
            return find_plan(
                self.chain, cluster, global_batch=batch, settings=settings, model=self.model
            )
        except InfeasibleError:
            return None


def regrouped(plan: Plan, devices: Collection[str]) -> Plan | None:
    """Return the plan on its present devices; None if there are none."""
    if plan.schedule.kind.is_chunked:
        plan = _one_stage_per_worker(plan)
    stages: list[Stage] = []
    orphaned = 0
    for stage in plan.stages:
        here = _left_of(stage, devices)
        if here:
            shared = _shared(here, plan.micro_batch_size)
            left = _with_replicas(stage, shared, plan.micro_batch_size)
            stages.append(replace(left, first=stage.first - orphaned))
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
    """Return a plan with one stage for each worker, in place of several, and layers cut evenly."""
    layers = plan.stages[-1].end
    count = len(plan.stages) // plan.schedule.stages_per_worker
    ends = [layers * at // count for at in range(count + 1)]
    stages = tuple(
        replace(plan.stages[at], first=ends[at], end=ends[at + 1]) for at in range(count)
    )
    return replace(plan, stages=stages, schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B))


def _left_of(stage: Stage, devices: Collection[str]) -> tuple[Replica, ...]:
    """Return the replicas of a stage that are whole; if none is, the remaining parts of their
    groups, and of replicas that share sequences or experts only those with the most devices."""
    whole = tuple(replica for replica in stage.replicas if set(replica.devices) <= set(devices))
    if whole:
        return whole
    parts = [left for replica in stage.replicas if (left := _shrunk(replica, devices)) is not None]
    widest = max((replica.width for replica in parts), default=0)
    is_alone = stage.context == stage.expert == 1
    return tuple(part for part in parts if is_alone or part.width == widest)


def _with_replicas(stage: Stage, replicas: tuple[Replica, ...], samples: int) -> Stage:
    """Return a stage with other replicas: experts over as many holders as before, or over all of
    them if there are fewer or their number does not divide, and parts of the sequence as before,
    or as many as each replica has devices if no replica is whole."""
    is_whole = {replica.devices for replica in replicas} <= {r.devices for r in stage.replicas}
    context = stage.context if stage.context == 1 or is_whole else replicas[0].width
    counts = range(len(replicas), 0, -1)
    full = next((count for count in counts if count * context % stage.expert == 0), 0)
    if full:
        kept = replicas if full == len(replicas) else _shared(replicas[:full], samples)
        return replace(stage, replicas=kept, context=context)
    holders = len(replicas) * context
    return replace(stage, replicas=replicas, context=context, expert=holders, experts=())


def _shrunk(replica: Replica, devices: Collection[str]) -> Replica | None:
    """Return a group without its missing members; the others do their work in proportion."""
    left = [(name, share) for name, share in replica.members if name in devices]
    total = sum(share for _, share in left)
    if not total:
        return None
    ratios = tuple(share / total for _, share in left) if replica.ratios and len(left) > 1 else ()
    return replace(replica, devices=tuple(name for name, _ in left), ratios=ratios)


def _shared(replicas: tuple[Replica, ...], samples: int) -> tuple[Replica, ...]:
    """Divide every micro-batch as the replicas had it; no replica is without a sample if there are
    enough."""
    wanted = [replica.samples for replica in replicas]
    counts = [samples * want // sum(wanted) for want in wanted]
    for _ in range(samples - sum(counts)):
        at = min(range(len(counts)), key=lambda index: (counts[index] / wanted[index], index))
        counts[at] += 1
    return tuple(
        replace(replica, samples=count)
        for replica, count in zip(replicas, counts, strict=True)
        if count
    )
