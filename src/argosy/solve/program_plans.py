"""Plan a captured program beyond its chain of segments.

(1)  A plan divides the batch between replicas and micro-batches, which not every program
     allows. The search is repeated with groups inside nodes, and without replicas; if that does
     not help either, the whole batch runs at once.
(2)  The whole batch runs at once on one device, on all devices of a node, or on all of the
     cluster. Several devices share it as one tensor-parallel group, whose ratios are in
     proportion to speed, or from the linear programme for the program that the group executes
     (``solve.programs.ratios``), whichever is faster in the exact engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from argosy.cluster.lasting import at_time_zero
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel, Portion, layer_seconds
from argosy.cost.group import device_group
from argosy.cost.memory import USABLE
from argosy.errors import InfeasibleError, NothingFitsError
from argosy.plan.group_program import GroupProgram
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.prediction import play_once, prediction
from argosy.solve.programs.tensor_segments import group_ratios, with_tensor_groups
from argosy.solve.settings import Settings
from argosy.workload.chain import Chain
from argosy.workload.graph import Graph

# A group over several nodes has at most this many devices; more rarely pay for their collectives.
MOST_SHARING = 16


@dataclass(frozen=True, kw_only=True)
class CapturedProgram:
    """A training program that has no values: its step as a graph and as a chain of segments."""

    graph: Graph
    chain: Chain
    samples: int
    """Samples of its batch, which is the global batch."""
    captured: int
    """Samples with which the step was captured."""
    mixes: str | None
    """The reason why the batch cannot be divided; None if it can."""
    divides: Callable[[Plan], bool]
    """Return whether the replicas and micro-batches of a plan can divide the batch."""
    programs: Callable[[Plan], tuple[GroupProgram, ...]]
    """Return the programs of the tensor-parallel groups of a plan."""

    @property
    def name(self) -> str:
        return self.chain.name

    def complete(self, plan: Plan) -> Plan:
        """Return a plan for this program with the programs of its groups."""
        return replace(plan, programs=self.programs(plan))

    def on(self, cluster: Cluster) -> CapturedProgram:
        """Return the program with segments that describe how groups of this cluster's devices share
        them."""
        homes = [device.node for device in cluster.devices]
        widest = max(*(homes.count(home) for home in set(homes)), min(len(homes), MOST_SHARING))
        # Members of a group divide whole experts.
        widest = min(widest, self.graph.fewest_experts or widest)
        chain = with_tensor_groups(self.chain, self.graph, self.captured, widest)
        return replace(self, chain=chain)


def divided_plan(
    program: CapturedProgram, settings: Settings, find: Callable[[Settings], Plan]
) -> Plan | None:
    """Return the plan that ``find`` finds under the settings, or with groups inside nodes, or
    without replicas; None if the batch cannot be divided as it requires (1)."""
    if program.mixes is not None:
        return None
    plan = find(settings)
    if not program.divides(plan) and settings.may_span and settings.width is None:
        with suppress(NothingFitsError):
            plan = find(replace(settings, spanning=False))
    if not program.divides(plan):
        plan = find(replace(settings, replicas=1))
    return plan if program.divides(plan) else None


def undivided_plan(
    program: CapturedProgram, cluster: Cluster, settings: Settings, model: ComputeModel
) -> Plan:
    """Return the fastest plan that fits, keeps to the settings, and runs the whole batch at once
    (2)."""
    chain, still = program.chain, at_time_zero(cluster)
    fitting = []
    for plan in _undivided(program, cluster, model):
        width = len(plan.stages[0].devices)
        has_experts = width <= (program.graph.fewest_experts or width)
        if not has_experts or not _keeps_to(settings, plan.stages[0], cluster):
            continue
        played = prediction(plan, play_once(plan, chain, still, model, whole=True), chain)
        memory = {name: USABLE * cluster.device(name).kind.memory for name in plan.devices}
        if all(held <= memory[name] for name, held in played.peak_memory_bytes):
            fitting.append((played.iteration_seconds, replace(plan, predicted=played)))
    if not fitting:
        why = program.mixes or "its batch cannot be divided"
        raise NothingFitsError(
            f"neither a device nor a group of {cluster.name} holds all of {chain.name}: {why}"
        )
    return min(fitting, key=lambda pair: pair[0])[1]


def undivided_scope(program: CapturedProgram, cluster: Cluster) -> str:
    """Return the plans that ``undivided_plan`` simulates, as a part of the scope of a
    certificate."""
    alone = "the whole batch at once on a device"
    if program.chain.powersgd:
        return alone
    groups = "a node or all devices" if len(cluster.devices) <= MOST_SHARING else "a node"
    return f"{alone} or one group of {groups}, its ratios by speed or linear programme"


def _keeps_to(settings: Settings, stage: Stage, cluster: Cluster) -> bool:
    """Return whether the settings allow a stage of one device or of one group."""
    kinds = {cluster.device(name).kind.name for name in stage.devices}
    width = len(stage.devices)
    return (
        (settings.mixed is not False or len(kinds) == 1)
        and settings.width in (None, width)
        and width <= (settings.max_width or width)
        and {settings.replicas, settings.context, settings.expert} <= {None, 1}
        and (settings.recompute is None or stage.recompute in settings.recompute)
        and (settings.zero is None or stage.zero in settings.zero)
    )


def _undivided(program: CapturedProgram, cluster: Cluster, model: ComputeModel) -> Iterator[Plan]:
    able = [d for d in cluster.devices if d.speed.at(0.0) > 0 and model.can_run(program.chain, d)]
    for device in {member.kind.name: member for member in reversed(able)}.values():
        yield _plan(program, cluster, (device.name,), ())
    if program.chain.powersgd:
        return  # PowerSGD needs whole matrices
    widest = min(layer.max_tensor_width for layer in program.chain.layers)
    by_node: dict[str, list[str]] = {}
    for device in able:
        by_node.setdefault(device.node, []).append(device.name)
    groups = {tuple(names) for names in by_node.values()}
    groups |= {tuple(device.name for device in able)} if len(able) <= MOST_SHARING else set()
    for names in sorted(group for group in groups if 1 < len(group) <= widest):
        for ratios in dict.fromkeys(_ratios(program, cluster, names, model)):
            yield _plan(program, cluster, names, ratios)


def _ratios(
    program: CapturedProgram, cluster: Cluster, names: Sequence[str], model: ComputeModel
) -> Iterator[tuple[float, ...]]:
    portions = [Portion(device=cluster.device(name), samples=program.samples) for name in names]
    chain = program.chain
    speeds = [
        1 / sum(sum(layer_seconds(model, chain, layer, portion)) for layer in chain.layers)
        for portion in portions
    ]
    yield tuple(speed / sum(speeds) for speed in speeds)
    try:
        yield group_ratios(program.graph, device_group(cluster, names, chain.dtype))
    except InfeasibleError:
        return


def _plan(
    program: CapturedProgram, cluster: Cluster, names: tuple[str, ...], ratios: tuple[float, ...]
) -> Plan:
    replica = Replica(devices=names, samples=program.samples, ratios=ratios)
    return Plan(
        model=ModelRef.of(program.chain),
        cluster=ClusterRef.of(cluster),
        global_batch=program.samples,
        micro_batch_size=program.samples,
        num_micro_batches=1,
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        stages=(Stage(first=0, end=len(program.chain.layers), replicas=(replica,)),),
    )
