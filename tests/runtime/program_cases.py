"""Training a program of the lists in one process and, by several plans, on three unequal ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime import (
    attacking_programs,  # noqa: F401 (registers its programs)
    gradient_programs,  # noqa: F401 (registers its programs)
    library_programs,
    model_programs,  # noqa: F401 (registers its programs)
    odd_programs,  # noqa: F401 (registers its programs)
    routed_programs,  # noqa: F401 (registers its programs)
    stranger_programs,  # noqa: F401 (registers its programs)
)
from runtime.own_programs import BATCH, PROGRAMS
from torch import Tensor
from torch.utils._pytree import tree_map

from argosy.cluster.file import cluster_from_content
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.plan.file import dumps_plan, loads_plan
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Recompute, Replica, Stage
from argosy.planner import CapturedProgram, find_plan
from argosy.runtime.sources.operations import capture_program
from argosy.runtime.stages import tensor_stage as tensorstage
from argosy.runtime.step.trainer import parallelize
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.solve.programs.stagecut import cut_graph
from argosy.workload.capture.initial import Recording, run_build
from argosy.workload.capture.trace import capture
from argosy.workload.chain import Chain
from argosy.workload.graph import Phase

STEPS, SEED = 3, 3
CLUSTER = json.dumps(
    {
        "name": "local",
        "nodes": [
            {
                "name": "n",
                "devices": [{"kind": "V100-32GB", "count": 3}],
                "intra": [{"medium": "nvlink", "bandwidth": "150 GB/s", "latency": "3 us"}],
                "nic": {"bandwidth": "25 Gbit/s", "latency": "20 us"},
            }
        ],
    }
)
UNEQUAL = json.dumps(
    {
        "name": "unequal",
        "nodes": [
            {
                "name": "n",
                "devices": [{"kind": kind, "count": 1} for kind in ("V100-32GB", "T4", "P100")],
            }
            | {
                "intra": [{"medium": "pcie", "bandwidth": "12 GB/s", "latency": "5 us"}],
                "nic": {"bandwidth": "25 Gbit/s", "latency": "20 us"},
            }
        ],
    }
)
WAYS = ("replicas", "stages")


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def prepared(name: str) -> None:
    if name == "gpt2_from_pretrained":
        library_programs.pretrained()


def alone(name: str, steps: int = STEPS) -> list[float]:
    """The losses of the training loop that everybody writes."""
    torch.set_default_dtype(torch.float64)
    prepared(name)
    torch.manual_seed(SEED)
    model, loss_fn, batch = PROGRAMS[name]()
    updates, losses = optimizer([p for p in model.parameters() if p.requires_grad]), []
    for _ in range(steps):
        given = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
        loss = loss_fn(model, given)
        loss.backward()
        updates.step()
        updates.zero_grad()
        losses.append(float(loss.detach()))
    torch.set_default_dtype(torch.float32)
    return losses


def plan_of(name: str, way: str) -> Plan:
    one, two, three = "n0.0", "n0.1", "n0.2"
    count, ratios = 1, ()
    if way == "replicas":
        count, stages = 1, [[((one,), 3), ((two,), 2), ((three,), 1)]]
    elif way == "stages":
        count, stages = 2, [[((one,), 2), ((two,), 1)], [((three,), 3)]]
    elif way == "alone":
        stages = [[((one,), BATCH)]]
    else:
        stages, ratios = [[((one, two, three), BATCH)]], (0.5, 0.3, 0.2)
    return Plan(
        model=ModelRef(name=name, sequence_length=1, dtype=Dtype.FP32),
        cluster=ClusterRef(name="local", hash="", content=CLUSTER),
        global_batch=BATCH,
        micro_batch_size=BATCH // count,
        num_micro_batches=count,
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        stages=tuple(
            Stage(
                first=index,
                end=index + 1,
                replicas=tuple(
                    Replica(devices=names, samples=n, ratios=ratios) for names, n in replicas
                ),
            )
            for index, replicas in enumerate(stages)
        ),
    )


def cut_of(name: str, way: str) -> tuple[int, ...]:
    """As a planner would cut the captured step."""
    graph = capture(PROGRAMS[name])
    count = sum(node.phase is Phase.FORWARD for node in graph.nodes)
    return cut_graph(graph, (0.4, 0.6)).stages if way == "stages" else (0,) * count


def captured(name: str) -> CapturedProgram:
    return capture_program(PROGRAMS[name], name=name)


def plan_for(name: str, way: str) -> str:
    """A plan of segments as a file: what the planner finds on three unequal devices, one that saves
    memory, or one group of all devices."""
    torch.set_default_dtype(torch.float64)
    try:
        program = captured(name)
        if way == "planned":
            return dumps_plan(find_plan(program, cluster_from_content(UNEQUAL)))
        if way == "group":
            return dumps_plan(grouped(program))
        return dumps_plan(_saving(program.chain))
    finally:
        torch.set_default_dtype(torch.float32)


def grouped(program: CapturedProgram) -> Plan:
    """One group of three unequal shares, with what it does."""
    plan = plan_of(program.name, "group")
    (stage,) = plan.stages
    stage = replace(stage, end=len(program.chain.layers))
    return program.complete(replace(plan, model=ModelRef.of(program.chain), stages=(stage,)))


def no_search(*_: Any, **__: Any) -> None:
    raise AssertionError("a program was searched although the plan has it")


def _saving(chain: Chain) -> Plan:
    """Replicas that shard weights and recompute everything, before a stage that recomputes what is
    cheap."""
    plan, end = plan_of(chain.name, "stages"), len(chain.layers)
    middle = max(1, end // 2)
    bounds, how = ((0, middle), (middle, end)), ((Recompute.FULL, 3), (Recompute.SELECTIVE, 0))
    if end == 1:
        bounds, how = ((0, 1),), ((Recompute.FULL, 3),)
    stages = tuple(
        replace(stage, first=first, end=last, recompute=recompute, zero=zero)
        for stage, (first, last), (recompute, zero) in zip(plan.stages, bounds, how, strict=False)
    )
    return replace(plan, model=ModelRef.of(chain), stages=stages)


def plans_of_a_journey(name: str) -> list[str]:
    """From a pipeline that saves memory over a tensor-parallel group and replicas with sharded
    state to a pipeline."""
    torch.set_default_dtype(torch.float64)
    try:
        chain = captured(name).chain
    finally:
        torch.set_default_dtype(torch.float32)
    first = _saving(chain)
    whole = plan_of(name, "replicas")
    (stage,) = whole.stages
    wide = replace(
        whole, model=ModelRef.of(chain), stages=(replace(stage, end=len(chain.layers), zero=2),)
    )
    pipeline = first.stages
    ends = (max(1, len(chain.layers) - 1), len(chain.layers))
    moved = tuple(
        replace(stage, first=begin, end=end, zero=0, recompute=Recompute.NONE, replicas=replicas)
        for stage, begin, end, replicas in zip(
            pipeline,
            (0, ends[0]),
            ends,
            (
                (Replica(devices=("n0.2",), samples=3),),
                (Replica(devices=("n0.1",), samples=1), Replica(devices=("n0.0",), samples=2)),
            ),
            strict=False,
        )
    )
    group = Replica(devices=("n0.0", "n0.1"), samples=first.micro_batch_size, ratios=(0.7, 0.3))
    shared = replace(pipeline[0], zero=0, recompute=Recompute.NONE, replicas=(group,))
    grouped = replace(first, stages=(shared, *pipeline[1:]))
    return [dumps_plan(plan) for plan in (first, grouped, wide, replace(first, stages=moved))]


def sharing_experts(name: str) -> str:
    """Three replicas that share the experts of every layer."""
    torch.set_default_dtype(torch.float64)
    try:
        chain = captured(name).chain
    finally:
        torch.set_default_dtype(torch.float32)
    plan = plan_of(name, "replicas")
    (stage,) = plan.stages
    stage = replace(stage, end=len(chain.layers), expert=3, experts=(2, 1, 1), zero=1)
    return dumps_plan(replace(plan, model=ModelRef.of(chain), stages=(stage,)))


def travel(name: str, plans: list[str]) -> list[float]:
    """On every rank: two steps by each plan; the losses."""
    torch.set_default_dtype(torch.float64)
    try:
        first, *others = map(loads_plan, plans)
        torch.manual_seed(SEED)
        recording = Recording()
        model, loss_fn, batch = run_build(PROGRAMS[name], recording)
        batch = tree_map(
            lambda leaf: recording.materialise([leaf])[0] if isinstance(leaf, Tensor) else leaf,
            batch,
        )
        trainer = parallelize(
            model, loss_fn, optimizer, batch, first, recording=recording, seed=SEED
        )
        losses = [trainer.step(batch), trainer.step(batch)]
        for plan in others:
            trainer.move(plan)
            losses += [trainer.step(batch), trainer.step(batch)]
        return losses
    finally:
        torch.set_default_dtype(torch.float32)


def train(name: str, way: str, plan: str | None = None) -> tuple[str, Any]:
    """On every rank: ("losses", them) or ("refused", why)."""
    torch.set_default_dtype(torch.float64)
    try:
        prepared(name)
        chosen = plan_of(name, way) if plan is None else loads_plan(plan)
        cut = cut_of(name, way) if plan is None else chosen.cut
        torch.manual_seed(SEED)
        recording = Recording()
        model, loss_fn, batch = run_build(PROGRAMS[name], recording)
        batch = tree_map(
            lambda leaf: recording.materialise([leaf])[0] if isinstance(leaf, Tensor) else leaf,
            batch,
        )
        options: dict[str, Any] = {"recording": recording, "seed": SEED, "cut": cut}
        with pytest.MonkeyPatch.context() as patch:
            if chosen.programs:
                patch.setattr(tensorstage, "tensor_program", no_search)
            trainer = parallelize(model, loss_fn, optimizer, batch, chosen, **options)
            return "losses", [trainer.step(batch) for _ in range(STEPS)]
    except InputError as error:
        dist.barrier()  # a rank that leaves early would look like one that crashed
        return "refused", str(error)
    finally:
        torch.set_default_dtype(torch.float32)
