"""The catalogue of device kinds, read from the packaged ``data/devices.toml``."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated

from pydantic import BeforeValidator, Field

from argosy.cluster.device import DeviceKind
from argosy.document import Schema, parse_toml, validate
from argosy.dtype import Dtype
from argosy.errors import Mismatch, closest
from argosy.units import COMPUTE, RATE, SIZE

_DtypeName = Annotated[Dtype, Field(strict=False)]


class _Entry(Schema):
    """One ``[[devices]]`` table."""

    name: str
    vendor: str
    memory: Annotated[float, BeforeValidator(SIZE.parse)]
    memory_bandwidth: Annotated[float, BeforeValidator(RATE.parse)]
    flops: dict[_DtypeName, Annotated[float, BeforeValidator(COMPUTE.parse)]] = Field(min_length=1)
    source: str


class _Catalogue(Schema):
    devices: list[_Entry]


@cache
def catalogue() -> tuple[DeviceKind, ...]:
    """Every kind that Argosy knows, in the order of the file: by vendor, then by generation."""
    path = resources.files("argosy") / "data" / "devices.toml"
    document = parse_toml(path.read_text(encoding="utf-8"), file="devices.toml")
    return tuple(
        DeviceKind(**{**dict(entry), "flops": tuple(entry.flops.items())})
        for entry in validate(document, _Catalogue).devices
    )


@cache
def _by_lower_name() -> dict[str, DeviceKind]:
    return {kind.name.lower(): kind for kind in catalogue()}


def device_kind(name: str) -> DeviceKind:
    """The kind of that name, whatever its case.

    >>> device_kind("a100-80gb")
    A100-80GB (NVIDIA, 80 GiB)
    """
    kind = _by_lower_name().get(name.lower())
    if kind is None:
        raise Mismatch(name, "a device kind from the catalogue", _suggest(name))
    return kind


def _suggest(name: str) -> str | None:
    """Kinds whose name contains ``name`` (there are several "A100"), or else the one it misspells."""
    names = [kind.name for kind in catalogue()]
    variants = [known for known in names if name and name.lower() in known.lower()][:4]
    if variants:
        return "did you mean " + " or ".join(f'"{known}"' for known in variants) + "?"
    return closest(name, names)
