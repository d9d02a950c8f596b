"""Declare the fields of a cluster file as pydantic models; ``docs/clusters.md`` explains them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from argosy.cluster.device import DeviceKind
from argosy.cluster.topology import HostMemory
from argosy.document import JsonObject, Schema, Word
from argosy.dtype import Dtype
from argosy.errors import Mismatch
from argosy.units import COMPUTE, RATE, SIZE, TIME, Quantity, finite

# Largest bytes, bytes/s or FLOP/s, so that products stay finite.
_LARGEST = 1e21
# Smallest bytes, bytes/s or FLOP/s, so that quotients stay finite.
_SMALLEST = 1e-6
# Largest number of nodes of a group, devices of a node, or NICs of a host.
_MOST = 10_000


def _positive(quantity: Quantity, smallest: float = _SMALLEST) -> BeforeValidator:
    def read(text: object) -> float:
        value = quantity.parse(text)
        if value == 0:
            raise Mismatch(text, f"{quantity.expected}, more than 0")
        if value < smallest:
            raise Mismatch(text, f"{quantity.expected}, at least {quantity.format(smallest)}")
        if value > _LARGEST:
            raise Mismatch(text, f"{quantity.expected}, at most {quantity.format(_LARGEST)}")
        return value

    return BeforeValidator(read)


def _whole(least: int, most: float, expected: str) -> BeforeValidator:
    def check(value: object) -> object:
        if type(value) is not int or not least <= value <= most:
            raise Mismatch(value, expected)
        return value

    return BeforeValidator(check)


def _number(accepts: Callable[[float], bool], expected: str) -> BeforeValidator:
    def read(value: object) -> float:
        number = finite(value)
        if number is None or not accepts(number):
            raise Mismatch(value, expected)
        return number

    return BeforeValidator(read)


def _devices(value: Any) -> Any:
    if not isinstance(value, dict | list):
        raise Mismatch(
            value, 'a table such as { kind = "A100-80GB", count = 4 }, or a list of them'
        )
    return [value] if isinstance(value, dict) else value


def _pair(value: Any) -> Any:
    if not isinstance(value, list) or len(value) != 2:
        raise Mismatch(value, 'two groups of nodes such as ["a*", "v0"]')
    return value


def _name(value: Any) -> Any:
    if (
        not isinstance(value, str)
        or not value
        or not all(part.isalnum() or part in "-_" for part in value)
    ):
        raise Mismatch(value, "a name of letters, digits, - and _")
    return value


def _word(pattern: str, expected: str) -> BeforeValidator:
    """Return a validator for text that scripts and schedulers take as one word."""

    def check(value: Any) -> Any:
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            raise Mismatch(value, expected)
        return value

    return BeforeValidator(check)


def _host(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise Mismatch(
            value,
            'a host name such as "gpu01", or a table such as { name = "gpu01", interface = "ib0" }',
        )
    return {"name": value} if isinstance(value, str) else value


Rate = Annotated[float, _positive(RATE)]
"""Bytes/s."""
Bytes = Annotated[float, _positive(SIZE)]
Flops = Annotated[float, _positive(COMPUTE)]
"""FLOP/s."""
Seconds = Annotated[float, BeforeValidator(TIME.parse)]
Horizon = Annotated[float, _positive(replace(TIME, example="10 min"), smallest=0.0)]
"""Seconds."""
# A name of letters, digits, - and _, because names become parts of edges and file names.
Name = Annotated[str, BeforeValidator(_name)]
# A number of nodes, devices or NICs.
Count = Annotated[int, _whole(1, _MOST, f"a whole number from 1 to {_MOST}")]
Seed = Annotated[int, _whole(0, math.inf, "a whole number, at least 0")]
# Share of what the device kind usually reaches; above 1 for a device that is better than usual.
Efficiency = Annotated[
    float, _number(lambda value: 0 < value <= 1.5, "a number above 0, at most 1.5")
]
# A price in the user's currency.
Price = Annotated[float, _number(lambda value: value >= 0, "a finite number, at least 0")]

HostName = Annotated[
    str,
    _word(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", 'a host name of letters, digits, ".", "-" and "_"'),
]
HostAddress = Annotated[
    str, _word(r"[A-Za-z0-9:][A-Za-z0-9._:-]{0,252}", "a host name or an IP address")
]
Interface = Annotated[
    str, _word(r"[A-Za-z0-9][A-Za-z0-9._@:-]{0,14}", 'a network interface such as "eth0"')
]
Port = Annotated[int, _whole(1, 65535, "a port from 1 to 65535")]
# A generic resource of Slurm.
Gres = Annotated[
    str, _word(r"[A-Za-z0-9_.:-]{0,64}", 'a resource of Slurm such as "gpu:a100", or "" for none')
]


class KindSchema(Schema):
    """A device kind that the user adds to the catalogue."""

    makes = DeviceKind

    name: Name
    vendor: str = "custom"
    memory: Bytes
    memory_bandwidth: Rate
    flops: dict[Word[Dtype], Flops] = Field(min_length=1)
    exchange_rate: Rate = math.inf
    source: str = "cluster file"


class DevicesSchema(Schema):
    kind: str
    count: Count = 1
    efficiency: Efficiency = 1.0
    price_per_hour: Price = 0.0
    gres: Gres | None = None


class MediumSchema(Schema):
    medium: Name
    bandwidth: Rate
    latency: Seconds = 0.0
    shared: bool = False


class NicSchema(Schema):
    bandwidth: Rate
    latency: Seconds = 0.0
    count: Count = 1


class HostSchema(Schema):
    """A machine that runs a node."""

    name: HostName
    address: HostAddress | None = None
    interface: Interface | None = None
    port: Port | None = None


class NvmeSchema(Schema):
    size: Bytes
    bandwidth: Rate


class HostMemorySchema(Schema):
    makes = HostMemory

    size: Bytes | None = None
    bandwidth: Rate | None = None
    shared: bool = False
    nvme: NvmeSchema | None = None


class NodeSchema(Schema):
    name: Name
    count: Count | None = None
    hosts: list[Annotated[HostSchema, BeforeValidator(_host)]] = Field(default_factory=list)
    cpus: Count | None = None
    devices: Annotated[list[DevicesSchema], BeforeValidator(_devices)] = Field(min_length=1)
    intra: list[MediumSchema] = Field(default_factory=list)
    conflicts: list[list[str]] = Field(default_factory=list)
    nic: NicSchema | None = None
    host_memory: HostMemorySchema | None = None

    @property
    def num_nodes(self) -> int:
        """Return ``count``, or the number of named hosts, or 1."""
        return self.count or len(self.hosts) or 1


class LinkSchema(Schema):
    name: Name | None = None
    between: Annotated[list[str], BeforeValidator(_pair)]
    medium: Name = "link"
    bandwidth: Rate
    latency: Seconds = 0.0
    bypasses_nic: bool = False
    price_per_gb: Price = 0.0


class UplinkSchema(Schema):
    bandwidth: Rate
    latency: Seconds = 0.0


class SwitchSchema(Schema):
    name: Name
    nodes: list[str] = Field(default_factory=list)
    parent: Name | None = None
    uplink: UplinkSchema


class SharedSchema(Schema):
    name: Name
    edges: list[str] = Field(min_length=1)
    bandwidth: Rate


class ChangeSchema(Schema):
    """A change of one edge or device, which has one of ``steps`` (and ``latency_steps``), ``trace``
    or ``generator``."""

    link: str | None = None
    device: str | None = None
    steps: list[Any] | None = Field(default=None, min_length=1)
    latency_steps: list[Any] | None = Field(default=None, min_length=1)
    trace: str | None = None
    generator: str | None = None
    parameters: JsonObject = Field(default_factory=dict)
    seed: Seed = 0
    horizon: Horizon = 600.0


class ClusterSchema(Schema):
    version: Literal[1] = 1
    name: Name
    kinds: list[KindSchema] = Field(default_factory=list)
    nodes: list[NodeSchema] = Field(min_length=1)
    links: list[LinkSchema] = Field(default_factory=list)
    switches: list[SwitchSchema] = Field(default_factory=list)
    shared: list[SharedSchema] = Field(default_factory=list)
    conflicts: list[list[str]] = Field(default_factory=list)
    changes: list[ChangeSchema] = Field(default_factory=list)
