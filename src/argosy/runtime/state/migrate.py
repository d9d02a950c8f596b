"""Migrate from one plan to another between two steps: ranks send each other what changes place, and
everything else stays.

Every rank calls ``trainer.move(plan)`` or ``migrate(trainer, plan)`` after the same step:

    (1)  the plan is for the same model and global batch, on devices of the run's roster; ranks
         without one are idle
    (2)  weights, optimizer state and buffers: a rank receives what it holds under the new plan and
         did not under the old one (``moves``), in waves, and frees what it no longer holds; parts
         of tensor-parallel groups are regions of the whole like any other
    (3)  stages, gradient groups and the optimizer are made again around the tensors; existing
         groups are reused
    (4)  optimizer state arrives while the next step computes (``behind``)

Steps and loss scale are equal on all ranks and stay; batches are a function of the step, so the
data continues where it was. ``Moved`` contains the seconds and bytes. If a rank is lost before the
state has arrived, the others have no valid trainer and must continue from a checkpoint.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.cost.regions import Region
from argosy.errors import Problem, invalid, raise_any
from argosy.plan.plan import Plan
from argosy.plan.runnable import check_movable
from argosy.runtime.communication.boxes import Boxes, HeldPart, HeldParts, rows
from argosy.runtime.processes.failure import in_contact
from argosy.runtime.processes.ranks import seats_of
from argosy.runtime.processes.world import check_supported, open_groups
from argosy.runtime.sources.maker import StageMaker
from argosy.runtime.sources.recipe import Recipe
from argosy.runtime.sources.source import StageSource, keepings_of
from argosy.runtime.stages.compiling import check_compilable
from argosy.runtime.stages.parameters import Weight, buffers_at
from argosy.runtime.state.behind import StateOnItsWay, has_room, used_here
from argosy.runtime.state.described import BUFFER, VALUE, Described, shared_description
from argosy.runtime.state.handover import About, Handover, Key
from argosy.runtime.state.moves import HeldPiece, RegionMove, moves_between, waves
from argosy.runtime.weights.holding import Keeping, WeightDivision, groups_of, kept_weight
from argosy.runtime.weights.summing import Groups

if TYPE_CHECKING:
    from argosy.runtime.step.trainer import Trainer


class Making(NamedTuple):
    """The objects that a trainer was made from, which a migration starts from."""

    recipe: Recipe
    maker: StageMaker
    source: StageSource
    keepings: Mapping[str, Keeping]
    groups: Groups


@dataclass(kw_only=True)
class Moved:
    """The seconds and bytes that a migration took on this rank; those of optimizer state are added
    when it has arrived."""

    seconds: float
    """Seconds of the migration, and those that the next step waited for optimizer state."""
    sent: int
    """Bytes that this rank sent."""
    received: int
    predicted: int
    """Bytes that this rank was predicted to receive."""
    total: int
    """Bytes over all ranks, as predicted."""


def migrate(trainer: Trainer, plan: Plan) -> Moved:
    """Migrate a trainer to another plan by (1) to (4)."""
    begin = time.perf_counter()
    trainer.finish_migration()
    making = _checked(trainer, plan)
    recipe, source, rank = making.recipe, making.maker.moved(plan), trainer.rank
    weights = [weight for weight in source.weights if weight.name in making.keepings]
    keepings = keepings_of(source, plan, recipe.roster)
    before = _buffer_ranks(recipe, making.source, trainer.plan)
    after = _buffer_ranks(recipe, source, plan)
    groups = open_groups(groups_of(weights, keepings, plan, recipe.roster), making.groups)
    old = _held(trainer, making, weights, before)
    about = shared_description(trainer, weights, old)
    _check_state(about.tensors, making.keepings, keepings)
    if trainer.optimizer is not None:
        trainer.optimizer.state.clear()
    was = _where(weights, making.keepings, before, about.tensors)
    will_be = _where(weights, keepings, after, about.tensors)
    pieces = [
        _piece(key, tensor, was[key], will_be[key])
        for key, tensor in _ordered(about.tensors, weights)
    ]
    exchange = _Exchange(
        trainer=trainer,
        about=about,
        pieces=pieces,
        moves=moves_between(pieces, recipe.roster),
        old=old,
        boxes={key: held[rank] for key, held in will_be.items() if rank in held},
    )
    handover = exchange.handover()
    new, kept = exchange.run_weights(handover, weights, keepings)
    _install_buffers(trainer, before, after, new, about)
    _take_up(trainer, plan, Making(recipe, making.maker, source, keepings, groups), kept, new)
    _give_options(trainer, about)
    trainer.recorder.marks.clear()
    with in_contact("at the end of a migration"):
        dist.barrier()
    moved = Moved(
        seconds=time.perf_counter() - begin,
        sent=handover.sent,
        received=handover.received,
        predicted=sum(move.bytes for move in exchange.moves if move.target == rank),
        total=sum(move.bytes for move in exchange.moves),
    )
    exchange.begin_state(moved)
    return moved


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """The exchange of a migration as one rank does it, from what it holds to what it will hold."""

    trainer: Trainer
    about: Described
    pieces: Sequence[HeldPiece]
    moves: Sequence[RegionMove]
    old: dict[Key, HeldParts]
    boxes: Mapping[Key, Boxes]

    def handover(self) -> Handover:
        trainer = self.trainer
        carrier = torch.device("cpu") if trainer.transport.staged else trainer.device
        return Handover(
            trainer.rank, trainer.device, carrier, self.about.tensors, trainer.open_state_group()
        )

    def _waves(self, *, of_state: bool) -> Iterator[tuple[list[HeldPiece], list[RegionMove]]]:
        """Yield the waves of optimizer state, or those of weights and buffers."""
        return waves(
            [piece for piece in self.pieces if _is_state(piece.what) is of_state],
            [move for move in self.moves if _is_state(move.piece.what) is of_state],
        )

    def run_weights(
        self, handover: Handover, weights: Sequence[Weight], keepings: Mapping[str, Keeping]
    ) -> tuple[dict[Key, HeldParts], list[Weight]]:
        """Exchange weights and buffers; return this rank's parts of them, and the weights that it
        holds, which are installed."""
        new: dict[Key, HeldParts] = {}
        kept: list[Weight] = []
        by_name = {weight.name: weight for weight in weights}
        for wave, wave_moves in self._waves(of_state=False):
            new |= handover.run(wave, wave_moves, self.old, self.boxes)
            for name in dict.fromkeys(piece.name for piece in wave if piece.name in by_name):
                value = new.get((name, VALUE))
                kept += _install(by_name[name], keepings[name], value, self.trainer.rank)
        return new, kept

    def begin_state(self, moved: Moved) -> None:
        """Begin to exchange optimizer state; the new optimizer gets it when it has arrived (4)."""
        trainer, handover = self.trainer, self.handover()
        state_waves = list(self._waves(of_state=True))
        new: dict[Key, HeldParts] = {}

        def run() -> None:
            used_here(self.old)
            for wave, wave_moves in state_waves:
                new.update(handover.run(wave, wave_moves, self.old, self.boxes))

        def take() -> None:
            used_here(new)
            _give_state(trainer, new, self.about)
            moved.seconds += pending.waited
            moved.sent += handover.sent
            moved.received += handover.received

        trainer.pending = pending = StateOnItsWay(run, take, trainer.device)
        if not has_room(trainer.plan, trainer.name, trainer.device, self._arriving_state()):
            trainer.finish_migration()

    def _arriving_state(self) -> int:
        """Return the bytes of optimizer state that this rank holds under the new plan."""
        return sum(
            math.prod(box.sizes) * self.about.tensors[key].dtype.itemsize
            for key, held in self.boxes.items()
            if _is_state(key[1])
            for box in itertools.chain(*held)
        )


def _is_state(what: str) -> bool:
    """Return whether a piece is optimizer state."""
    return what not in (VALUE, BUFFER)


def _take_up(
    trainer: Trainer,
    plan: Plan,
    making: Making,
    kept: Sequence[Weight],
    new: Mapping[Key, HeldParts],
) -> None:
    """Give a trainer the programs of a plan, with the weights that this rank now holds."""
    recipe, keepings, rank = making.recipe, making.keepings, trainer.rank
    own_rows = {
        name: [part.tensor for part in held.parts]
        for (name, entry), held in new.items()
        if entry == VALUE and keepings[name].level == 3
    }
    exchanging, mine = trainer.recorder.exchanging, recipe.stages_of(plan, rank)
    programs = making.source.programs(rank, mine, making.groups, exchanging)
    division = WeightDivision(
        kept, keepings, programs, plan, making.groups, rank, recipe.roster, own_rows, exchanging
    )
    trainer.gradients.close()
    trainer.take_up(plan, programs, division.gradients, division.gates, recipe.optimizer_factory)
    trainer.buffers = buffers_at(recipe.model, making.source.buffers(mine))
    trainer.making = making


def _checked(trainer: Trainer, plan: Plan) -> Making:
    """Raise an ``InputError`` unless a plan fulfils (1); return what the trainer was made from."""
    making = trainer.making
    assert making is not None, "set by parallelize"
    strangers = [device for device in plan.devices if device not in making.recipe.roster]
    problems = []
    if strangers:
        expected = f"devices of the run: {', '.join(making.recipe.roster)}"
        problems.append(Problem("plan", strangers[0], expected))
    if plan.global_batch != trainer.plan.global_batch:
        expected = f"{trainer.plan.global_batch}, as before"
        problems.append(Problem("plan.global_batch", str(plan.global_batch), expected))
    raise_any(problems)
    check_movable(trainer.plan)
    check_movable(plan)
    check_supported(plan)
    if making.recipe.is_compiled:
        check_compilable(plan)
    return making


def _held(
    trainer: Trainer, making: Making, weights: Sequence[Weight], buffers: Mapping[str, _Buffer]
) -> dict[Key, HeldParts]:
    """Return what this rank holds now, including the optimizer's state."""
    installed = {weight.name: weight.installed for weight in weights}
    parts_by_key: dict[Key, list[HeldPart]] = {}
    for held in trainer.held():
        keep = making.keepings[held.name]
        if keep.level == 3 or held.name not in installed:
            parts_by_key.setdefault((held.name, VALUE), []).append(
                HeldPart(held.parameter.data, held.boxes)
            )
        else:
            (boxes,) = keep.kept(trainer.rank, value=True)
            parts_by_key[held.name, VALUE] = [HeldPart(installed[held.name].data, boxes)]
        state = {} if trainer.optimizer is None else trainer.optimizer.state.get(held.parameter, {})
        for entry, state_value in state.items():
            same = isinstance(state_value, Tensor) and state_value.shape == held.parameter.shape
            boxes = held.boxes if same else rows(0, getattr(state_value, "shape", ()))
            parts_by_key.setdefault((held.name, entry), []).append(HeldPart(state_value, boxes))
    for path, buffer in buffers.items():
        if trainer.rank in buffer.ranks and buffer.tensor is not None:
            parts_by_key[path, BUFFER] = [HeldPart(buffer.tensor, rows(0, buffer.tensor.shape))]
    return {key: HeldParts(tuple(parts)) for key, parts in parts_by_key.items()}


class _Buffer(NamedTuple):
    """A buffer of the model, and the ranks that hold it under a plan."""

    module: nn.Module
    name: str
    ranks: frozenset[int]

    @property
    def tensor(self) -> Tensor | None:
        return self.module._buffers[self.name]


def _buffer_ranks(recipe: Recipe, source: StageSource, plan: Plan) -> dict[str, _Buffer]:
    """Return the buffers of a plan's stages by their path in the model."""
    paths = {id(module): path for path, module in recipe.model.named_modules()}
    buffers: dict[str, _Buffer] = {}
    for index, seats in enumerate(seats_of(plan, recipe.roster)):
        for at, (module, name) in enumerate(source.buffers([index])):
            path = f"{paths.get(id(module), f'module {at} of stage {index}')}.{name}"
            before = buffers[path].ranks if path in buffers else frozenset[int]()
            buffers[path] = _Buffer(module, name, before | {seat.rank for seat in seats})
    return buffers


def _check_state(
    tensors: Mapping[Key, About], before: Mapping[str, Keeping], after: Mapping[str, Keeping]
) -> None:
    """Raise an ``InputError`` if an optimizer has state that cannot be divided as its weight is,
    since it would not be valid for parts of the weight. This is raised equally on every rank,
    before anything has changed."""
    for (name, entry), tensor in sorted(tensors.items()):
        divided = [plan[name] for plan in (before, after) if name in plan and plan[name].is_divided]
        if entry != BUFFER and divided and not tensor.like_weight:
            actual = f"state {entry} of shape {tensor.shape}"
            expected = (
                "state of the weight's own shape, because a plan divides the weight between ranks"
            )
            raise invalid(name, actual, expected)


def _ordered(
    tensors: Mapping[Key, About], weights: Sequence[Weight]
) -> Iterator[tuple[Key, About]]:
    """Yield tensors weight by weight, values and optimizer state; then buffers."""
    order = {weight.name: at for at, weight in enumerate(weights)}
    known = [key for key in tensors if key[0] in order or key[1] == BUFFER]
    for key in sorted(known, key=lambda key: (order.get(key[0], len(order)), key)):
        yield key, tensors[key]


def _where(
    weights: Sequence[Weight],
    keepings: Mapping[str, Keeping],
    buffers: Mapping[str, _Buffer],
    tensors: Mapping[Key, About],
) -> dict[Key, dict[int, Boxes]]:
    """Return, by tensor and rank, the boxes that are held under a plan."""
    boxes: dict[Key, dict[int, Boxes]] = {}
    names = {weight.name for weight in weights}
    for (name, entry), tensor in tensors.items():
        all_of_it = (rows(0, tensor.shape),)
        if entry == BUFFER:
            ranks = buffers[name].ranks if name in buffers else frozenset[int]()
            boxes[name, entry] = dict.fromkeys(sorted(ranks), all_of_it)
        elif name in names:
            keep, is_value = keepings[name], entry == VALUE
            boxes[name, entry] = {
                rank: keep.kept(rank, value=is_value) if tensor.like_weight else all_of_it
                for rank in keep.ranks
            }
    return boxes


def _piece(
    key: Key, tensor: About, before: Mapping[int, Boxes], after: Mapping[int, Boxes]
) -> HeldPiece:
    old, new = ({rank: _regions(boxes) for rank, boxes in held.items()} for held in (before, after))
    return HeldPiece(
        name=key[0], what=key[1], item_bytes=tensor.dtype.itemsize, before=old, after=new
    )


def _regions(boxes: Boxes) -> list[Region]:
    return [box.region for of_tensor in boxes for box in of_tensor]


def _install(weight: Weight, keep: Keeping, value: HeldParts | None, rank: int) -> list[Weight]:
    """Install a weight in its modules if this rank holds it now, and free what it held before."""
    before = weight.installed
    if value is None:
        weight.install(weight.parameter)
        kept = []
    else:
        part = value.parts[0]
        if keep.level == 3:
            part = HeldPart.empty(
                keep.held[rank], dtype=part.tensor.dtype, device=part.tensor.device
            )
            part.tensor.untyped_storage().resize_(0)
        kept = [kept_weight(weight, part)]
    if not before.is_meta and (value is None or keep.level == 3):
        before.data = before.data.new_empty(0)  # the old gradient groups still refer to it
    return kept


def _install_buffers(
    trainer: Trainer,
    before: Mapping[str, _Buffer],
    after: Mapping[str, _Buffer],
    new: Mapping[Key, HeldParts],
    about: Described,
) -> None:
    """Install the buffers that this rank holds now, and free the others."""
    for path, buffer in (*before.items(), *after.items()):
        key, module, name = (path, BUFFER), buffer.module, buffer.name
        if path in after and trainer.rank in after[path].ranks:
            if key in new or key in about.values:
                module._buffers[name] = (
                    new[key].parts[0].tensor if key in new else about.values[key].to(trainer.device)
                )
        elif buffer.tensor is not None:
            module._buffers[name] = buffer.tensor.to("meta")


def _give_options(trainer: Trainer, about: Described) -> None:
    """Give the new optimizer the options of the old ones."""
    if trainer.optimizer is None:
        return
    for group, options in zip(trainer.optimizer.param_groups, about.options, strict=False):
        group |= {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in options.items()
        }


def _give_state(trainer: Trainer, new: Mapping[Key, HeldParts], about: Described) -> None:
    """Give the new optimizer the state of the old ones."""
    if trainer.optimizer is None:
        return
    states: dict[str, dict[str, list[Any]]] = {}
    for name, entry in about.tensors:
        if (name, entry) in new and entry != VALUE:
            states.setdefault(name, {})[entry] = [part.tensor for part in new[name, entry].parts]
    for (name, entry), value in about.values.items():
        states.setdefault(name, {})[entry] = [value]
    seen: dict[str, int] = {}
    for held in trainer.held():
        at = seen[held.name] = seen.get(held.name, -1) + 1
        if held.name in states:
            state = {
                entry: values[min(at, len(values) - 1)]
                for entry, values in states[held.name].items()
            }
            trainer.optimizer.state[held.parameter] = {
                entry: value.clone()
                if at and isinstance(value, Tensor) and not value.dim()
                else value
                for entry, value in state.items()
            }
