"""List the weights that a rank holds, their names, and the other ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, nn

from argosy.plan.plan import Plan
from argosy.runtime.communication.boxes import TensorBox
from argosy.runtime.processes.ranks import seats_of
from argosy.runtime.stages.experts import ExpertModules

Places = Sequence[tuple[nn.Module, str]]
"""Pairs of a module and the name of a parameter or buffer in it."""


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter that the model has; tied ones are listed once."""

    name: str
    parameter: nn.Parameter
    """The whole parameter on the meta device, or the part that a rank holds."""
    stages: tuple[int, ...]
    """The stages that use it; several if it is tied across stages."""
    places: tuple[tuple[nn.Module, str], ...]
    """The modules that hold it, and its name in each."""
    aliases: tuple[str, ...] = ()
    """Its other names in the model."""
    whole: tuple[int, ...] | None = None
    """The shape of the whole parameter, if ``parameter`` is a part."""
    boxes: tuple[TensorBox, ...] | None = None
    """The boxes of that part; None for the whole."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape) if self.whole is None else self.whole

    @property
    def installed(self) -> nn.Parameter:
        """Return the parameter that its modules hold now."""
        module, name = self.places[0]
        parameter = module._parameters[name]
        assert parameter is not None
        return parameter

    def install(self, parameter: nn.Parameter) -> None:
        """Replace the parameter that its modules hold."""
        for module, name in self.places:
            module._parameters[name] = parameter


class Catalogue:
    """All parameters of a model that stages may use, tied ones once, whole and without values, in
    the order of the model's names. It does not change when ranks free values and keep parts."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module] = ()) -> None:
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        parameters: dict[int, nn.Parameter] = {
            id(parameter): parameter for parameter in model.parameters()
        }
        places: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] = {}
        for position, root in [*enumerate(layers), (-1, model)]:
            paths = {
                id(module): f"layers.{position}.{path}." for path, module in root.named_modules()
            }
            for module, name, parameter in _held(root):
                parameters[id(parameter)] = parameter
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
            for key, parameter in parameters.items()
        )
        self.at = {
            (id(module), name): weight for weight in self.weights for module, name in weight.places
        }
        """Weights by place."""
        self.experts = ExpertModules([*layers, model])

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """Restore the model as it was before ranks kept parts of it, without values, in the
        context."""
        held = [weight.installed for weight in self.weights]
        for weight in self.weights:
            weight.install(weight.parameter)
        try:
            with self.experts.restored():
                yield
        finally:
            for weight, parameter in zip(self.weights, held, strict=True):
                weight.install(parameter)


def _template(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def weights_of(catalogue: Catalogue, layers: Sequence[nn.Module], plan: Plan) -> tuple[Weight, ...]:
    """Return every parameter that a layer uses."""
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
    """Return the modules of given layers that hold buffers, with the buffers' names."""
    return [
        (module, name) for layer in layers for module in layer.modules() for name in module._buffers
    ]


def buffers_at(model: nn.Module, places: Iterable[tuple[nn.Module, str]]) -> dict[str, Tensor]:
    """Return the buffers that belong into a state dict, by the model's names."""
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
    """Return the ranks that hold a weight or a part of it."""
    seats = seats_of(plan, roster)
    return tuple(sorted({seat.rank for stage in weight.stages for seat in seats[stage]}))
