"""Turn a model, a loss and a plan into a trainer whose steps equal those of one process.

Every rank calls ``parallelize`` with the same arguments and then ``step`` with the same global
batch. A rank keeps the weights of its own stages; all others are freed, so the model that was
passed in cannot be used afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from argosy.errors import invalid
from argosy.plan.file import load_plan
from argosy.plan.plan import Plan
from argosy.runtime.communication.boxes import rows
from argosy.runtime.communication.marks import Recorder
from argosy.runtime.communication.measured import gather_timeline
from argosy.runtime.communication.transport import Transport
from argosy.runtime.processes.failure import in_contact, in_contact_beside_others
from argosy.runtime.processes.leaving import leave_at_exit, release_at_exit
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.processes.world import (
    await_device,
    check_supported,
    device_of,
    join,
    open_groups,
)
from argosy.runtime.sources.evaluating import EvaluationStages
from argosy.runtime.sources.maker import StageMaker
from argosy.runtime.sources.optimizing import (
    OptimizerFactory,
    SchedulerFactory,
    check_takes_parts,
    make_updating,
)
from argosy.runtime.sources.recipe import Recipe, autocast_for
from argosy.runtime.sources.source import LayerSource, keepings_of
from argosy.runtime.stages.compiling import check_compilable
from argosy.runtime.stages.layers import check_unwrapped
from argosy.runtime.stages.parameters import buffers_at
from argosy.runtime.stages.stage import LossFunction, StageProgram
from argosy.runtime.stages.weighing import Accumulated, Tally, weight_of
from argosy.runtime.state.behind import StateOnItsWay, open_state_group
from argosy.runtime.state.checkpoint import load, save
from argosy.runtime.state.migrate import Making, Moved, migrate
from argosy.runtime.state.state import HeldWeight, merged, trainer_state
from argosy.runtime.step.batch import check_as_captured, check_batch, filled_up
from argosy.runtime.step.evaluation import evaluate
from argosy.runtime.step.executor import Executor
from argosy.runtime.step.offloading import offloading, tensors_of
from argosy.runtime.step.scaling import LossScale, check_finite
from argosy.runtime.step.writers import Callback, StepMetrics
from argosy.runtime.weights.gate import WeightGate
from argosy.runtime.weights.gradients import Gradients
from argosy.runtime.weights.holding import (
    Proportions,
    WeightDivision,
    groups_of,
    initial_values,
    keep_buffers,
    keep_own,
    share_buffers,
)
from argosy.runtime.weights.host_state import update_weights
from argosy.schedule import ScheduleSpec
from argosy.timeline import Timeline
from argosy.workload.capture.initial import Recording


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The options of a trainer that concern its updates."""

    clip_norm: float | None = None
    """The largest norm of the whole gradient."""
    scheduler: SchedulerFactory | None = None


def parallelize(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer_factory: OptimizerFactory,
    example_batch: Any,
    plan: Plan | str | Path,
    *,
    clip_norm: float | None = None,
    recording: Recording | None = None,
    shard_proportions: Proportions | None = None,
    roster: Sequence[str] | None = None,
    cut: Sequence[int] | None = None,
    seed: int = 0,
    scheduler: SchedulerFactory | None = None,
    compile_stages: bool = False,
) -> Trainer:
    """Return a trainer for this rank, by a plan or by the file of one.

    ``loss_fn(model, batch)`` is a mean over samples, a mean over targets that are not masked, or a
    pair of any mean and its weight (``weighing``). ``optimizer_factory(parameters)`` makes the
    optimizer of this rank's part, or a pair of it and its learning-rate scheduler, which
    ``scheduler(optimizer)`` may make instead (``optimizing``). ``clip_norm`` limits the norm of the
    whole gradient. ``recording`` is the recording that the model was built under, if it has no
    values yet. ``shard_proportions(stage)`` returns how ZeRO divides rows among a stage's replicas;
    evenly unless given. ``roster`` lists the devices by rank if there are more than the plan uses:
    the others are idle until ``move`` is called with a plan that uses them. ``cut`` assigns a stage
    to every operation of the forward (``solve.programs.stagecut.cut_graph(...).stages``) if stages
    are not ranges of layers, and is the plan's own unless given; a model without layers is cut
    here. ``seed`` is that of dropout's masks. ``compile_stages`` compiles each stage into one graph
    by ``torch.compile``.
    """
    check_unwrapped(model)
    plan = load_plan(plan) if isinstance(plan, str | Path) else plan
    roster = devices_by_rank(plan) if roster is None else tuple(roster)
    _join(plan, roster, example_batch, compile_stages=compile_stages)
    recipe = Recipe(
        model=model,
        loss_fn=loss_fn,
        optimizer_factory=optimizer_factory,
        device=device_of(roster, dist.get_rank()),
        roster=roster,
        seed=seed,
        is_compiled=compile_stages,
    )
    maker = StageMaker(recipe, plan, example_batch, plan.cut if cut is None else cut, recording)
    options = TrainerOptions(clip_norm=clip_norm, scheduler=scheduler)
    return _assembled(recipe, maker, plan, shard_proportions, options)


def _join(plan: Plan, roster: Sequence[str], example_batch: Any, *, compile_stages: bool) -> None:
    """Check that a plan can be run, and join the processes of its ranks."""
    check_supported(plan)
    if compile_stages:
        check_compilable(plan)
    leave_at_exit()
    join(plan, roster)
    check_batch(example_batch, plan)


def _assembled(
    recipe: Recipe,
    maker: StageMaker,
    plan: Plan,
    shard_proportions: Proportions | None,
    options: TrainerOptions,
) -> Trainer:
    """Return the trainer of this rank: its stages, its part of the weights, and its buffers."""
    roster, device, recording, rank = recipe.roster, recipe.device, maker.recording, dist.get_rank()
    source = maker.source(plan, maker.cut)
    mine = recipe.stages_of(plan, rank)
    weights = source.weights
    keepings = keepings_of(source, plan, roster, shard_proportions)
    groups = open_groups(groups_of(weights, keepings, plan, roster), {})
    kept = keep_own(weights, keepings, rank, device, recording, initial_values(keepings, groups))
    if recording is None:
        share_buffers(
            [source.buffers([stage]) for stage in range(len(plan.stages))], plan, roster, device
        )
    places = source.buffers(mine)
    keep_buffers(places, device, recording)
    recorder = Recorder(device)
    programs = source.programs(rank, mine, groups, recorder.exchanging)
    division = WeightDivision(
        kept, keepings, programs, plan, groups, rank, roster, exchanging=recorder.exchanging
    )
    trainer = Trainer(plan, programs, division, recipe, recorder, options)
    trainer.aliases = {weight.name: weight.aliases for weight in weights if weight.aliases}
    trainer.buffers = buffers_at(recipe.model, places)
    trainer.making = Making(recipe, maker, source, keepings, groups)
    return trainer


class Trainer:
    """A trainer that runs one rank's part of a training run."""

    def __init__(
        self,
        plan: Plan,
        programs: Mapping[int, StageProgram],
        division: WeightDivision,
        recipe: Recipe,
        recorder: Recorder,
        options: TrainerOptions,
    ) -> None:
        release_at_exit(self)
        self.is_compiled = recipe.is_compiled
        self.recorder, self.device = recorder, recorder.device
        self.rank = dist.get_rank()
        self.roster = tuple(recipe.roster)
        """Devices by rank."""
        self.name = self.roster[self.rank]
        self.clip_norm = options.clip_norm
        number_format = autocast_for(plan.model.dtype, recipe.model.parameters())
        self.scale = LossScale(active=number_format is torch.float16)
        self.steps = 0
        """The number of steps done."""
        self.aliases: dict[str, tuple[str, ...]] = {}
        """Other names of tied weights, of all ranks."""
        self.buffers: dict[str, torch.Tensor] = {}
        """Buffers that this rank holds, by name."""
        self.votes: tuple[float, ...] = ()
        """Numbers that this rank sends to all others with its next step."""
        self.tally: tuple[float, ...] = ()
        """Sums of the ``votes`` of all ranks in the last step."""
        self.making: Making | None = None
        """The objects that it was made from, if it can be made again under another plan."""
        self.scheduler_factory = options.scheduler
        self.callbacks: list[Callback] = []
        """Functions that are called after every step, on every rank, with its metrics."""
        self.pending: StateOnItsWay | None = None
        """Optimizer state that the last migration has not brought yet."""
        self.state_group: dist.ProcessGroup | None = None
        self.evaluated: EvaluationStages | None = None
        """The stages of a captured program in eval mode, once it was evaluated."""
        self.accumulated: Accumulated | None = None
        """Losses and samples since the last update."""
        self.transport = Transport.open(self.device)
        recorder.contacts_on_device = self.transport.in_order
        self.take_up(plan, programs, division.gradients, division.gates, recipe.optimizer_factory)

    def take_up(
        self,
        plan: Plan,
        programs: Mapping[int, StageProgram],
        gradients: Gradients,
        gates: Mapping[int, WeightGate],
        optimizer_factory: OptimizerFactory,
    ) -> None:
        """Use a plan with these stages from the next step on; the optimizer has no state yet."""
        self.plan, self.gradients, self.gates = plan, gradients, gates
        events = gradients.events(self._after_gradients)
        activations, self.host_state = offloading(
            plan, programs, self.device, lambda: tensors_of(self.making)
        )
        self.executor = Executor(
            plan,
            self.rank,
            programs,
            self.transport,
            self.recorder,
            self.roster,
            events,
            activations,
        )
        self._follow(plan)
        self.optimizer_factory = optimizer_factory
        self._make_optimizer()

    def _make_optimizer(self) -> None:
        trained = [held for held in self.held() if held.parameter.requires_grad]
        named = [(held.name, held.parameter) for held in trained]
        self.updating = make_updating(
            self.optimizer_factory, self.scheduler_factory, named, self.steps
        )
        parts = (held.name for held in trained if held.parameter.numel() < math.prod(held.shape))
        check_takes_parts(self.optimizer, parts)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer of this rank's weights, once its state has arrived after a
        migration; None on a rank without any."""
        self.finish_migration()
        return self.updating.optimizer

    def finish_migration(self) -> None:
        """Wait for optimizer state that is still on its way to this rank or from it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.finish()

    def open_state_group(self) -> dist.ProcessGroup:
        """Return the process group of migrations, which is opened at the first call; every rank
        calls this at the same point."""
        if self.state_group is None:
            self.state_group = open_state_group(self.device)
        return self.state_group

    def begin_at(self, steps: int) -> None:
        """Continue after ``steps`` steps; a scheduler is set to that step. The state of the
        optimizer must be loaded afterwards."""
        self.steps = steps
        if self.updating.scheduler is not None:
            self._make_optimizer()

    @property
    def takes_short_batches(self) -> bool:
        """Return whether a batch may have fewer samples than the plan's: not if samples mix, nor if
        devices share operations."""
        source = None if self.making is None else self.making.source
        return source is not None and not source.undivided and not source.shares_operations

    def check_batch(self, batch: Any, *, may_be_short: bool) -> int:
        """Return the number of samples of a batch; raise an ``InputError`` if it does not fit the
        plan or the captured program."""
        if self.making is not None and not isinstance(self.making.source, LayerSource):
            check_as_captured(batch, self.making.maker.batch)
        return check_batch(batch, self.plan, may_be_short=may_be_short)

    def accumulate(self, batch: Any) -> None:
        """Add the gradients of a batch to those of the next step. Every rank calls this with the
        same batch.

        The step's loss is the mean over all samples, or over all targets that are not masked, of
        these batches together. Batches of a captured program count by their samples.
        """
        self._accumulate(batch, is_final=False)

    def _accumulate(self, batch: Any, *, is_final: bool) -> None:
        samples = self.check_batch(batch, may_be_short=self.takes_short_batches)
        if self.accumulated is None:
            self.accumulated = Accumulated()
        self.recorder.step = self.steps
        self.executor.loss_scale = self.scale.value
        with in_contact_beside_others(f"in step {self.steps}"):
            whole = filled_up(batch, samples, self.plan)
            losses = self.executor.step(
                whole, self.accumulated.tally, samples=samples, is_final=is_final
            )
        self.accumulated.losses.append(losses)
        self.accumulated.samples += samples

    def step(self, batch: Any) -> float:
        """Train on a global batch and on the accumulated ones; return the mean loss over all of
        them, on every rank."""
        self._accumulate(batch, is_final=True)
        done, self.accumulated = self.accumulated, None
        assert done is not None
        losses = torch.cat(done.losses)
        with (
            self.recorder.reducing(),
            in_contact(f"while the gradients of step {self.steps} were summed"),
        ):
            self.gradients.reduce()
            loss, norm, ratio = self._agree(losses, done.tally)
        check_finite(loss, norm, losses, self.steps, self.scale)
        self.finish_migration()
        finite = math.isfinite(norm)
        rates = self.updating.rates
        if finite and self.optimizer is not None:
            with self.recorder.updating():
                self._update(norm, ratio)
        self.scale.observe(finite=finite)
        self.gradients.clear()
        self.updating.after_step()
        self.recorder.end_step(done.begin)
        self.steps += 1
        seconds = time.perf_counter() - done.begin
        self.metrics = StepMetrics(
            self.rank, self.steps - 1, loss, seconds, done.samples, norm or None, rates
        )
        for callback in self.callbacks:
            callback(self.metrics)
        return loss

    def evaluate(self, batch: Any) -> float:
        """Return the mean loss over a batch without training on it, on every rank; dropout is off.
        Every rank calls this."""
        return evaluate(self, batch)

    def _agree(self, losses: torch.Tensor, tally: Tally) -> tuple[float, float, float]:
        """Return the loss over all ranks, the norm of the gradient if it is needed (else 0), and
        the factor by which both were multiplied as sums (``weighing``, (2))."""
        decides = self.clip_norm is not None or self.scale.active
        squares_here = self.gradients.square_sum(self.device) if decides else losses.new_zeros(())
        figures = torch.stack([losses.sum(), squares_here])
        sums = tally.sums(losses)
        votes = torch.tensor(self.votes, dtype=losses.dtype).to(losses.device, non_blocking=True)
        parts = torch.cat([figures, sums, votes])
        dist.all_reduce(parts)
        await_device(self.device, f"in step {self.steps}")
        loss, squares, *rest = parts.tolist()
        self.tally = tuple(rest[len(sums) :])
        ratio = weight_of(rest[: len(sums)], self.steps, self.plan.global_batch)
        norm = math.sqrt(squares) / (self.scale.value * ratio) if squares >= 0 else math.nan
        return loss / ratio, norm, ratio

    def _update(self, norm: float, ratio: float) -> None:
        factor = 1 / (self.scale.value * ratio)
        if self.clip_norm is not None:
            factor *= min(1.0, self.clip_norm / (norm + 1e-6))
        if factor != 1.0:
            self.gradients.scale(factor)
        assert self.optimizer is not None
        update_weights(self.optimizer, self.host_state)
        self.gradients.after_update()

    def held(self) -> Iterator[HeldWeight]:
        """Yield the weights that this rank updates; several parts of one whose rows replicas divide
        by region."""
        for weight in self.gradients.weights:
            boxes = rows(0, weight.shape) if weight.boxes is None else weight.boxes
            yield HeldWeight(weight.name, weight.parameter, weight.shape, boxes)
        for shards in self.gradients.shards:
            for shard in shards.shards:
                yield HeldWeight(shard.weight.name, shard.own, shard.weight.shape, shard.boxes)

    def timeline(self) -> Timeline | None:
        """Return the timeline of the steps since the start or the last migration on rank 0, None on
        the others. Every rank calls this."""
        sizes = self.executor.bytes_handed_on()
        return gather_timeline(self.recorder.marks, self.plan, sizes, self.device, self.roster)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's part as torch.distributed.checkpoint saves it: ``model.NAME`` and
        ``optimizer.NAME.WHAT``."""
        return merged(trainer_state(self, is_written=True))

    def save(self, folder: Path | str) -> Path:
        """Write a checkpoint that loads under any plan, or on one device; every rank calls this."""
        return save(self, Path(folder))

    def load(self, path: Path | str) -> None:
        """Continue from a checkpoint; every rank calls this."""
        load(self, Path(path))

    def move(self, plan: Plan) -> Moved:
        """Continue under another plan for the same ranks (``migrate``). Every rank calls this at
        the same step."""
        return migrate(self, plan)

    def set_schedule(self, spec: ScheduleSpec) -> None:
        """Use another schedule of the same stages from the next step on. Every rank calls this at
        the same step."""
        if spec.placement != self.plan.schedule.placement:
            expected = (
                "a schedule with the same stages per worker; "
                "interleaved and V-shaped ones have several"
            )
            raise invalid("schedule", repr(spec), expected)
        self._follow(replace(self.plan, schedule=spec))

    def set_shares(self, stage: int, samples: Sequence[int]) -> None:
        """Use other shares of every micro-batch for a stage's replicas. Every rank calls this at
        the same step."""
        stages = list(self.plan.stages)
        count, total = len(stages[stage].replicas), self.plan.micro_batch_size
        if len(samples) != count or sum(samples) != total or min(samples) < 1:
            expected = f"{count} counts above 0 that sum to {total}"
            raise invalid(f"stages[{stage}].samples", str(tuple(samples)), expected)
        replicas = [
            replace(replica, samples=count)
            for replica, count in zip(stages[stage].replicas, samples, strict=True)
        ]
        stages[stage] = replace(stages[stage], replicas=tuple(replicas))
        self._follow(replace(self.plan, stages=tuple(stages)))

    def _follow(self, plan: Plan) -> None:
        if self.is_compiled:
            check_compilable(plan)
        self.executor.follow(plan)
        self.plan = plan
        for gate in self.gates.values():
            gate.scatters = not plan.schedule.kind.is_split

    def _after_gradients(self, stage: int) -> None:
        if stage in self.gates:
            self.gates[stage].finish()
