"""Which weights a rank holds, under which names, and which other ranks hold them too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, nn

from argosy.plan.plan import Plan
from argosy.runtime.communication.boxes import TensorBox
from argosy.runtime.processes.ranks import seats_of

Places = Sequence[tuple[nn.Module, str]]
"""Modules, and the name of something in each."""


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter of the model, tied ones once."""

    name: str
    parameter: nn.Parameter
    """On the meta device and whole, or what a rank holds of it."""
    stages: tuple[int, ...]
    """Those that use it; several where it is tied across stages."""
    places: tuple[tuple[nn.Module, str], ...]
    """The modules that hold it, and the name it has there."""
    aliases: tuple[str, ...] = ()
    """Its other names in the model."""
    whole: tuple[int, ...] | None = None
    """The shape of all of it, where ``parameter`` is a part."""
    boxes: tuple[TensorBox, ...] | None = None
    """Where that part lies; all of it where None."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape) if self.whole is None else self.whole

    @property
    def installed(self) -> nn.Parameter:
        """What its modules hold now."""
        module, name = self.places[0]
        found = module._parameters[name]
        assert found is not None
        return found

    def install(self, parameter: nn.Parameter) -> None:
        """Have its modules hold a parameter."""
        for module, name in self.places:
            module._parameters[name] = parameter


class Catalogue:
    """Every parameter of a model that stages may use, tied ones once, whole and without values, in
    the order of the model's names. It stays as it is while ranks let go of values and keep
    parts."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module] = ()) -> None:
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        found: dict[int, nn.Parameter] = {
            id(parameter): parameter for parameter in model.parameters()
        }
        places: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] = {}
        for position, root in [*enumerate(layers), (-1, model)]:
            paths = {
                id(module): f"layers.{position}.{path}." for path, module in root.named_modules()
            }
            for module, name, parameter in _held(root):
                found[id(parameter)] = parameter
                names.setdefault(id(parameter), [paths[id(module)].replace("..", ".") + name])
                places.setdefault(id(parameter), {})[id(module), name] = (module, name)
        self.weights = tuple(
            Weight(
                names[key][0],
                _template(parameter),
                (),
                tuple(places[key].values()),
                tuple(names[key][1:]),
            )
            for key, parameter in found.items()
        )
        self.at = {
            (id(module), name): weight for weight in self.weights for module, name in weight.places
        }
        """By place."""

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """The model as it was before ranks kept parts of it, without values."""
        held = [weight.installed for weight in self.weights]
        for weight in self.weights:
            weight.install(weight.parameter)
        try:
            yield
        finally:
            for weight, parameter in zip(self.weights, held, strict=True):
                weight.install(parameter)


def _template(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def weights_of(catalogue: Catalogue, layers: Sequence[nn.Module], plan: Plan) -> tuple[Weight, ...]:
    """Every parameter that a layer uses."""
    stages: dict[str, set[int]] = {}
    for index, stage in enumerate(plan.stages):
        for layer in layers[stage.first : stage.end]:
            for module, name, _ in _held(layer):
                stages.setdefault(catalogue.at[id(module), name].name, set()).add(index)
    return tuple(
        replace(weight, stages=tuple(sorted(stages[weight.name])))
        for weight in catalogue.weights
        if weight.name in stages
    )


def buffer_places(layers: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """The modules of some layers that hold buffers, and their names in them."""
    return [
        (module, name) for layer in layers for module in layer.modules() for name in module._buffers
    ]


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


def _held(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def ranks_holding(weight: Weight, plan: Plan, roster: Sequence[str]) -> tuple[int, ...]:
    """Those that hold a weight or some of it."""
    seats = seats_of(plan, roster)
    return tuple(sorted({seat.rank for stage in weight.stages for seat in seats[stage]}))
