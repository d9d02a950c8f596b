"""Make the optimizer of a rank's part and its learning-rate scheduler by the user's own functions.

Both are made again whenever a rank gets other weights. A scheduler counts steps and nothing else: a
new one is stepped as often as the trainer has trained, so it continues where the old one was, after
a migration as after a checkpoint.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from argosy.errors import bad_input, invalid

OptimizerFactory = Callable[[Any], Any]
"""``optimizer(parameters)`` returns an ``Optimizer``, or a pair of one and its ``LRScheduler``.

A factory whose first parameter is called ``named_parameters`` gets (name, parameter) pairs.
"""
SchedulerFactory = Callable[[Optimizer], LRScheduler]
"""``scheduler(optimizer)`` returns the scheduler of an optimizer."""


# Names of optimizers whose update of an element depends on other elements of its weight.
_WHOLE_WEIGHTS = frozenset({"Adafactor", "LAMB", "LARS", "Lamb", "Lars", "Muon", "SOAP", "Shampoo"})


class Updating(NamedTuple):
    """The optimizer and scheduler of a rank's weights, both None on a rank that has no weights."""

    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None

    @property
    def rates(self) -> tuple[float, ...]:
        """Return the learning rates by group of parameters that are numbers in host memory."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        known = [group["lr"] for group in groups if "lr" in group]
        return tuple(
            float(rate)
            for rate in known
            if not isinstance(rate, Tensor) or rate.device.type == "cpu"
        )

    def after_step(self) -> None:
        """Set the learning rates of the next step."""
        if self.scheduler is not None:
            with _without_order():
                self.scheduler.step()


def make_updating(
    factory: OptimizerFactory,
    scheduler: SchedulerFactory | None,
    named: Sequence[tuple[str, nn.Parameter]],
    steps: int,
) -> Updating:
    """Make the optimizer of parameters, and its scheduler as it is after ``steps`` steps."""
    if not named:
        return Updating()
    made: Any = (
        factory(named) if _takes_names(factory) else factory([parameter for _, parameter in named])
    )
    optimizer, made_with = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(optimizer, Optimizer):
        expected = "a torch.optim.Optimizer, or a pair of one and its scheduler"
        raise bad_input(expected, type(made).__name__, "optimizer(parameters)")
    if made_with is not None and scheduler is not None:
        actual = "a scheduler from optimizer(parameters) and another from scheduler(optimizer)"
        raise invalid("scheduler", actual, "one scheduler")
    rates = made_with if scheduler is None else scheduler(optimizer)
    if rates is None and scheduler is None:
        return Updating(optimizer)
    if not isinstance(rates, LRScheduler) or isinstance(rates, ReduceLROnPlateau):
        expected = (
            "a torch.optim.lr_scheduler.LRScheduler whose rates follow from the number of steps"
        )
        raise bad_input(expected, type(rates).__name__, "scheduler(optimizer)")
    updating = Updating(optimizer, rates)
    for _ in range(steps):
        updating.after_step()
    return updating


def check_takes_parts(optimizer: Optimizer | None, parts: Iterable[str]) -> None:
    """Raise an ``InputError`` if an optimizer needs whole weights and this rank has parts of them.

    ``parts`` are the names of weights of which the rank updates a part.
    """
    names = {base.__name__ for base in type(optimizer).__mro__}
    part = next(iter(parts), None)
    if part is not None and not names.isdisjoint(_WHOLE_WEIGHTS):
        actual = f"{type(optimizer).__name__}, which reads whole weights, for a part of {part}"
        expected = (
            "an optimizer that treats every element alone, "
            "or a plan without ZeRO and tensor parallelism"
        )
        raise invalid("optimizer", actual, expected)


def _takes_names(factory: OptimizerFactory) -> bool:
    try:
        return next(iter(inspect.signature(factory).parameters), "") == "named_parameters"
    except (TypeError, ValueError):  # builtins have no signature
        return False


def _without_order() -> warnings.catch_warnings[Any]:
    """Suppress torch's warning that the optimizer has not stepped yet, which is intended on ranks
    that resume."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
