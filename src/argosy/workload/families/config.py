"""Define what all Hugging Face configs share: field types, rules between fields, a way to an
architecture.

A key that determines the shape is required even if ``transformers`` has a default: a config without
``hidden_size`` is a wrong file far more often than a 768-wide model. Every other absent key has the
default of ``transformers``. Unknown keys are ignored.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BeforeValidator, ConfigDict

from argosy.document import Document, Schema
from argosy.dtype import Dtype
from argosy.errors import Mismatch, Problem, closest
from argosy.workload.architecture import Architecture, Rotary

# Dtypes by torch's name.
_DTYPES = {"float32": Dtype.FP32, "float16": Dtype.FP16, "bfloat16": Dtype.BF16}


def _dtype_name(value: object) -> object:
    is_text = isinstance(value, str)
    if value is not None and not (is_text and value in _DTYPES):
        suggestion = closest(str(value), _DTYPES) if is_text else None
        raise Mismatch(value, "one of " + ", ".join(f'"{name}"' for name in _DTYPES), suggestion)
    return value


DtypeName = Annotated[str | None, BeforeValidator(_dtype_name)]
"""Dtype by torch's name."""


@dataclass(frozen=True)
class Divides:
    """A rule that ``part`` divides ``whole``, unless the key ``unless`` states their quotient."""

    whole: str
    part: str
    unless: str | None = None


@dataclass(frozen=True)
class AtMost:
    """A rule that ``small`` is at most ``large``."""

    small: str
    large: str


class RotaryScaling(Schema):
    """A table ``rope_scaling`` or ``rope_parameters``, in which unknown keys are ignored."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    partial_rotary_factor: float | None = None

    def rotary(self, base: float, share: float = 1.0) -> Rotary:
        """Return the rotary positions: Llama 3.1's scaling if it has the usual bands, any other by
        name."""
        base, name = self.rope_theta or base, self.rope_type or self.type or "default"
        share = self.partial_rotary_factor or share
        if name == "default":
            return Rotary(base=base, share=share)
        bands = (self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings)
        if name == "llama3" and bands == (1.0, 4.0, 8192):
            return Rotary(base=base, share=share, scaling=self.factor)
        return Rotary(base=base, share=share, other_scaling=name)


class Config(Schema):
    """A schema that every Hugging Face ``config.json`` fits; subclasses declare the keys of their
    model types."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, protected_namespaces=())

    rules: ClassVar[tuple[Divides | AtMost, ...]] = ()

    model_type: str
    torch_dtype: DtypeName = None
    dtype: DtypeName = None

    @property
    def declared_dtype(self) -> Dtype | None:
        """Return the dtype in which the weights are published, if the config states it."""
        declared = self.dtype or self.torch_dtype
        return None if declared is None else _DTYPES[declared]

    @abstractmethod
    def architecture(self) -> Architecture: ...


def rule_problems(document: Document, schema: type[Config]) -> list[Problem]:
    """Return the problems with rules between fields, even if other fields are wrong."""
    problems = (_broken(document, schema, rule) for rule in schema.rules)
    return [problem for problem in problems if problem is not None]


def _broken(document: Document, schema: type[Config], rule: Divides | AtMost) -> Problem | None:
    if isinstance(rule, AtMost):
        small, large = _number(document, schema, rule.small), _number(document, schema, rule.large)
        if small is None or large is None or small <= large:
            return None
        return document.problem((rule.small,), f"at most {rule.large} ({large})", small)
    part, whole = _number(document, schema, rule.part), _number(document, schema, rule.whole)
    if part is None or whole is None or whole % part == 0:
        return None
    if rule.unless is not None and _number(document, schema, rule.unless) is not None:
        return None
    nearest = min(_divisors(whole), key=lambda divisor: (abs(divisor - part), divisor))
    expected = f"a divisor of {rule.whole} ({whole})"
    return document.problem((rule.part,), expected, part, suggestion=f"the nearest is {nearest}")


def _divisors(whole: int) -> Iterator[int]:
    """Yield the divisors of a number.

    >>> sorted(_divisors(12))
    [1, 2, 3, 4, 6, 12]
    """
    for small in range(1, math.isqrt(whole) + 1):
        if whole % small == 0:
            yield small
            if small * small != whole:
                yield whole // small


def _number(document: Document, schema: type[Config], key: str) -> int | None:
    """Return the value of ``key``, its default if it is absent, or None if it is no number in
    range."""
    field = schema.model_fields[key]
    names = (
        field.validation_alias.choices
        if isinstance(field.validation_alias, AliasChoices)
        else [key]
    )
    present: list[Any] = [document.data[name] for name in names if name in document.data]
    value = present[0] if present else field.default
    return value if type(value) is int and 1 <= value <= 10**9 else None
