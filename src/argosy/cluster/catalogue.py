"""Read the catalogue of device kinds from the packaged ``data/devices.toml``."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated

from pydantic import BeforeValidator, Field

from argosy.cluster.device import DeviceKind, Reached
from argosy.document import Schema, Word, parse_toml, validate
from argosy.dtype import Dtype
from argosy.errors import Mismatch, closest
from argosy.units import COMPUTE, RATE, SIZE

_DtypeName = Word[Dtype]


class _Tuned(Schema):
    """A ``[generations.*.tuned]`` table, which holds the constants of steps with tuned kernels."""

    makes = Reached

    products: dict[_DtypeName, float]
    attention: float
    passes: float
    source: str


class _Generation(Schema):
    """A ``[generations.*]`` table, which holds the constants of a device generation."""

    makes = Reached

    products: dict[_DtypeName, float]
    attention: float
    passes: float
    error: float
    host_bandwidth: Annotated[float, BeforeValidator(RATE.parse)]
    exchange_rate: Annotated[float, BeforeValidator(RATE.parse)] = DeviceKind.exchange_rate
    source: str
    tuned: _Tuned | None = None


class _Entry(Schema):
    """A ``[[devices]]`` table, which describes one device kind."""

    makes = DeviceKind

    name: str
    vendor: str
    memory: Annotated[float, BeforeValidator(SIZE.parse)]
    memory_bandwidth: Annotated[float, BeforeValidator(RATE.parse)]
    flops: dict[_DtypeName, Annotated[float, BeforeValidator(COMPUTE.parse)]] = Field(min_length=1)
    source: str
    generation: str | None = None
    host_bandwidth: Annotated[float, BeforeValidator(RATE.parse)] | None = None
    exchange_rate: Annotated[float, BeforeValidator(RATE.parse)] | None = None


class _Catalogue(Schema):
    generations: dict[str, _Generation]
    devices: list[_Entry]


@cache
def catalogue() -> tuple[DeviceKind, ...]:
    """Return every device kind that Argosy has, in the order of the file: by vendor, then by
    generation."""
    path = resources.files("argosy") / "data" / "devices.toml"
    document = parse_toml(path.read_text(encoding="utf-8"), file="devices.toml")
    content = validate(document, _Catalogue)
    reached = {name: entry.value() for name, entry in content.generations.items()}
    tuned = {
        name: entry.tuned.value(error=entry.error) if entry.tuned is not None else reached[name]
        for name, entry in content.generations.items()
    }
    return tuple(
        entry.value(
            reached=Reached() if entry.generation is None else reached[entry.generation],
            tuned=Reached() if entry.generation is None else tuned[entry.generation],
            host_bandwidth=_rate(entry, content, "host_bandwidth"),
            exchange_rate=_rate(entry, content, "exchange_rate"),
        )
        for entry in content.devices
    )


def _rate(entry: _Entry, content: _Catalogue, field: str) -> float:
    """Return a rate (bytes/s) of the kind, else of its generation, else the default."""
    own: float | None = getattr(entry, field)
    if own is not None:
        return own
    source = DeviceKind if entry.generation is None else content.generations[entry.generation]
    rate: float = getattr(source, field)
    return rate


@cache
def _by_lower_name() -> dict[str, DeviceKind]:
    return {kind.name.lower(): kind for kind in catalogue()}


def device_kind(name: str) -> DeviceKind:
    """Return the kind of that name, in upper or lower case.

    >>> device_kind("a100-80gb")
    A100-80GB (NVIDIA, 80 GiB)
    """
    kind = _by_lower_name().get(name.lower())
    if kind is None:
        raise Mismatch(name, "a device kind from the catalogue", _suggest(name))
    return kind


def _suggest(name: str) -> str | None:
    """Return a suggestion: kinds whose name contains ``name`` (there are several "A100"), or else
    the kind that it misspells."""
    names = [kind.name for kind in catalogue()]
    variants = [known for known in names if name and name.lower() in known.lower()][:4]
    if variants:
        return "did you mean " + " or ".join(f'"{known}"' for known in variants) + "?"
    return closest(name, names)
