"""A torch program in the commands: captured, planned as any model is, or shared as one program by all devices."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from argosy.cli.names import known_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

    from argosy.cli.choose import Outcome, Task
    from argosy.cli.inputs import Scenario
    from argosy.cluster.topology import Cluster
    from argosy.dtype import Dtype
    from argosy.plan.plan import Plan
    from argosy.solve.spmd import Program
    from argosy.workload.capture.forward import Forward
    from argosy.workload.chain import Chain
    from argosy.workload.graph import Graph

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp32"}
_MOST_SHARING = 16
"""Devices among which one program is looked for; above that it takes long, and its collectives rarely pay."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A program without values: its step, and the same as a chain of layers."""

    graph: Graph
    chain: Chain
    forward: Forward
    """For any number of samples."""
    samples: int
    """Of its batch, which is the global batch."""
    mixes: str | None
    """Why the batch cannot be divided; None if it can."""


def capture_program(text: str, *, dtype: str | None, quiet: bool) -> Captured:
    """Run a program's build without values, and capture its step."""
    from argosy.cli.terminal import needs, progress
    from argosy.runtime.program import load_program, split_name
    from argosy.space.segments import chain_of_step

    with needs("capturing a program needs torch", "torch"):
        from argosy.runtime.operations import forward_of, mixes_samples
        from argosy.workload.capture.initial import build_fake
        from argosy.workload.capture.trace import capture_fake, num_samples
    with progress(f"capturing {text}", quiet=quiet):
        fake = build_fake(load_program(text).build)
        graph, forward = capture_fake(fake, name=split_name(text)[0].stem), forward_of(fake)
    samples, mixes = num_samples(fake), mixes_samples(forward)
    if mixes is not None:
        reason = mixes.partition(", expected")[0]
        sys.stderr.write(f"warning: the batch is not divided, because the program mixes samples: {reason}\n")
    chain = chain_of_step(graph, samples, _dtype(graph, dtype))
    return Captured(graph=graph, chain=chain, forward=forward, samples=samples, mixes=mixes)


def _dtype(graph: Graph, named: str | None) -> Dtype:
    """The number format of matrix products: as named, or that of the largest parameter."""
    from argosy.dtype import Dtype

    if named is not None:
        return Dtype(known_name("--dtype", named, Dtype, "dtypes"))
    largest = max(graph.parameters, key=lambda value: graph.values[value].elements, default=None)
    own = DTYPES.get(graph.values[largest].dtype, "fp32") if largest is not None else "fp32"
    return Dtype(own)


def plan_captured(
    captured: Captured, task: Task, find: Callable[[Task], Outcome], *, only_time: bool = True, quiet: bool
) -> Outcome:
    """The best plan of a program. If ``only_time`` counts, not changes or money, it may be one program for all devices,
    which is faster or fits alone."""
    from argosy.cli.choose import Outcome
    from argosy.errors import NothingFitsError
    from argosy.report.program import program_to_dict

    outcome, reason = None, None
    try:
        outcome = _find_divided(captured, task, find)
    except NothingFitsError as error:
        reason = error
    program = one_program(captured, task, quiet=quiet) if only_time else None
    seconds = math.inf if program is None else program_seconds(program, captured, task)
    if program is not None and (outcome is None or seconds < _seconds(outcome.plan)):
        found = plan_of_program(program, seconds, captured, task.cluster)
        return Outcome(plan=found, beside={"program": program_to_dict(program)}, shown=tuple(_tables(program)))
    if outcome is None:
        assert reason is not None
        raise reason
    return outcome


def scenario_of_program(text: str, cluster: str | None, *, dtype: str | None, quiet: bool) -> Scenario:
    """A program's plan on a cluster, with everything that it takes to explain it."""
    from argosy.cli.choose import Outcome, Task
    from argosy.cli.inputs import Scenario
    from argosy.cli.terminal import progress
    from argosy.cluster.file import load_cluster
    from argosy.cost.compute import ComputeModel
    from argosy.errors import bad_input
    from argosy.planner import Settings, find_plan

    if cluster is None:
        raise bad_input("a cluster file or a bundled name, because a program names none", where="--cluster")
    where, captured = load_cluster(cluster), capture_program(text, dtype=dtype, quiet=quiet)
    model = ComputeModel()
    task = Task(chain=captured.chain, cluster=where, global_batch=captured.samples, settings=Settings(), model=model)

    def find(one: Task) -> Outcome:
        batch, settings = one.global_batch, one.settings
        return Outcome(plan=find_plan(one.chain, one.cluster, global_batch=batch, settings=settings, model=one.model))

    with progress(f"planning {captured.chain.name} for {where!r}", quiet=quiet):
        found = _find_divided(captured, task, find)
    return Scenario(plan=found.plan, chain=captured.chain, cluster=where, model=model)


def _seconds(plan: Plan) -> float:
    return plan.predicted.iteration_seconds if plan.predicted is not None else math.inf


def _find_divided(captured: Captured, task: Task, find: Callable[[Task], Outcome]) -> Outcome:
    """The best plan that the program can be divided by. If it cannot be divided freely, that is one without replicas,
    or the whole batch on one device."""
    from argosy.cli.choose import Outcome
    from argosy.runtime.operations import divides

    for replicas in (task.settings.replicas, 1) if captured.mixes is None else ():
        outcome = find(replace(task, settings=replace(task.settings, replicas=replicas)))
        if divides(captured.forward, outcome.plan):
            return outcome
    return Outcome(plan=_on_one_device(captured, task))


def _on_one_device(captured: Captured, task: Task) -> Plan:
    """The whole batch at once on the fastest device that has the memory for it."""
    from argosy.cluster.lasting import at_time_zero
    from argosy.cost.memory import USABLE
    from argosy.errors import NothingFitsError
    from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
    from argosy.schedule import ScheduleKind, ScheduleSpec
    from argosy.sim.prediction import play_once, prediction

    chain, samples, calm = captured.chain, captured.samples, at_time_zero(task.cluster)
    found: list[Plan] = []
    for name in {device.kind.name: device.name for device in reversed(task.cluster.devices)}.values():
        device = task.cluster.device(name)
        plan = Plan(
            model=ModelRef.of(chain),
            cluster=ClusterRef.of(task.cluster),
            global_batch=samples,
            micro_batch_size=samples,
            num_micro_batches=1,
            schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
            stages=(Stage(first=0, end=len(chain.layers), replicas=(Replica(devices=(name,), samples=samples),)),),
        )
        if device.speed.at(0.0) > 0 and task.model.can_run(chain, device):
            played = prediction(plan, play_once(plan, chain, calm, task.model, whole=True), chain)
            if dict(played.peak_memory_bytes)[name] <= USABLE * device.kind.memory:
                found.append(replace(plan, predicted=played))
    if not found:
        why = f"{captured.mixes}" if captured.mixes is not None else "its batch cannot be divided"
        raise NothingFitsError(f"no device of {task.cluster.name} holds all of {chain.name}: {why}")
    return min(found, key=_seconds)


def one_program(captured: Captured, task: Task, *, quiet: bool) -> Program | None:
    """The cheapest program over all devices (``solve.spmd``); None if none fits, or there are many devices."""
    from argosy.cli.terminal import progress
    from argosy.cluster.lasting import within_reach
    from argosy.cost.group import device_group
    from argosy.errors import InfeasibleError
    from argosy.report.program import without_rule
    from argosy.solve.placement import Pricing
    from argosy.solve.segments import find_segmented

    cluster, chain = within_reach(task.cluster), captured.chain
    there = [d.name for d in cluster.devices if d.speed.at(0.0) > 0 and task.model.can_run(chain, d)]
    if not 1 < len(there) <= _MOST_SHARING:
        return None
    told = f"sharing {len(captured.graph.nodes):,} operations between {len(there)} devices"
    try:
        with progress(told, quiet=quiet):
            group = device_group(cluster, there, chain.dtype)
            program = find_segmented(captured.graph, Pricing(group=group))
    except InfeasibleError:
        return None
    for op in program.unknown:
        sys.stderr.write(f"warning: {without_rule(op)}\n")
    return program


def program_seconds(program: Program, captured: Captured, task: Task) -> float:
    """A step of one program on the clock of plans: computing is scaled by what the whole step takes on one device as a
    chain of layers over what it takes as operations, and the update of all weights is added."""
    from argosy.cost.compute import Portion, layer_seconds, update_seconds
    from argosy.cost.group import device_group
    from argosy.plan.plan import Replica, Stage
    from argosy.solve.placement import Pricing
    from argosy.solve.spmd import find_program

    chain, name = captured.chain, max(program.group.names, key=lambda one: task.cluster.device(one).kind.memory)
    portion = Portion(device=task.cluster.device(name), samples=captured.samples)
    layers = sum(sum(layer_seconds(task.model, chain, layer, portion)) for layer in chain.layers)
    group = replace(device_group(task.cluster, [name], chain.dtype), memory=(math.inf,))
    alone = find_program(captured.graph, Pricing(group=group))
    replica = Replica(devices=(name,), samples=captured.samples)
    update = update_seconds(chain, Stage(first=0, end=len(chain.layers), replicas=(replica,)), portion)
    scaled = program.compute_seconds * layers / alone.compute_seconds
    return scaled + (program.seconds - program.compute_seconds) + update


def plan_of_program(program: Program, seconds: float, captured: Captured, cluster: Cluster) -> Plan:
    """One program over all devices as a plan of one stage: replicas by samples if every device holds all weights, else
    one tensor-parallel group with the program's ratios."""
    from argosy.plan.plan import ClusterRef, ModelRef, Plan, Predicted, Replica, Stage
    from argosy.runtime.operations import divides
    from argosy.schedule import ScheduleKind, ScheduleSpec
    from argosy.space.sharding import REPLICATED, unit_counts

    names, samples = program.group.names, captured.samples
    whole = all(program.deliveries[value].stored == REPLICATED for value in program.graph.parameters)
    group = (Replica(devices=names, samples=samples, ratios=program.ratios),)
    apart = tuple(
        Replica(devices=(name,), samples=count)
        for name, count in zip(names, unit_counts(samples, program.ratios), strict=True)
    )
    stage = Stage(first=0, end=len(captured.chain.layers), replicas=group)
    plan = Plan(
        model=ModelRef.of(captured.chain),
        cluster=ClusterRef.of(cluster),
        global_batch=samples,
        micro_batch_size=samples,
        num_micro_batches=1,
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        stages=(stage,),
        predicted=Predicted(
            iteration_seconds=seconds,
            samples_per_second=samples / seconds,
            peak_memory_bytes=tuple(zip(names, program.device_bytes, strict=True)),
            bottleneck="stage 0",
        ),
    )
    divided = replace(plan, stages=(replace(stage, replicas=apart),))
    return divided if whole and samples >= len(names) and divides(captured.forward, divided) else plan


def _tables(program: Program) -> Iterator[RenderableType]:
    """How one program shares its tensors."""
    from argosy.report.program import collective_table, parameter_table, segment_lines

    lines = segment_lines(program)
    if lines:
        yield "\n".join(lines)
    for table in (collective_table(program), parameter_table(program)):
        if table.rows:
            yield table
