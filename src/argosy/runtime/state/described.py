"""Describe the tensors that all ranks hold together, so that each knows what a migration brings.

Shapes and dtypes are exchanged, and with them everything that is one number, such as the counts of
an optimizer, and the optimizer's options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from argosy.runtime.communication.boxes import HeldParts
from argosy.runtime.processes.failure import in_contact
from argosy.runtime.processes.world import gather_texts
from argosy.runtime.stages.parameters import Weight
from argosy.runtime.state.handover import About, Key

if TYPE_CHECKING:
    from argosy.runtime.step.trainer import Trainer

VALUE = "value"
BUFFER = "buffer"
"""The kinds of pieces that are a weight's values, or a buffer; others are names of states."""


class Described(NamedTuple):
    """A description of what all ranks hold together."""

    tensors: Mapping[Key, About]
    """Weights, optimizer state and buffers."""
    values: Mapping[Key, Any]
    """State and buffers of one number, such as counts, which are sent with the description."""
    options: Sequence[Mapping[str, Any]]
    """Options of the optimizer, by group of parameters."""


def shared_description(
    trainer: Trainer, weights: Sequence[Weight], old: Mapping[Key, HeldParts]
) -> Described:
    """Exchange descriptions of what every rank holds."""
    own = _own_description(trainer, old)
    with in_contact("at the beginning of a migration"):
        gathered = [json.loads(text) for text in gather_texts(json.dumps(own), trainer.device)]
    tensors: dict[Key, About] = {}
    values: dict[Key, Any] = {}
    for rank_description in gathered:
        for (name, entry), shape, dtype, same in rank_description["tensors"]:
            tensors.setdefault((name, entry), About(tuple(shape), _dtype(dtype), same))
        for (name, entry), value, dtype, is_on_host in rank_description["values"]:
            if (name, entry) not in values:
                place = "cpu" if is_on_host else trainer.device
                values[name, entry] = (
                    value
                    if dtype is None
                    else torch.tensor(value, dtype=_dtype(dtype), device=place)
                )
    for weight in weights:
        tensors[weight.name, VALUE] = About(
            tuple(weight.parameter.shape), weight.parameter.dtype, like_weight=True
        )
    options = (description["options"] for description in gathered if description["options"])
    return Described(tensors, values, next(options, []))


def _own_description(trainer: Trainer, old: Mapping[Key, HeldParts]) -> dict[str, list[Any]]:
    """Describe what this rank holds besides weights: tensors, numbers and the optimizer's
    options."""
    shapes: dict[str, tuple[tuple[int, ...], set[tuple[int, ...]]]] = {}
    for held in trainer.held():
        shapes.setdefault(held.name, (held.shape, set()))[1].add(tuple(held.parameter.shape))
    own: dict[str, list[Any]] = {"tensors": [], "values": [], "options": []}
    for key, held_parts in old.items():
        if key[1] == VALUE:
            continue
        tensor = held_parts.parts[0].tensor
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            own["values"].append([key, *_as_number(tensor)])
            continue
        whole, parts = shapes.get(key[0], ((), set()))
        same = tuple(tensor.shape) in parts
        own["tensors"].append(
            [key, whole if same else tuple(tensor.shape), _name_of(tensor.dtype), same]
        )
    if trainer.optimizer is not None:
        own["options"] = [_options(group) for group in trainer.optimizer.param_groups]
    return own


def _as_number(value: Any) -> tuple[Any, str | None, bool]:
    """A value of one number, its dtype if it is a tensor, and whether it is in host memory:
    optimizers keep counts there, but the moments of a weight of one number on the weight's
    device."""
    if not isinstance(value, Tensor):
        return value, None, True
    return value.item(), _name_of(value.dtype), value.device.type == "cpu"


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain settings of a group of parameters."""
    plain = (bool, int, float, str, list, tuple, type(None))
    return {
        name: value
        for name, value in group.items()
        if name != "params" and isinstance(value, plain)
    }


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
