"""Check what a user may choose about a model that is loaded: sequence length, dtype, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from argosy.dtype import Dtype
from argosy.errors import Mismatch, Problem, closest, raise_any
from argosy.workload.optimizer import OPTIMIZERS
from argosy.workload.tuning import FULL, Tuning

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class WorkloadSettings:
    """A set of choices that replace those of a model file; None: that of the file."""

    sequence_length: int | None = None
    """Tokens."""
    dtype: Dtype | None = None
    optimizer: str | None = None
    fused_attention: bool = True
    """Whether attention is fused, so that it keeps nothing of size sequence x sequence."""
    tuning: Tuning = FULL
    """Choice of the weights that are trained."""
    powersgd: int = 0
    """Rank of the matrices as which gradients are summed; 0: gradients are summed whole."""


def parse_dtype(value: object) -> Dtype:
    """Return the dtype that a text names; raise a ``Mismatch`` if there is none.

    >>> parse_dtype("bf16")
    <Dtype.BF16: 'bf16'>
    """
    names = [str(dtype) for dtype in Dtype]
    if isinstance(value, str) and value in names:
        return Dtype(value)
    suggestion = closest(value, names) if isinstance(value, str) else None
    raise Mismatch(value, "one of the dtypes " + ", ".join(names), suggestion)


def parse_optimizer(value: object) -> str:
    """Return the name of an optimizer; raise a ``Mismatch`` if there is none."""
    if isinstance(value, str) and value in OPTIMIZERS:
        return value
    suggestion = closest(value, OPTIMIZERS) if isinstance(value, str) else None
    raise Mismatch(value, "one of the optimizers " + ", ".join(OPTIMIZERS), suggestion)


def _parse_length(value: object) -> int:
    if type(value) is not int or value < 1:
        raise Mismatch(value, "a whole number of tokens, at least 1")
    return value


def parse_settings(
    *,
    sequence_length: object = None,
    dtype: object = None,
    optimizer: object = None,
    fused_attention: bool = True,
) -> WorkloadSettings:
    """Return the choices, checked; raise one ``InputError`` that names all that are wrong."""
    problems: list[Problem] = []
    settings = WorkloadSettings(
        sequence_length=_checked("sequence_length", sequence_length, _parse_length, problems),
        dtype=_checked("dtype", dtype, parse_dtype, problems),
        optimizer=_checked("optimizer", optimizer, parse_optimizer, problems),
        fused_attention=fused_attention,
    )
    raise_any(problems)
    return settings


def _checked(
    name: str, value: object, parse: Callable[[object], Value], problems: list[Problem]
) -> Value | None:
    """Return the parsed value; if that fails, return None and add a problem to ``problems``."""
    if value is None:
        return None
    try:
        return parse(value)
    except Mismatch as error:
        problems.append(error.at(path=name))
        return None
