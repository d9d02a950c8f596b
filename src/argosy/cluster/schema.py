"""The fields of a cluster file, as pydantic models; what they mean is told in ``docs/clusters.md``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from argosy.document import Schema
from argosy.dtype import Dtype
from argosy.errors import Mismatch
from argosy.units import COMPUTE, RATE, SIZE, TIME

Rate = Annotated[float, BeforeValidator(RATE.parse)]
Seconds = Annotated[float, BeforeValidator(TIME.parse)]
Bytes = Annotated[float, BeforeValidator(SIZE.parse)]
Flops = Annotated[float, BeforeValidator(COMPUTE.parse)]


def _positive(value: float) -> float:
    if value <= 0:
        raise Mismatch(value, "more than 0")
    return value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


def _name(value: Any) -> Any:
    if not isinstance(value, str) or not value or not all(part.isalnum() or part in "-_" for part in value):
        raise Mismatch(value, "a name of letters, digits, - and _")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Mismatch(value, "a number")
    return float(value)


Name = Annotated[str, BeforeValidator(_name)]
Number = Annotated[float, BeforeValidator(_number)]


class KindSchema(Schema):
    """A device kind of the user's own, beside the catalogue."""

    name: Name
    vendor: str = "custom"
    memory: Bytes
    memory_bandwidth: Rate
    flops: dict[Dtype, Flops] = Field(min_length=1, strict=False)
    source: str = "cluster file"


class DevicesSchema(Schema):
    kind: str
    count: int = Field(default=1, ge=1)
    efficiency: Number = Field(default=1.0, gt=0, le=1.5)
    price_per_hour: Number = Field(default=0.0, ge=0)


class MediumSchema(Schema):
    medium: Name
    bandwidth: Rate
    latency: Seconds = 0.0
    shared: bool = False


class NicSchema(Schema):
    bandwidth: Rate
    latency: Seconds = 0.0
    count: int = Field(default=1, ge=1)


class NodeSchema(Schema):
    name: Name
    count: int = Field(default=1, ge=1)
    devices: Annotated[list[DevicesSchema], BeforeValidator(_listed)] = Field(min_length=1)
    intra: list[MediumSchema] = []
    conflicts: list[list[str]] = []
    nic: NicSchema | None = None


class LinkSchema(Schema):
    name: Name | None = None
    between: Annotated[list[str], Field(min_length=2, max_length=2)]
    medium: Name = "link"
    bandwidth: Rate
    latency: Seconds = 0.0
    bypasses_nic: bool = False
    price_per_gb: Number = Field(default=0.0, ge=0)


class UplinkSchema(Schema):
    bandwidth: Rate
    latency: Seconds = 0.0


class SwitchSchema(Schema):
    name: Name
    nodes: list[str] = []
    parent: Name | None = None
    uplink: UplinkSchema


class SharedSchema(Schema):
    name: Name
    edges: list[str] = Field(min_length=1)
    bandwidth: Rate


class ChangeSchema(Schema):
    """How one edge or device changes: one of ``steps`` (and ``latency_steps``), ``trace`` or ``generator``."""

    link: str | None = None
    device: str | None = None
    steps: list[list[Any]] | None = None
    latency_steps: list[list[Any]] | None = None
    trace: str | None = None
    generator: str | None = None
    parameters: dict[str, Any] = {}
    seed: int = 0
    horizon: Seconds = 600.0


class ClusterSchema(Schema):
    version: Literal[1] = 1
    name: Name
    kinds: list[KindSchema] = []
    nodes: list[NodeSchema] = Field(min_length=1)
    links: list[LinkSchema] = []
    switches: list[SwitchSchema] = []
    shared: list[SharedSchema] = []
    conflicts: list[list[str]] = []
    changes: list[ChangeSchema] = []
