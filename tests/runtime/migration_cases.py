"""A job that goes from plan to plan between its steps, and the same job in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from runtime.small_models import NUM_LAYERS, build
from runtime.training_cases import Outcome, box_of
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.moving import migration
from argosy.document import parse_toml
from argosy.dtype import Dtype
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.runtime.communication.boxes import HeldParts
from argosy.runtime.state.handover import Handover, Key
from argosy.runtime.state.migrate import Moved
from argosy.runtime.state.state import Rows, merged, trainer_state
from argosy.runtime.step.trainer import Trainer, parallelize
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.capture.initial import Recording
from argosy.workload.chain import Chain, Layer

BATCH = 12
ONE = ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B)
ROSTER = tuple(f"n{index // 2}.{index % 2}" for index in range(4))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A plan in short."""

    stages: tuple[Stage, ...]
    schedule: ScheduleSpec = ONE

    @property
    def micro_batch_size(self) -> int:
        return sum(replica.samples for replica in self.stages[0].replicas)


Change = Shape | ScheduleSpec | tuple[int, tuple[int, ...]]
"""A plan to move to, another schedule, or other shares of a stage."""


@dataclass(frozen=True, kw_only=True)
class Journey:
    """What happens before each step."""

    model: str = "gpt"
    tied: bool = False
    first: Shape
    changes: tuple[Change | None, ...]
    recorded: bool = False
    """Built without values, which every rank makes for itself."""


def plan_of(shape: Shape, model: str) -> Plan:
    assert shape.stages[-1].end == NUM_LAYERS.get(model, 6)
    size = shape.micro_batch_size
    return Plan(
        model=ModelRef(name=model, sequence_length=1, dtype=Dtype.FP32),
        cluster=ClusterRef.of(cluster()),
        global_batch=BATCH,
        micro_batch_size=size,
        num_micro_batches=BATCH // size,
        schedule=shape.schedule,
        stages=shape.stages,
    )


def chain_of(journey: Journey) -> Chain:
    """What the cost model is told of a model: how many weights a layer has, and whose it shares."""
    model = build_case(journey)[0]
    home: dict[int, int] = {}
    layers = []
    for index, layer in enumerate(model.argosy_layers()):
        shared = [
            weight for weight in layer.parameters() if home.setdefault(id(weight), index) != index
        ]
        count = sum(weight.numel() for weight in shared)
        layers.append(
            Layer(
                name=f"layer{index}",
                kind="layer",
                forward_flop=1.0,
                backward_flop=2.0,
                parameters=sum(weight.numel() for weight in layer.parameters()) - count,
                activation_bytes=0.0,
                output_bytes=0.0,
                tied_to=home[id(shared[0])] if shared else None,
                tied_parameters=count,
            )
        )
    return Chain(name=journey.model, layers=tuple(layers), sequence_length=1, dtype=Dtype.FP32)


@cache
def cluster() -> Cluster:
    """Two nodes of two devices."""
    nodes = '[[nodes]]\nname = "n"\ncount = 2\ndevices = { kind = "V100-32GB", count = 2 }\n'
    nodes += 'intra = [{ medium = "nvlink", bandwidth = "100 GB/s" }]\nnic = { bandwidth = "25 Gbit/s" }\n'
    return build_cluster(parse_toml(f'name = "local"\n{nodes}', file="local.toml"), folder=Path())


def predicted_bytes(journey: Journey) -> list[list[int]]:
    """Move by move, what the cost model has each rank receive, in double precision: twice the bytes
    of fp32."""
    chain, plan, moves = chain_of(journey), plan_of(journey.first, journey.model), []
    for change in journey.changes:
        if isinstance(change, Shape):
            new = plan_of(change, journey.model)
            received = migration(plan, new, chain, cluster()).received
            moves.append([2 * round(received.get(device, 0.0)) for device in ROSTER])
            plan = new
    return moves


class Counting(nn.Module):
    """A layer with buffers: one that training changes, and one of a single number."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("calls", torch.tensor(0.0))
        self.register_buffer("level", torch.zeros(3), persistent=False)

    def forward(self, x: Any) -> Any:
        if torch.is_grad_enabled():
            self.calls += 1
            self.level += torch.arange(3, device=self.level.device)
        y = self.layer(x)
        return y * self.gain + 1e-3 * self.level.sum() if isinstance(y, Tensor) else y


def build_case(journey: Journey, seed: int = 0) -> Any:
    if journey.model != "counting":
        return build(journey.model, BATCH, tied=journey.tied, dtype=torch.float64, seed=seed)
    model, loss_fn, batch = build("vit", BATCH, tied=False, dtype=torch.float64, seed=seed)
    layers = [Counting(layer) if 0 < index < 5 else layer for index, layer in enumerate(model)]
    return nn.Sequential(*layers).double(), loss_fn, batch


def batch_of(journey: Journey, step: int) -> Any:
    return build_case(journey, seed=100 + step)[2]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


Held = dict[tuple[str, str], tuple[Any, int]]
"""Which elements of the whole, and bytes of each, by name and what."""


def travel(journey: Journey) -> tuple[list[float], list[tuple[Held, Held, Moved]], Outcome, int]:
    """To be called by every rank: losses; before, after and cost of every move; weights at the end;
    steps."""
    recording = Recording() if journey.recorded else None
    if recording is None:
        model, loss_fn, batch = build_case(journey)
    else:
        batch = batch_of(journey, 0)
        with recording:
            model, loss_fn, _ = build_case(journey)
    trainer = parallelize(
        model,
        loss_fn,
        adam,
        batch,
        plan_of(journey.first, journey.model),
        recording=recording,
        roster=ROSTER,
    )
    losses, moves = [], []
    for step, change in enumerate(journey.changes):
        match change:
            case Shape():
                before = holding(trainer, model)
                moved = trainer.move(plan_of(change, journey.model))
                moves.append((before, holding(trainer, model), moved))
            case ScheduleSpec():
                trainer.set_schedule(change)
            case (stage, samples):
                trainer.set_shares(stage, samples)
        losses.append(trainer.step(batch_of(journey, step)))
    result = Outcome(losses)
    for held in trainer.held():
        for box in held.boxes:
            weight = box.of(held.parameter.detach()).clone()
            result.weights.setdefault(held.name, []).append((box.whole, weight.cpu().numpy()))
    return losses, moves, result, trainer.steps


def begin_and_move(journey: Journey, plan: Plan) -> None:
    model, loss_fn, batch = build_case(journey)
    parallelize(model, loss_fn, adam, batch, plan_of(journey.first, journey.model)).move(plan)


def holding(trainer: Trainer, model: nn.Module) -> Held:
    """Which elements are in this rank's memory: weights as modules have them, state as the
    optimizer has it."""
    found: Held = {}
    for name, value in merged(trainer_state(trainer)).items():
        kind, _, rest = name.partition(".")
        if not isinstance(value, Rows) or not value.whole:
            continue
        there = np.zeros(tuple(value.whole), dtype=bool)
        for box in (box for part in (value, *value.others) for box in part.boxes):
            there[box_of(box.whole, np.empty(box.sizes))] = True
        weight, what = (rest, "value") if kind == "model" else rest.rsplit(".", 1)
        found[weight, what] = there, value.as_subclass(Tensor).element_size()
    parts = {
        shard.weight.name: shard.weight
        for shards in trainer.gradients.shards
        for shard in shards.shards
    }
    for name, parameter in model.named_parameters():
        is_there = not parameter.is_meta and parameter.untyped_storage().nbytes() > 0
        if is_there and name in parts:
            there, _ = found[name, "value"]
            for box in parts[name].boxes or [None]:
                there[... if box is None else box_of(box.whole, np.empty(box.sizes))] = True
    return found


def alone(journey: Journey) -> Outcome:
    """The reference: one process, the same batches in the same order."""
    model, loss_fn, _ = build_case(journey)
    optimizer = adam(model.parameters())
    losses = []
    shape = journey.first
    for step, change in enumerate(journey.changes):
        shape = change if isinstance(change, Shape) else shape
        size = shape.micro_batch_size
        total = 0.0
        for index in range(BATCH // size):
            rows = slice(index * size, (index + 1) * size)
            batch = tree_map(lambda leaf, rows=rows: leaf[rows], batch_of(journey, step))
            loss = loss_fn(model, batch) * (size / BATCH)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    result = Outcome(losses)
    for name, parameter in model.named_parameters():
        result.weights[name] = [((), parameter.detach().numpy())]
    return result


def bytes_that_were_missing(before: Held, after: Held) -> int:
    """By brute force: element by element."""
    total = 0
    for key, (there, size) in after.items():
        had = before[key][0] if key in before else np.zeros_like(there)
        total += size * int((there & ~had).sum())
    return total


def group(*ranks: int, samples: int, ratios: tuple[float, ...] = ()) -> Replica:
    """A replica that a tensor-parallel group shares."""
    return Replica(devices=tuple(ROSTER[rank] for rank in ranks), samples=samples, ratios=ratios)


def spread(*stages: tuple[Any, ...], schedule: ScheduleSpec = ONE) -> Shape:
    """Stages of (layers, {rank: samples} or replicas, ZeRO level), and other fields of a stage."""
    built, first = [], 0
    for layers, members, zero, *others in stages:
        if isinstance(members, dict):
            members = [group(rank, samples=samples) for rank, samples in members.items()]
        fields = {name: value for given in others for name, value in given.items()}
        built.append(
            Stage(first=first, end=first + layers, replicas=tuple(members), zero=zero, **fields)
        )
        first += layers
    return Shape(stages=tuple(built), schedule=schedule)


def worst(outcomes: Sequence[Outcome], wanted: Outcome) -> float:
    """The largest difference of any loss or weight."""
    found = max(float(np.abs(np.subtract(one.losses, wanted.losses)).max()) for one in outcomes)
    for name, [(_, whole)] in wanted.weights.items():
        parts = [part for one in outcomes for part in one.weights.get(name, [])]
        assert parts, f"nobody holds {name}"
        for first, part in parts:
            rows = whole[box_of(first, part)]
            found = max(found, float(np.abs(part - rows).max(initial=0.0)))
    return found


def hurried(journey: Journey, folder: str) -> tuple[list[float], list[bool], list[float]]:
    """To be called by every rank: moves whose optimizer state comes late.

    After the first step, every change is a move: then a step, then two moves at once and a step,
    then a move and at once a checkpoint and a step. Returned are the losses, whether state was still
    on its way when a loss was computed, and the losses of the last step in a trainer that continues
    from the checkpoint.
    """
    run = Handover.run

    def late(self: Handover, *arguments: Any) -> dict[Key, HeldParts]:
        if threading.current_thread().name == "state":
            time.sleep(0.2)
        return run(self, *arguments)

    under_way: list[bool] = []
    model, loss_fn, batch = build_case(journey)

    def watched(model: nn.Module, batch: Any) -> Tensor:
        under_way.append(trainer.pending is not None)
        return loss_fn(model, batch)

    first = plan_of(journey.first, journey.model)
    plans = [plan_of(change, journey.model) for change in journey.changes if change]
    trainer = parallelize(model, watched, adam, batch, first, roster=ROSTER)
    with mock.patch.object(Handover, "run", late):
        losses = [trainer.step(batch_of(journey, 0))]
        under_way.clear()
        trainer.move(plans[0])
        losses.append(trainer.step(batch_of(journey, 1)))
        was_under_way = list(under_way)
        trainer.move(plans[1])
        trainer.move(plans[2])
        losses.append(trainer.step(batch_of(journey, 2)))
        trainer.move(plans[3])
        saved = trainer.save(folder)
        losses.append(trainer.step(batch_of(journey, 3)))
    other = parallelize(build_case(journey)[0], loss_fn, adam, batch, first, roster=ROSTER)
    other.load(saved)
    return losses, was_under_way, [other.step(batch_of(journey, 3))]


def broken(journey: Journey) -> None:
    """To be called by every rank: a move whose optimizer state cannot be sent."""
    model, loss_fn, batch = build_case(journey)
    trainer = parallelize(
        model, loss_fn, adam, batch, plan_of(journey.first, journey.model), roster=ROSTER
    )
    trainer.step(batch)
    run = Handover.run

    def failing(self: Handover, *arguments: Any) -> dict[Key, HeldParts]:
        if threading.current_thread().name == "state":
            raise OSError("no route")
        return run(self, *arguments)

    with mock.patch.object(Handover, "run", failing):
        change = journey.changes[0]
        assert isinstance(change, Shape)
        trainer.move(plan_of(change, journey.model))
        trainer.step(batch)
