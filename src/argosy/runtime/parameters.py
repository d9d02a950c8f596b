"""Which weights a rank holds, under which names, and which other ranks hold them too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from argosy.plan.plan import Plan
from argosy.runtime.boxes import Box
from argosy.runtime.ranks import seats_of
from argosy.space.sharding import REPLICATED, State

Places = Sequence[tuple[nn.Module, str]]
"""Modules, and the name of something in each."""


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter of the model, tied ones once."""

    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]
    """Those that use it; several where it is tied across stages."""
    places: tuple[tuple[nn.Module, str], ...]
    """The modules that hold it, and the name it has there."""
    aliases: tuple[str, ...] = ()
    """Its other names in the model."""
    cut: State = REPLICATED
    """How the members of a tensor-parallel group share it."""
    whole: tuple[int, ...] | None = None
    """The shape of all of it, where ``parameter`` is a part."""
    boxes: tuple[Box, ...] | None = None
    """Where that part lies; all of it where None."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape) if self.whole is None else self.whole


def weights_of(model: nn.Module, layers: Sequence[nn.Module], plan: Plan) -> tuple[Weight, ...]:
    """Every parameter that a layer uses, in the order of the model's names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    every: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        every.setdefault(id(parameter), []).append(name)
    parameters: dict[int, nn.Parameter] = {}
    stages: dict[int, set[int]] = {}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for index, stage in enumerate(plan.stages):
        for position in range(stage.first, stage.end):
            for module, name, parameter in _held(layers[position]):
                key = id(parameter)
                names.setdefault(key, f"layers.{position}.{name}")
                parameters[key] = parameter
                stages.setdefault(key, set()).add(index)
                held = places.setdefault(key, [])
                if all(module is not other or name != known for other, known in held):
                    held.append((module, name))
    order = {key: position for position, key in enumerate(names)}
    ordered = sorted(parameters, key=order.__getitem__)
    return tuple(
        Weight(
            names[key],
            parameters[key],
            tuple(sorted(stages[key])),
            tuple(places[key]),
            tuple(name for name in every.get(key, ()) if name != names[key]),
        )
        for key in ordered
    )


def buffer_places(layers: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """The modules of some layers that hold buffers, and their names in them."""
    return [(module, name) for layer in layers for module in layer.modules() for name in module._buffers]


def buffers_at(model: nn.Module, places: Iterable[tuple[nn.Module, str]]) -> dict[str, Tensor]:
    """Those buffers that belong into a state dict, by the model's names."""
    names = {
        (id(module), name): f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }
    return {
        names[id(module), name]: buffer
        for module, name in places
        if (buffer := module._buffers[name]) is not None and (id(module), name) in names
    }


def places_of(model: nn.Module, parameter: nn.Parameter) -> tuple[tuple[nn.Module, str], ...]:
    """The modules that hold a parameter, and its name in each."""
    return tuple((module, name) for module, name, held in _held(model) if held is parameter)


def _held(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def ranks_holding(weight: Weight, plan: Plan, roster: Sequence[str]) -> tuple[int, ...]:
    """Those that hold a weight or some of it."""
    seats = seats_of(plan, roster)
    return tuple(sorted({seat.rank for stage in weight.stages for seat in seats[stage]}))


def holders(weight: Weight, plan: Plan, roster: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Ranks that hold the same of a weight and sum its gradients: all that hold it, or of a weight that groups share
    the members with the same place in theirs."""
    if not weight.cut.is_sharded:
        return (ranks_holding(weight, plan, roster),)
    seats = seats_of(plan, roster)[weight.stages[0]]
    return tuple(
        tuple(sorted(seat.rank for seat in seats if seat.member == member)) for member in range(seats[0].width)
    )
