"""Define field types of files about models; each reports what it expects if a value is wrong."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BeforeValidator

from argosy.dtype import Dtype
from argosy.errors import Mismatch
from argosy.units import finite
from argosy.workload.settings import parse_dtype, parse_optimizer


def _whole(smallest: int, largest: float = math.inf) -> BeforeValidator:
    def check(value: object) -> object:
        if type(value) is not int or value < smallest:
            raise Mismatch(value, f"a whole number, at least {smallest}")
        if value > largest:
            raise Mismatch(value, f"a whole number, at most {largest}")
        return value

    return BeforeValidator(check)


def _share(value: object) -> object:
    share = finite(value)
    if share is None or not 0 <= share < 1:
        raise Mismatch(value, "a share of at least 0 and below 1")
    return share


def _amount(value: object) -> object:
    amount = finite(value)
    if amount is None or amount < 0:
        raise Mismatch(value, "a finite number, at least 0")
    return amount


def _text(value: object) -> object:
    if not isinstance(value, str) or not value:
        raise Mismatch(value, "a name")
    return value


Count = Annotated[int, _whole(1, 10**9)]
"""A whole number, at least 1; more than a billion is a mistake, and would slow down the checks of
shapes."""
Depth = Annotated[int, _whole(1, 10_000)]
"""A number of blocks."""
Natural = Annotated[int, _whole(0, 10**18)]
"""A whole number, at least 0, so limited that sums of many remain in the range of floats."""
Share = Annotated[float, BeforeValidator(_share)]
"""A dropout rate."""
Amount = Annotated[float, BeforeValidator(_amount)]
"""Seconds, bytes or FLOP."""
# A name that is not empty.
Name = Annotated[str, BeforeValidator(_text)]
# A dtype by name.
DtypeField = Annotated[Dtype, BeforeValidator(parse_dtype)]
# An optimizer by name.
OptimizerField = Annotated[str, BeforeValidator(parse_optimizer)]


def _layer_range(value: object) -> object:
    if not isinstance(value, list) or len(value) != 2:
        raise Mismatch(value, "the first layer and one past the last, such as [0, 8]")
    return value


# First layer, and one past the last.
LayerRange = Annotated[list[Natural], BeforeValidator(_layer_range)]
