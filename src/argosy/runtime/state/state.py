"""Describe what a rank holds: weights, buffers and optimizer state, each with its name and its
place in the whole tensor.

    model.NAME            a weight or a buffer
    optimizer.NAME.WHAT   a tensor of a weight's state; ``WHAT:int`` and the like for a number
    powersgd.WHAT.NAME    what sums by PowerSGD keep of a weight from step to step (``powersgd``)

Checkpoints and copies in other hosts' memory are lists of these (``trainer_state``), and a trainer
takes its part of them back under any plan (``take_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from argosy.cost.regions import Region, overlap
from argosy.runtime.communication.boxes import HeldPart, TensorBox, rows

if TYPE_CHECKING:
    from argosy.runtime.step.trainer import Trainer

_NUMBERS = (bool, int, float)
"""Types of numbers that an optimizer may keep beside tensors; such a number is listed as a tensor
with its type after its name: ``step:int``."""


class HeldWeight(NamedTuple):
    """A weight of this rank as its optimizer sees it."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    """The shape of the whole weight."""
    boxes: tuple[TensorBox, ...]
    """The boxes of the part in the whole weight."""


class Rows(torch.Tensor):
    """Rows or boxes of a weight, with the methods that torch.distributed.checkpoint calls."""

    boxes: tuple[TensorBox, ...]
    whole: torch.Size
    others: tuple[Rows, ...] = ()
    """Other parts of the same weight that this rank holds, as tensors of their own."""

    def on_host(self) -> Rows:
        """Return a copy in host memory, which training does not change."""
        copy = Rows.of(
            self.as_subclass(torch.Tensor).to("cpu", copy=True), self.boxes, tuple(self.whole)
        )
        copy.others = tuple(part.on_host() for part in self.others)
        return copy

    @staticmethod
    def of(tensor: Tensor, boxes: tuple[TensorBox, ...], whole: tuple[int, ...]) -> Rows:
        part: Rows = torch.Tensor._make_subclass(Rows, tensor.detach())
        part.boxes, part.whole = boxes, torch.Size(whole)
        return part

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def size(self, dim: int | None = None) -> Any:
        """Return the size of the whole weight, which is compared with the checkpoint's."""
        return self.whole if dim is None else self.whole[dim]

    def _filled(self) -> list[TensorBox]:
        return [box for part in parts_of(self) for box in part.boxes if all(box.sizes)]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.as_subclass(torch.Tensor))
        items = []
        for box in self._filled():
            data = TensorWriteData(chunk=_chunk(box), properties=properties, size=self.whole)
            index = MetadataIndex(name, torch.Size(box.whole))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._filled()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        filled = ((part, box) for part in parts_of(self) for box in part.boxes if all(box.sizes))
        part, box = next(
            (part, box)
            for part, box in filled
            if index.offset is None or torch.Size(box.whole) == index.offset
        )
        return box.of(part.tensor)


def parts_of(held: Tensor) -> list[HeldPart]:
    """Return the parts that are held of an entry of ``trainer_state``, tensor by tensor."""
    plain = held.as_subclass(torch.Tensor)
    if not isinstance(held, Rows):
        return [HeldPart(plain, rows(0, plain.shape))]
    return [
        HeldPart(plain, held.boxes),
        *(part for more in held.others for part in parts_of(more)),
    ]


def merged(entries: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return entries by name; if there are several parts of one, the first refers to the others."""
    by_name: dict[str, Tensor] = {}
    for name, value in entries:
        first = by_name.setdefault(name, value)
        if first is not value and isinstance(first, Rows) and isinstance(value, Rows):
            first.others = (*first.others, value)
    return by_name


def _chunk(box: TensorBox) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.whole), sizes=torch.Size(box.sizes))


class Stored(NamedTuple):
    """The shape and dtype of a whole tensor that is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def trainer_state(trainer: Trainer, *, is_written: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield what this rank holds: ``model.NAME``, ``optimizer.NAME.WHAT`` and
    ``powersgd.WHAT.NAME``, part by part (``merged``).

    With ``is_written``, leave out regions that an earlier rank writes into a checkpoint.
    """
    for name, buffer in trainer.buffers.items():
        yield f"model.{name}", buffer
    for held in trainer.held():
        if is_written:
            held = held._replace(boxes=_written_boxes(trainer, held))
        yield f"model.{held.name}", Rows.of(held.parameter, held.boxes, held.shape)
        for key, value in _optimizer_state(trainer, held).items():
            yield f"optimizer.{held.name}.{key}", _like(held, value)
    for gradient_sum in trainer.gradients.factored:
        yield from gradient_sum.state()


def _written_boxes(trainer: Trainer, held: HeldWeight) -> tuple[TensorBox, ...]:
    """Return the boxes that this rank writes.

    Parts of ranks are equal or disjoint, except for a tied weight that two stages cut at different
    ratios: the chunks of a checkpoint may not overlap, so the first holder of a region writes it.
    """
    assert trainer.making is not None, "a trainer that saves was made by parallelize"
    keep = trainer.making.keepings[held.name]
    overlaps = any(ranks != keep.sharers(ranks[0]) for ranks in keep.sums)
    if keep.level or not overlaps:
        return held.boxes
    rank = dist.get_rank()
    regions = [region for ranks in keep.sums if ranks[0] == rank for region in keep.sums[ranks]]
    pairs = ((box, overlap(box.region, region)) for box in held.boxes for region in regions)
    return tuple(_inside(box, common) for box, common in pairs if common is not None)


def _inside(box: TensorBox, region: Region) -> TensorBox:
    """Return the box of a region that lies in another box."""
    begins = [int(begin) for begin, _ in region]
    shifts = [begin - place for begin, place in zip(begins, box.whole, strict=True)]
    return TensorBox(
        whole=tuple(begins),
        local=tuple(place + shift for place, shift in zip(box.local, shifts, strict=True)),
        sizes=tuple(int(end - begin) for begin, end in region),
    )


def _optimizer_state(trainer: Trainer, held: HeldWeight) -> Mapping[str, Tensor]:
    if trainer.optimizer is None:
        return {}
    state = trainer.optimizer.state.get(held.parameter, {})
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    numbers = {key: value for key, value in state.items() if type(value) in _NUMBERS}
    return tensors | {
        f"{key}:{type(value).__name__}": torch.tensor(value) for key, value in numbers.items()
    }


def _give_state(trainer: Trainer, held: HeldWeight, key: str, value: Tensor) -> None:
    """Give an optimizer a tensor of state, or the number that the tensor was made from."""
    assert trainer.optimizer is not None
    name, _, kind = key.partition(":")
    number = next((number for number in _NUMBERS if number.__name__ == kind), None)
    trainer.optimizer.state[held.parameter][name] = (
        value if number is None else number(value.item())
    )


def _like(held: HeldWeight, value: Tensor) -> Tensor:
    """Return state of the weight's own shape divided as the weight is, and any other state, such as
    a count, as it is."""
    return Rows.of(value, held.boxes, held.shape) if value.shape == held.parameter.shape else value


def take_state(
    trainer: Trainer, stored: Mapping[str, Stored], fill: Callable[[Mapping[str, Tensor]], None]
) -> None:
    """Give a trainer its part of the ``stored`` entries; ``fill`` reads into the tensors that it is
    passed."""
    wanted: list[tuple[str, Tensor]] = [
        (f"model.{name}", buffer) for name, buffer in trainer.buffers.items()
    ]
    states: list[tuple[HeldWeight, str, Tensor]] = []
    whole: dict[str, Tensor] = {}
    """State that is not divided as its weight is: one tensor for all parts of the weight."""
    for held in trainer.held():
        wanted.append((f"model.{held.name}", Rows.of(held.parameter.data, held.boxes, held.shape)))
        for key, entry in _state_entries(stored, held.name).items():
            name = f"optimizer.{held.name}.{key}"
            if entry.shape == held.shape:
                place = torch.device("cpu") if trainer.host_state is not None else trainer.device
                value = torch.empty(held.parameter.shape, dtype=entry.dtype, device=place)
                wanted.append((name, Rows.of(value, held.boxes, held.shape)))
            else:
                place = _place_beside_weights(trainer, entry.shape)
                value = whole.setdefault(
                    name, torch.empty(entry.shape, dtype=entry.dtype, device=place)
                )
            states.append((held, key, value))
    wanted += whole.items()
    shapes = {name: entry.shape for name, entry in stored.items()}
    kept = [gradient_sum.wanted(shapes) for gradient_sum in trainer.gradients.factored]
    fill(merged([*wanted, *(pair for values in kept for pair in values.items())]))
    for gradient_sum, values in zip(trainer.gradients.factored, kept, strict=True):
        gradient_sum.take(values)
    if trainer.optimizer is not None:
        trainer.optimizer.state.clear()  # the present state belongs to other values
    for held, key, value in states:
        _give_state(
            trainer, held, key, value if value.shape == held.parameter.shape else value.clone()
        )
    trainer.gradients.after_update()


def _place_beside_weights(trainer: Trainer, shape: tuple[int, ...]) -> torch.device:
    """Return where an optimizer keeps state that does not have its weight's shape: counts in host
    memory, unless its kernels read them, and anything else on the device."""
    groups = [] if trainer.optimizer is None else trainer.optimizer.param_groups
    reads_counts = any(group.get("fused") or group.get("capturable") for group in groups)
    return trainer.device if shape or reads_counts else torch.device("cpu")


def _state_entries(stored: Mapping[str, Stored], name: str) -> dict[str, Stored]:
    prefix = f"optimizer.{name}."
    entries = {
        key.removeprefix(prefix): entry for key, entry in stored.items() if key.startswith(prefix)
    }
    return {key: entry for key, entry in entries.items() if "." not in key}
