"""From one plan to another between two steps: what changes hands goes from rank to rank, and everything else stays.

``trainer.move(plan)`` or ``migrate(trainer, plan)``, called by every rank after the same step:

    (1)  the plan is for the same model and global batch, on devices of the run's roster; ranks without one are idle
    (2)  weights, optimizer state and buffers: a rank receives what it holds under the new plan and did not under the
         old one (``rows``), in waves, and lets go of what it no longer holds
    (3)  stages, gradient groups and the optimizer are made anew around the tensors; groups that exist are used again

Steps and loss scale are the same on all ranks and stay; batches are a function of the step, so the data goes on where
it was. ``Moved`` says what it took. A rank that is lost on the way leaves the others without a trainer: go on from a
checkpoint then.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.errors import InputError, Problem
from argosy.plan.plan import Plan
from argosy.plan.runnable import check_movable
from argosy.runtime.collectives import offsets
from argosy.runtime.failure import in_contact
from argosy.runtime.handover import About, Handover, HeldRows, Key
from argosy.runtime.holding import Division, Keeping, groups_of, keeping
from argosy.runtime.parameters import Weight, buffers_at
from argosy.runtime.ranks import seats_of
from argosy.runtime.recipe import Recipe
from argosy.runtime.rows import Interval, Piece, moves_between, waves
from argosy.runtime.source import StageSource
from argosy.runtime.summing import Groups
from argosy.runtime.world import check_supported, gather_texts, open_groups

if TYPE_CHECKING:
    from argosy.runtime.trainer import Trainer

VALUE = "value"
BUFFER = "buffer"


class Making(NamedTuple):
    """How a trainer was made: what a migration starts from."""

    recipe: Recipe
    source: StageSource
    keepings: Mapping[str, Keeping]
    groups: Groups


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What a migration took, as this rank saw it."""

    seconds: float
    sent: int
    """Bytes."""
    received: int
    predicted: int
    """Bytes that this rank was to receive."""
    total: int
    """Bytes over all ranks, as predicted."""


def migrate(trainer: Trainer, plan: Plan) -> Moved:
    """(1) to (3)."""
    begin = time.perf_counter()
    making = _checked(trainer, plan)
    recipe, source = making.recipe, making.source.under(plan)
    weights = source.weights
    keepings = {
        weight.name: keeping(weight, source.num_users, plan, recipe.roster, None, trainer.rank) for weight in weights
    }
    before, after = _buffer_ranks(recipe, making.source, trainer.plan), _buffer_ranks(recipe, source, plan)
    groups = open_groups(groups_of(weights, plan, recipe.roster), making.groups)
    old = _held(trainer, making, weights, before)
    about = _shared_description(trainer, weights, old)
    pieces = list(_pieces(weights, making.keepings, keepings, about.tensors))
    pieces += _buffer_pieces(before, after, about.tensors)
    moves = moves_between(pieces, recipe.roster)
    carrier = torch.device("cpu") if trainer.transport.staged else trainer.device
    handover = Handover(trainer.rank, trainer.device, carrier, about.tensors)
    new: dict[Key, HeldRows] = {}
    kept: list[Weight] = []
    by_name = {weight.name: weight for weight in weights}
    for some, under_way in waves(pieces, moves):
        new |= handover.run(some, under_way, old)
        for name in dict.fromkeys(piece.name for piece in some if piece.name in by_name):
            kept += _install(by_name[name], keepings[name], new.get((name, VALUE)), trainer.rank)
    _install_buffers(trainer, before, after, new, about)
    rows = {name: piece.tensor for (name, what), piece in new.items() if what == VALUE and keepings[name].level == 3}
    exchanging, mine = trainer.recorder.exchanging, recipe.stages_of(plan, trainer.rank)
    programs = source.programs(trainer.rank, mine, groups, exchanging)
    division = Division(kept, keepings, programs, plan, groups, trainer.rank, recipe.roster, rows, exchanging)
    trainer.gradients.close()
    trainer.take_up(plan, programs, division.gradients, division.gates, recipe.optimizer_factory)
    _give_state(trainer, new, about)
    trainer.buffers = buffers_at(recipe.model, source.buffers(mine))
    trainer.making = Making(recipe, source, keepings, groups)
    trainer.recorder.marks.clear()
    with in_contact("at the end of a migration"):
        dist.barrier()
    return Moved(
        seconds=time.perf_counter() - begin,
        sent=handover.sent,
        received=handover.received,
        predicted=sum(move.bytes for move in moves if move.target == trainer.rank),
        total=sum(move.bytes for move in moves),
    )


def _checked(trainer: Trainer, plan: Plan) -> Making:
    """(1)."""
    making = trainer.making
    assert making is not None, "set by parallelize"
    strangers = [device for device in plan.devices if device not in making.recipe.roster]
    problems = []
    if strangers:
        expected = f"devices of the run: {', '.join(making.recipe.roster)}"
        problems.append(Problem(path="plan", found=strangers[0], expected=expected))
    if plan.global_batch != trainer.plan.global_batch:
        expected = f"{trainer.plan.global_batch}, as before"
        problems.append(Problem(path="plan.global_batch", found=str(plan.global_batch), expected=expected))
    if problems:
        raise InputError(problems)
    check_supported(plan)
    check_movable(trainer.plan)
    check_movable(plan)
    return making


def _held(
    trainer: Trainer, making: Making, weights: Sequence[Weight], buffers: Mapping[str, _Buffer]
) -> dict[Key, HeldRows]:
    """What this rank holds now; the old optimizer's state is handed over."""
    whole = {weight.name: weight.parameter for weight in weights}
    found: dict[Key, HeldRows] = {}
    for held in trainer.held():
        in_rows = making.keepings[held.name].level == 3
        value = HeldRows(held.parameter.data, held.begin) if in_rows else HeldRows(whole[held.name].data, 0)
        found[held.name, VALUE] = value
        state = trainer.optimizer.state.pop(held.parameter, {}) if trainer.optimizer is not None else {}
        for what, state_value in state.items():
            same = isinstance(state_value, Tensor) and state_value.shape == held.parameter.shape
            found[held.name, what] = HeldRows(state_value, held.begin if same else 0)
    for path, buffer in buffers.items():
        if trainer.rank in buffer.ranks and buffer.tensor is not None:
            found[path, BUFFER] = HeldRows(buffer.tensor, 0)
    return found


class _Buffer(NamedTuple):
    """A buffer of the model, and the ranks that hold it under a plan."""

    module: nn.Module
    name: str
    ranks: frozenset[int]

    @property
    def tensor(self) -> Tensor | None:
        return self.module._buffers[self.name]


def _buffer_ranks(recipe: Recipe, source: StageSource, plan: Plan) -> dict[str, _Buffer]:
    """By path in the model."""
    paths = {id(module): path for path, module in recipe.model.named_modules()}
    found: dict[str, _Buffer] = {}
    for index, seats in enumerate(seats_of(plan, recipe.roster)):
        for at, (module, name) in enumerate(source.buffers([index])):
            path = f"{paths.get(id(module), f'module {at} of stage {index}')}.{name}"
            before = found[path].ranks if path in found else frozenset[int]()
            found[path] = _Buffer(module, name, before | {seat.rank for seat in seats})
    return found


class _Described(NamedTuple):
    """What all ranks hold together."""

    tensors: Mapping[Key, About]
    """Weights, state and buffers."""
    values: Mapping[Key, Any]
    """State and buffers of one number, such as counts: they travel with the description."""
    options: Sequence[Mapping[str, Any]]
    """Of the optimizer, by group of parameters."""


def _shared_description(trainer: Trainer, weights: Sequence[Weight], old: Mapping[Key, HeldRows]) -> _Described:
    """Everyone tells of what he holds."""
    shapes = {held.name: (held.shape, tuple(held.parameter.shape)) for held in trainer.held()}
    own: dict[str, list[Any]] = {"tensors": [], "values": [], "options": []}
    for key, (tensor, _) in old.items():
        if key[1] == VALUE:
            continue
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            dtype = _name_of(tensor.dtype) if isinstance(tensor, Tensor) else None
            own["values"].append([key, dtype, tensor.item() if isinstance(tensor, Tensor) else tensor])
            continue
        whole, part = shapes.get(key[0], ((), ()))
        by_rows = tuple(tensor.shape) == part
        own["tensors"].append([key, whole if by_rows else tuple(tensor.shape), _name_of(tensor.dtype), by_rows])
    if trainer.optimizer is not None:
        own["options"] = [_options(group) for group in trainer.optimizer.param_groups]
    with in_contact("at the beginning of a migration"):
        gathered = [json.loads(text) for text in gather_texts(json.dumps(own), trainer.device)]
    tensors: dict[Key, About] = {}
    values: dict[Key, Any] = {}
    for told in gathered:
        for (name, what), shape, dtype, by_rows in told["tensors"]:
            tensors.setdefault((name, what), About(tuple(shape), _dtype(dtype), by_rows))
        for (name, what), dtype, value in told["values"]:
            values.setdefault((name, what), value if dtype is None else torch.tensor(value, dtype=_dtype(dtype)))
    for weight in weights:
        tensors[weight.name, VALUE] = About(tuple(weight.parameter.shape), weight.parameter.dtype, by_rows=True)
    return _Described(tensors, values, next((told["options"] for told in gathered if told["options"]), []))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The plain settings of a group of parameters."""
    plain = (bool, int, float, str, list, tuple, type(None))
    return {name: value for name, value in group.items() if name != "params" and isinstance(value, plain)}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _pieces(
    weights: Sequence[Weight],
    before: Mapping[str, Keeping],
    after: Mapping[str, Keeping],
    tensors: Mapping[Key, About],
) -> Iterator[Piece]:
    """Weight by weight: its values and its optimizer's state."""
    found = _by_name(tensors)
    for name in (weight.name for weight in weights):
        for what, told in found[name]:
            old, new = (_intervals(keep[name], told, value=what == VALUE) for keep in (before, after))
            yield Piece(name=name, what=what, row_bytes=_row_bytes(told), before=old, after=new)


def _by_name(tensors: Mapping[Key, About]) -> dict[str, list[tuple[str, About]]]:
    found: dict[str, list[tuple[str, About]]] = {}
    for (name, what), told in sorted(tensors.items()):
        found.setdefault(name, []).append((what, told))
    return found


def _num_rows(told: About) -> int:
    return told.shape[0] if told.shape else 1


def _row_bytes(told: About) -> int:
    return torch.Size(told.shape).numel() * told.dtype.itemsize // max(1, _num_rows(told))


def _intervals(keep: Keeping, told: About, *, value: bool) -> dict[int, Interval]:
    if not told.by_rows or keep.level == 0 or (value and keep.level < 3):
        return dict.fromkeys(keep.ranks, (0, _num_rows(told)))
    begins = offsets(list(keep.sizes))
    return {rank: (begin, begin + size) for rank, begin, size in zip(keep.ranks, begins, keep.sizes, strict=True)}


def _buffer_pieces(
    before: Mapping[str, _Buffer], after: Mapping[str, _Buffer], tensors: Mapping[Key, About]
) -> Iterator[Piece]:
    for path in dict.fromkeys((*before, *after)):
        if (path, BUFFER) in tensors:
            told = tensors[path, BUFFER]
            old, new = (
                dict.fromkeys(sorted(buffers[path].ranks) if path in buffers else (), (0, _num_rows(told)))
                for buffers in (before, after)
            )
            yield Piece(name=path, what=BUFFER, row_bytes=_row_bytes(told), before=old, after=new)


def _install(weight: Weight, keep: Keeping, value: HeldRows | None, rank: int) -> list[Weight]:
    """Put a weight where its modules find it, if this rank holds it now; let go of what it held before."""
    before = weight.parameter
    if value is None:
        data = before.detach().to("meta")
    elif keep.level == 3:
        data = torch.empty(before.shape, dtype=before.dtype, device=value.tensor.device)
        data.untyped_storage().resize_(0)
    else:
        data = value.tensor
    parameter = nn.Parameter(data, requires_grad=before.requires_grad)
    for module, name in weight.places:
        module._parameters[name] = parameter
    if not before.is_meta and (value is None or keep.level == 3):
        before.data = before.data.new_empty(0)  # the old gradient groups still know it
    return [] if rank not in keep.ranks else [replace(weight, parameter=parameter)]


def _install_buffers(
    trainer: Trainer,
    before: Mapping[str, _Buffer],
    after: Mapping[str, _Buffer],
    new: Mapping[Key, HeldRows],
    about: _Described,
) -> None:
    """Those that this rank holds now; the others are let go of."""
    for path, buffer in (*before.items(), *after.items()):
        key, module, name = (path, BUFFER), buffer.module, buffer.name
        if path in after and trainer.rank in after[path].ranks:
            if key in new or key in about.values:
                module._buffers[name] = new[key].tensor if key in new else about.values[key].to(trainer.device)
        elif buffer.tensor is not None:
            module._buffers[name] = buffer.tensor.to("meta")


def _give_state(trainer: Trainer, new: Mapping[Key, HeldRows], about: _Described) -> None:
    """The new optimizer goes on where the old ones stopped."""
    if trainer.optimizer is None:
        return
    for group, options in zip(trainer.optimizer.param_groups, about.options, strict=False):
        group |= {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    states: dict[str, dict[str, Any]] = {}
    for name, what in about.tensors:
        if (name, what) in new and what != VALUE:
            states.setdefault(name, {})[what] = new[name, what].tensor
    on_device = any(options.get("fused") or options.get("capturable") for options in about.options)
    for (name, what), value in about.values.items():
        moved = value.to(trainer.device) if on_device and isinstance(value, Tensor) else value
        states.setdefault(name, {})[what] = moved
    for held in trainer.held():
        if held.name in states:
            trainer.optimizer.state[held.parameter] = states[held.name]
