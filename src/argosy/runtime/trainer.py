"""``parallelize``: a model, a loss and a plan become a trainer whose steps equal those of one process.

Every rank calls it with the same arguments and then ``step`` with the same global batch. A rank keeps the weights of
its own stages; all others are let go, so the model that was passed in is used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from argosy.dtype import Dtype
from argosy.errors import InputError, Problem, RunError
from argosy.plan.plan import Plan
from argosy.runtime.batch import check_batch
from argosy.runtime.executor import Executor
from argosy.runtime.gradients import Gradients
from argosy.runtime.layers import find_layers
from argosy.runtime.measure import Recorder
from argosy.runtime.parameters import Weight, ranks_holding, weights_of
from argosy.runtime.ranks import devices_by_rank, seats_of
from argosy.runtime.scaling import LossScale
from argosy.runtime.sharding import ShardSet, WeightGate
from argosy.runtime.stage import LayerStage, LossFunction
from argosy.runtime.transport import Transport
from argosy.runtime.world import check_supported, device_of, join, open_groups
from argosy.schedule import ScheduleKind, ScheduleSpec

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_AUTOCAST = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}


def parallelize(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer_factory: OptimizerFactory,
    example_batch: Any,
    plan: Plan,
    *,
    clip_norm: float | None = None,
    shard_proportions: Callable[[int], Sequence[float]] | None = None,
) -> Trainer:
    """A trainer for this rank.

    ``loss_fn(model, batch)`` is a mean over samples; ``optimizer_factory(parameters)`` makes the optimizer of this
    rank's part. ``clip_norm`` limits the norm of the whole gradient. ``shard_proportions(stage)`` says how ZeRO
    divides rows among a stage's replicas; evenly unless given.
    """
    check_supported(plan)
    join(plan)
    check_batch(example_batch, plan)
    layers = find_layers(model)
    _check_layers(layers, plan)
    return Trainer(model, layers, loss_fn, optimizer_factory, plan, clip_norm, shard_proportions)


class Held(NamedTuple):
    """A weight of this rank as its optimizer sees it."""

    name: str
    parameter: nn.Parameter
    begin: int
    """The first row that is held."""
    shape: tuple[int, ...]
    """Of the whole weight."""


class Trainer:
    """One rank's part of a training run."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        loss_fn: LossFunction,
        optimizer_factory: OptimizerFactory,
        plan: Plan,
        clip_norm: float | None = None,
        shard_proportions: Callable[[int], Sequence[float]] | None = None,
    ) -> None:
        self.plan = plan
        self.rank = dist.get_rank()
        self.device = device_of(plan, self.rank)
        self.name = devices_by_rank(plan)[self.rank]
        self.clip_norm = clip_norm
        self.steps = 0
        self.seats = [seat for stage in seats_of(plan) for seat in stage if seat.rank == self.rank]
        self.recorder = Recorder(self.device)
        weights = weights_of(model, layers, plan)
        groups = open_groups([ranks_holding(weight, plan) for weight in weights])
        self.weights = keep_own(model, weights, [seat.stage for seat in self.seats], self.device)
        _share_initial_values(self.weights, plan, groups)
        autocast = _AUTOCAST.get(plan.model.dtype) if _is_single(self.weights) else None
        self.programs = {
            seat.stage: LayerStage(
                model,
                layers,
                loss_fn,
                first=plan.stages[seat.stage].first,
                end=plan.stages[seat.stage].end,
                recompute=plan.stages[seat.stage].recompute,
                autocast=autocast,
                device=self.device,
            )
            for seat in self.seats
        }
        self.gates: dict[int, WeightGate] = {}
        self.gradients = self._divide(groups, shard_proportions or _evenly(plan))
        self.executor = Executor(
            plan, self.rank, self.programs, Transport.open(self.device), self.recorder, self._after_gradients
        )
        self._defer_scatter()
        self.scale = LossScale(active=autocast is torch.float16)
        parameters = self.gradients.parameters()
        self.optimizer = optimizer_factory(parameters) if parameters else None

    def step(self, batch: Any) -> float:
        """Train on a global batch; the mean loss over it, on every rank."""
        check_batch(batch, self.plan)
        self.recorder.step = self.steps
        self.executor.loss_scale = self.scale.value
        losses = self.executor.step(batch)
        with self.recorder.reducing():
            self.gradients.reduce()
            loss, norm = self._agree(losses)
        finite = math.isfinite(norm)
        if not math.isfinite(loss):
            raise RunError(self._not_finite(losses.tolist(), loss))
        if finite and self.optimizer is not None:
            with self.recorder.updating():
                self._update(norm)
        self.scale.observe(finite=finite)
        self.gradients.clear()
        self.steps += 1
        return loss

    def _agree(self, losses: torch.Tensor) -> tuple[float, float]:
        """The loss and the norm of the gradient over all ranks."""
        parts = torch.stack([losses.sum(), self.gradients.square_sum(self.device)])
        dist.all_reduce(parts)
        loss, squares = parts.tolist()
        norm = math.sqrt(squares) / self.scale.value if squares >= 0 else math.nan
        if not math.isfinite(norm) and not self.scale.active and math.isfinite(loss):
            raise RunError(f"step {self.steps}: the gradient is not finite though the loss is {loss:g}")
        return loss, norm

    def _update(self, norm: float) -> None:
        factor = 1 / self.scale.value
        if self.clip_norm is not None:
            factor *= min(1.0, self.clip_norm / (norm + 1e-6))
        if factor != 1.0:
            self.gradients.scale(factor)
        assert self.optimizer is not None
        self.optimizer.step()
        self.gradients.after_update()

    def _not_finite(self, losses: list[float], loss: float) -> str:
        mine = [index for index, value in enumerate(losses) if not math.isfinite(value)]
        where = f"rank {self.rank} ({self.name})"
        seen = f", micro-batch {mine[0]} of it here" if mine else ", computed on another rank"
        return f"{where}: the loss of step {self.steps} is {loss}{seen}; the weights are those of the step before"

    def held(self) -> Iterator[Held]:
        """What this rank updates, weight by weight."""
        for _, _, weights in self.gradients.shared:
            for weight in weights:
                yield Held(weight.name, weight.parameter, 0, tuple(weight.parameter.shape))
        for shards in self.gradients.shards:
            for shard in shards.shards:
                yield Held(shard.weight.name, shard.own, shard.begin, tuple(shard.weight.parameter.shape))

    def set_schedule(self, spec: ScheduleSpec) -> None:
        """Another schedule of the same stages, from the next step on. Every rank calls this at the same step."""
        self._follow(replace(self.plan, schedule=spec))

    def set_shares(self, stage: int, samples: Sequence[int]) -> None:
        """Other shares of every micro-batch for a stage's replicas. Every rank calls this at the same step."""
        stages = list(self.plan.stages)
        if (
            len(samples) != len(stages[stage].replicas)
            or sum(samples) != self.plan.micro_batch_size
            or min(samples) < 1
        ):
            expected = f"{len(stages[stage].replicas)} counts above 0 that sum to {self.plan.micro_batch_size}"
            raise InputError([Problem(path=f"stages[{stage}].samples", found=str(tuple(samples)), expected=expected)])
        replicas = [replace(r, samples=count) for r, count in zip(stages[stage].replicas, samples, strict=True)]
        stages[stage] = replace(stages[stage], replicas=tuple(replicas))
        self._follow(replace(self.plan, stages=tuple(stages)))

    def _follow(self, plan: Plan) -> None:
        self.executor.follow(plan)
        self.plan = plan
        self._defer_scatter()

    def _defer_scatter(self) -> None:
        for gate in self.gates.values():
            gate.scatters = self.plan.schedule.kind is not ScheduleKind.ZERO_BUBBLE

    def _after_gradients(self, stage: int) -> None:
        if stage in self.gates:
            self.gates[stage].finish()

    def _divide(
        self, groups: dict[tuple[int, ...], dist.ProcessGroup], proportions: Callable[[int], Sequence[float]]
    ) -> Gradients:
        """Which weights are held whole and which in rows."""
        whole: dict[tuple[int, ...], list[Weight]] = {}
        parted: dict[int, list[Weight]] = {}
        for weight in self.weights:
            ranks = ranks_holding(weight, self.plan)
            divisible = len(weight.stages) == 1 and len(ranks) > 1 and self.plan.stages[weight.stages[0]].zero > 0
            if divisible:
                parted.setdefault(weight.stages[0], []).append(weight)
            else:
                whole.setdefault(ranks, []).append(weight)
        shards: list[ShardSet] = []
        for stage, weights in sorted(parted.items()):
            shards += self._shard(stage, weights, groups, proportions(stage), whole)
        shared = [(groups.get(ranks), ranks[0], weights) for ranks, weights in sorted(whole.items())]
        return Gradients(shared, shards, self.rank)

    def _shard(
        self,
        stage: int,
        weights: list[Weight],
        groups: dict[tuple[int, ...], dist.ProcessGroup],
        proportions: Sequence[float],
        whole: dict[tuple[int, ...], list[Weight]],
    ) -> list[ShardSet]:
        """One set for the stage, or from level 2 on one per layer; what several layers share is held whole."""
        level, ranks = self.plan.stages[stage].zero, ranks_holding(weights[0], self.plan)
        group, member = groups[ranks], ranks.index(self.rank)
        if level == 1:
            return [ShardSet(weights, level, group, member, proportions)]
        layers = self.programs[stage].layers
        users = {id(weight): [at for at, layer in enumerate(layers) if _uses(layer, weight)] for weight in weights}
        sets: list[ShardSet | None] = []
        for at in range(len(layers)):
            own = [weight for weight in weights if users[id(weight)] == [at]]
            sets.append(ShardSet(own, level, group, member, proportions) if own else None)
        common = [weight for weight in weights if len(users[id(weight)]) > 1]
        if common:
            whole.setdefault(ranks, []).extend(common)
        self.gates[stage] = WeightGate(sets)
        self.programs[stage].gate = self.gates[stage]
        return [shards for shards in sets if shards is not None]


def keep_own(
    model: nn.Module, weights: Sequence[Weight], stages: Sequence[int], device: torch.device
) -> tuple[Weight, ...]:
    """Move the weights of ``stages`` to the device and let all others go; those kept."""
    kept = []
    for weight in weights:
        mine = not set(stages).isdisjoint(weight.stages)
        data = weight.parameter.detach()
        parameter = nn.Parameter(data.to(device if mine else "meta"), requires_grad=weight.parameter.requires_grad)
        for module, name in weight.places:
            module._parameters[name] = parameter
        if mine:
            kept.append(replace(weight, parameter=parameter))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return tuple(kept)


def _share_initial_values(
    weights: Sequence[Weight], plan: Plan, groups: dict[tuple[int, ...], dist.ProcessGroup]
) -> None:
    """Everyone who holds a weight starts from the values of the first who does."""
    for weight in weights:
        ranks = ranks_holding(weight, plan)
        if ranks in groups:
            dist.broadcast(weight.parameter.data, ranks[0], group=groups[ranks])


def _check_layers(layers: Sequence[nn.Module], plan: Plan) -> None:
    end = plan.stages[-1].end
    if end != len(layers):
        expected = f"{end} layers, as in the plan for {plan.model.name}"
        raise InputError([Problem(path="model", found=f"{len(layers)} layers", expected=expected)])


def _evenly(plan: Plan) -> Callable[[int], Sequence[float]]:
    return lambda stage: [1.0] * len(plan.stages[stage].replicas)


def _is_single(weights: Sequence[Weight]) -> bool:
    return all(w.parameter.dtype is torch.float32 for w in weights if w.parameter.is_floating_point())


def _uses(layer: nn.Module, weight: Weight) -> bool:
    modules = {id(module) for module in layer.modules()}
    return any(id(module) in modules for module, _ in weight.places)
