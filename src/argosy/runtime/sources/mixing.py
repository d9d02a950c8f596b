"""Refuse, before a run starts, modules that would make it differ from training in one process:
those that mix samples, and dropout with masks of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from argosy.errors import Problem, raise_any
from argosy.plan.plan import Plan


def check_mixing(layers: Sequence[nn.Module], plan: Plan) -> None:
    """Raise an ``InputError`` that names every module whose result would depend on how the plan
    divides samples."""
    problems: list[Problem] = []
    for index, stage in enumerate(plan.stages):
        for position in range(stage.first, stage.end):
            for name, module in layers[position].named_modules():
                path = f"layer {position}{'.' if name else ''}{name}"
                problems += _problems(module, path, index, len(stage.replicas))
    raise_any(problems)


def undivided(layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """Return the layers that a stage with several replicas must not contain."""
    return tuple(at for at, layer in enumerate(layers) if any(map(_mixes, layer.modules())))


def _mixes(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.training


def _problems(module: nn.Module, path: str, stage: int, replicas: int) -> Iterator[Problem]:
    if not module.training:
        return
    if _mixes(module) and replicas > 1:
        expected = (
            f"no statistics over a batch, which stage {stage} divides over {replicas} replicas"
        )
        yield Problem(path, type(module).__name__, expected, suggestion="GroupNorm has none")
    probability = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    foreign = isinstance(
        module, (_DropoutNd, nn.RNNBase, nn.MultiheadAttention)
    ) and not isinstance(module, nn.Dropout)
    if foreign and probability > 0:
        expected = "dropout by nn.Dropout or a function: other masks would depend on the plan"
        yield Problem(path, f"{type(module).__name__} with p={probability:g}", expected)
