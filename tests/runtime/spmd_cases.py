"""What a rank does in the tests of SPMD programs: run one found program against the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from spmd_models import built, captured
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from argosy.cost.group import DeviceGroup
from argosy.runtime.graphs.calls import run_whole, whole_tensors
from argosy.runtime.step.spmd import Trainer
from argosy.solve.programs.placement import Pricing, ProgramPlacement
from argosy.solve.programs.segments import boundaries, segments_at
from argosy.solve.programs.spmd import Program, assignment, described, find_program
from argosy.space.operations.rules import StateChoices
from argosy.space.operations.sharding import Segments
from argosy.workload.capture.initial import build_fake


def slow_group(
    count: int, *, bandwidth: float = 1e9, speeds: tuple[float, ...] | None = None
) -> DeviceGroup:
    """Devices so slow that even small models are worth sharing."""
    return DeviceGroup(
        names=tuple(f"d{rank}" for rank in range(count)),
        flops=speeds or (1e8,) * count,
        memory_bandwidths=(1e12,) * count,
        memory=(1e12,) * count,
        bandwidth=bandwidth,
        latency=0.0,
        launch=0.0,
    )


def program_for(
    name: str, ratios: tuple[float, ...], bandwidth: float, dtype: torch.dtype
) -> Program:
    """The program that is found for slow devices and a network of the given bandwidth."""
    graph = captured(name, dtype)
    return find_program(
        graph, Pricing(group=slow_group(len(ratios), bandwidth=bandwidth)), ratios=ratios
    )


def in_segments(name: str, ratios: tuple[tuple[float, ...], ...], dtype: torch.dtype) -> Segments:
    """A model's forward in as many segments as there are ratio vectors."""
    graph = captured(name, dtype)
    places = boundaries(graph)
    ends = [places[(place + 1) * len(places) // len(ratios)] for place in range(len(ratios) - 1)]
    return replace(segments_at(graph, ends, ratios[0]), ratios=ratios)


def random_program(
    name: str, ratios: tuple[float, ...] | Segments, seed: int, dtype: torch.dtype
) -> Program:
    """A program that nobody would choose: the cheapest one for random costs."""
    count = len(ratios.ratios[0] if isinstance(ratios, Segments) else ratios)
    pricing = Pricing(group=slow_group(count))
    graph = captured(name, dtype)
    placement = ProgramPlacement(graph, StateChoices(graph, count), pricing, ratios)
    noise = np.random.default_rng(seed)
    costs = tuple(noise.uniform(0, 1e-2, len(cost)) for cost in placement.problem.costs)
    return described(
        placement,
        assignment(placement, capped=False, problem=replace(placement.problem, costs=costs)),
    )


def difference(one: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the largest element."""
    return float((one.double() - other.double()).abs().max() / (1e-3 + other.double().abs().max()))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(
    programs: list[Program], dtype: torch.dtype, steps: int
) -> list[tuple[list[float], float]]:
    """Per program the worst differences of losses, gradients and parameters from one process, and
    the share held."""
    return [_train(program, dtype, steps) for program in programs]


def _train(program: Program, dtype: torch.dtype, steps: int) -> tuple[list[float], float]:
    graph = program.graph
    torch.manual_seed(11)
    model, _, batch = built(graph.name, dtype)()
    named = {
        key: tensor.detach().clone()
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    trainer = Trainer(program, named.items(), optimizer=optimizer, seed=2)
    leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(batch)[0]}
    held = whole_tensors(graph, {**named, **leaves})
    reference = {place: torch.nn.Parameter(held[place].clone()) for place in graph.parameters}
    update = optimizer(reference.values())
    worst = [0.0, 0.0, 0.0]
    for step in range(steps):
        loss, gradients, buffers = run_whole(graph, {**held, **reference}, seed=2, step=step)
        own = trainer.backward(batch)
        worst[0] = max(worst[0], abs(own - float(loss)) / abs(float(loss)))
        for place, gradient in gradients.items():
            grad = trainer.held[place].grad
            assert grad is not None
            worst[1] = max(worst[1], difference(trainer.whole(place, grad), gradient))
            reference[place].grad = gradient
        held.update(buffers)
        update.step()
        trainer.optimizer.step()
        trainer.clock.step += 1
    for place, parameter in reference.items():
        worst[2] = max(
            worst[2],
            difference(trainer.whole(place, trainer.held[place].detach()), parameter.detach()),
        )
    whole = sum(graph.values[place].elements for place in graph.parameters)
    own_elements = sum(trainer.held[place].numel() for place in graph.parameters)
    return worst, own_elements / whole


def start(name: str, program: object, seed: int) -> tuple[float, float]:
    """Share of the parameters that this rank holds, and the loss of its first step."""
    trainer = Trainer.from_build(
        program, build_fake(built(name), seed=seed), seed=seed, optimizer=torch.optim.SGD
    )
    torch.manual_seed(5)
    _, _, batch = built(name)()
    graph = trainer.program.graph
    held = sum(trainer.held[place].numel() for place in graph.parameters)
    return held / graph.num_parameters(), trainer.step(batch)
