"""Return facts (``agreement``) about what the program of a run has built: numbers that change the
training, although the program's files and the initial values do not show them.

    (1)  settings of torch that change the numbers of a computation
    (2)  the text and the numbers of the model's modules, such as a rate of dropout
    (3)  numbers that the loss and the forwards of modules read from outside of themselves
    (4)  options of the optimizer and numbers of its scheduler

An environment variable that one host sets changes some of these. A number that a function computes
when it is called, for instance from the environment, is not among them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from argosy.runtime.sources.optimizing import (
    OptimizerFactory,
    SchedulerFactory,
    make_updating,
)

_NUMBERS = (bool, int, float, complex)
_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables by which libraries round the factors of matrix products."""
_EQUIVALENT = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of optimizers that choose among implementations of one update; devices may differ."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The place of an object in memory, which differs between processes."""


def settings_facts() -> dict[str, str]:
    """Return the facts (1)."""
    facts = {
        "torch's default dtype": str(torch.get_default_dtype()),
        "torch's deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
    # torch raises if a setting was made in two ways that exclude each other.
    with contextlib.suppress(RuntimeError):
        facts["torch's float32 matmul precision"] = torch.get_float32_matmul_precision()
    with contextlib.suppress(RuntimeError):
        facts["torch's TF32 in cuDNN"] = str(torch.backends.cudnn.allow_tf32)
    for name in _VARIABLES:
        facts[f"environment variable {name}"] = os.environ.get(name, "not set")
    return facts


def model_facts(model: nn.Module, loss_fn: Callable[..., Any], program: Path) -> dict[str, str]:
    """Return the facts (2) and (3); functions outside of the program's folder are not read."""
    facts: dict[str, str] = {}
    reading = _Reading(program.resolve().parent)
    reading.read(loss_fn)
    for name, module in model.named_modules():
        about = f"{type(module).__name__}({module.extra_repr()})"
        facts[f"module {name}"] = _ADDRESS.sub("", about)
        for key, value in vars(module).items():
            if isinstance(value, _NUMBERS) and not key.startswith("_"):
                facts[f"{key} of module {name}"] = repr(value)
        reading.read(type(module).forward)
    return facts | reading.facts


class _Reading:
    """A search of the numbers that functions read from outside of themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, str] = {}
        self.seen: set[int] = set()

    def read(self, function: Any) -> None:
        """Add the numbers that a function and the functions it calls by name read."""
        function = inspect.unwrap(function)
        if isinstance(function, functools.partial):
            self._add(repr(function.func), {**function.keywords, **dict(enumerate(function.args))})
            function = function.func
        function = getattr(function, "__func__", function)
        if id(function) in self.seen or not self._is_own(function):
            return
        self.seen.add(id(function))
        try:
            variables = inspect.getclosurevars(function)
        except ValueError:  # a variable has no value yet
            return
        defaults = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
        outside = {**variables.globals, **variables.nonlocals}
        self._add(function.__qualname__, {**outside, **defaults})
        for value in outside.values():
            if inspect.isfunction(value):
                self.read(value)

    def _is_own(self, function: Any) -> bool:
        code = getattr(function, "__code__", None)
        return code is not None and Path(code.co_filename).resolve().is_relative_to(self.folder)

    def _add(self, name: str, values: dict[Any, Any]) -> None:
        for key, value in values.items():
            # Hosts may keep files in different places, so that texts with "/" are not compared.
            if isinstance(value, _NUMBERS) or (isinstance(value, str) and "/" not in value):
                self.facts[f"{key} in {_ADDRESS.sub('', name)}"] = repr(value)


def updating_facts(
    model: nn.Module, factory: OptimizerFactory, scheduler: SchedulerFactory | None
) -> dict[str, str]:
    """Return the facts (4) for all weights, of which a rank may hold none.

    The optimizer is made of parameters without memory; if that fails, nothing is returned, and the
    rank's own optimizer raises the error.
    """
    named = [
        (name, nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape)))
        for name, weight in model.named_parameters()
        if weight.requires_grad
    ]
    try:
        updating = make_updating(factory, scheduler, named, 0)
    except Exception:  # the user's own code may raise anything
        return {}
    if updating.optimizer is None:
        return {}
    names = {id(weight): name for name, weight in named}
    facts = {"optimizer": type(updating.optimizer).__name__}
    for group in updating.optimizer.param_groups:
        for key, value in _options(group):
            for weight in group["params"]:
                facts[f"{key} of the optimizer for {names.get(id(weight), 'a weight')}"] = value
    rates = updating.scheduler
    if rates is not None:
        facts["scheduler"] = type(rates).__name__
        facts |= {
            f"{key} of the scheduler": repr(value)
            for key, value in vars(rates).items()
            if isinstance(value, _NUMBERS) and not key.startswith("_")
        }
    return facts


def _options(group: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in group.items():
        if key not in _EQUIVALENT and key not in ("params", "param_names"):
            yield key, _ADDRESS.sub("", repr(value))
