"""What a rank does in the tests of models that one group of all devices shares: train by a plan
with one stage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from runtime.program_cases import no_search, plan_of
from support.spmd_models import BATCH, built
from torch import Tensor
from torch.utils._pytree import tree_map

from argosy.dtype import Dtype
from argosy.plan.file import dumps_plan, loads_plan
from argosy.plan.plan import ModelRef, Plan, Replica
from argosy.runtime.communication.boxes import TensorBox
from argosy.runtime.graphs.cut import GraphCut, aligned
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.sources.operations import forward_of, group_programs
from argosy.runtime.sources.sharing import sharings
from argosy.runtime.stages import tensor_stage as tensorstage
from argosy.runtime.stages.tensor_stage import Sharing, stage_graph
from argosy.runtime.step.trainer import parallelize
from argosy.solve.programs.placement import Pricing, ProgramPlacement
from argosy.solve.programs.recorded import recorded, steps_of
from argosy.solve.programs.spmd import assignment, described
from argosy.space.operations.rules import StateChoices
from argosy.space.operations.segments import chain_of_step
from argosy.workload.capture.initial import FakeModel, build_fake
from argosy.workload.capture.trace import capture_fake

STEPS, SEED = 3, 5
RATIOS = {1: (1.0,), 2: (0.7, 0.3), 3: (0.5, 0.3, 0.2)}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@cache
def fake_of(name: str, dtype: torch.dtype) -> FakeModel:
    return build_fake(built(name, dtype))


def one_stage(name: str, count: int, dtype: torch.dtype) -> Plan:
    """One group of unequal shares that runs the whole batch at once; what it does is not said."""
    fake = fake_of(name, dtype)
    chain = chain_of_step(capture_fake(fake, name=name), BATCH, Dtype.FP32)
    plan = plan_of(name, "group")
    (stage,) = plan.stages
    ratios = RATIOS[count] if count > 1 else ()
    replica = Replica(devices=("n0.0", "n0.1", "n0.2")[:count], samples=BATCH, ratios=ratios)
    stage = replace(stage, end=len(chain.layers), replicas=(replica,))
    batch = {"global_batch": BATCH, "micro_batch_size": BATCH}
    return replace(plan, model=ModelRef.of(chain), stages=(stage,), **batch)


def searched(name: str, count: int, dtype: torch.dtype = torch.float64) -> str:
    """The plan with the program that is found for its group, as a file."""
    plan = one_stage(name, count, dtype)
    return dumps_plan(replace(plan, programs=group_programs(fake_of(name, dtype), plan)))


def two_groups(name: str, dtype: torch.dtype = torch.float64) -> str:
    """Two stages, each shared by a group with ratios of its own."""
    plan = one_stage(name, 3, dtype)
    (stage,) = plan.stages
    layers = stage.end
    first = Replica(devices=("n0.0", "n0.1"), samples=BATCH // 2, ratios=(0.7, 0.3))
    second = Replica(devices=("n0.2", "n0.3"), samples=BATCH // 2, ratios=(0.4, 0.6))
    stages = (
        replace(stage, end=layers // 2, replicas=(first,)),
        replace(stage, first=layers // 2, replicas=(second,)),
    )
    content = plan.cluster.content.replace('"count": 3', '"count": 4')
    cluster = replace(plan.cluster, content=content)
    batch = {"micro_batch_size": BATCH // 2, "num_micro_batches": 2}
    plan = replace(plan, stages=stages, cluster=cluster, **batch)
    return dumps_plan(replace(plan, programs=group_programs(fake_of(name, dtype), plan)))


def random_plan(name: str, count: int, seed: int, dtype: torch.dtype = torch.float64) -> str:
    """A plan with a program that nobody would choose: the cheapest among all cuts for random
    costs."""
    plan = one_stage(name, count, dtype)
    sharing = _sharing(plan, fake_of(name, dtype))
    graph = stage_graph(sharing.cut, 0, BATCH, BATCH)
    choices = StateChoices(graph, count, whole={value for value, _ in graph.updates})
    placement = ProgramPlacement(graph, choices, Pricing(group=sharing.group), sharing.ratios)
    noise = np.random.default_rng(seed)
    costs = tuple(noise.uniform(0, 1e-2, len(cost)) for cost in placement.problem.costs)
    found = assignment(placement, replace(placement.problem, costs=costs))
    layers = [sharing.cut.layers[index] for index in sharing.cut.parts[0].operations]
    record = recorded(steps_of(described(placement, found)), layers, range(max(layers) + 1), BATCH)
    return dumps_plan(replace(plan, programs=(record,)))


def _sharing(plan: Plan, fake: FakeModel) -> Sharing:
    forward = forward_of(fake)
    assert plan.cut is not None
    assert plan.operation_layers is not None
    cut = GraphCut(forward, aligned(forward, plan.cut), 1, aligned(forward, plan.operation_layers))
    return sharings(plan, cut, devices_by_rank(plan))[0, 0]


class Trained(NamedTuple):
    """What training leaves on one rank."""

    losses: list[float]
    weights: dict[str, list[tuple[TensorBox, Tensor]]]
    """Parts of each weight that the rank holds, and where they lie in it."""
    share: float
    """Elements that the rank holds of all."""


def train(name: str, text: str, dtype: torch.dtype) -> Trained:
    """On every rank: train by a plan."""
    torch.manual_seed(SEED)
    model, loss_fn, batch = built(name, dtype)()
    total = sum(parameter.numel() for parameter in model.parameters())
    plan = loads_plan(text)
    with pytest.MonkeyPatch.context() as patch:
        if plan.programs:
            patch.setattr(tensorstage, "tensor_program", no_search)
        trainer = parallelize(model, loss_fn, optimizer, batch, plan, seed=SEED)
        losses = [trainer.step(_copy(batch)) for _ in range(STEPS)]
    weights, held = {}, 0
    for weight in trainer.held():
        weights[weight.name] = [
            (box, box.of(weight.parameter.detach()).clone()) for box in weight.boxes
        ]
        held += weight.parameter.numel()
    return Trained(losses, weights, held / total)


def alone(name: str, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights of the training loop that everybody writes."""
    torch.manual_seed(SEED)
    model, loss_fn, batch = built(name, dtype)()
    updates, losses = optimizer(model.parameters()), []
    for _ in range(STEPS):
        loss = loss_fn(model, _copy(batch))
        loss.backward()
        updates.step()
        updates.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {key: weight.detach() for key, weight in model.named_parameters()}


def _copy(batch: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
