"""Device kinds (what a datasheet says) and devices (one of them in a node of a cluster)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from argosy.cluster.trace import Trace
from argosy.dtype import Dtype
from argosy.errors import bad_input
from argosy.units import SIZE

FULL_SPEED = Trace.constant(1.0)


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What training steps reach of a device's peaks; the defaults are for a kind that nobody has
    measured."""

    products: tuple[tuple[Dtype, float], ...] = ()
    """Share of the peak that large matrix products reach, per dtype; a dtype that is missing
    reaches ``USUAL``."""
    attention: float = 0.5
    """Share of the peak for 16-bit numbers that attention proper reaches."""
    passes: float = 2.5
    """How often kept bytes and weights cross the memory bus in a forward."""
    error: float = 0.5
    """Nine of ten measured steps are predicted with a smaller relative error."""
    source: str = ""

    USUAL: ClassVar[float] = 0.725

    @cached_property
    def _shares(self) -> dict[Dtype, float]:
        return dict(self.products)

    def share(self, dtype: Dtype) -> float:
        """Of the peak, that products in a dtype reach."""
        return self._shares.get(dtype, self.USUAL)


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """A model of accelerator, as its maker describes it."""

    name: str
    vendor: str
    memory: float
    """Bytes."""
    memory_bandwidth: float
    """Bytes/s."""
    flops: tuple[tuple[Dtype, float], ...]
    """Dense matrix FLOP/s per dtype, without structured sparsity; a dtype that is missing is not
    supported."""
    source: str
    """Where the figures come from."""
    reached: Reached = Reached()
    """What programs reach of these figures."""
    host_bandwidth: float = 12e9
    """Bytes/s that copies to and from pinned host memory reach, in each direction."""

    @cached_property
    def _rates(self) -> dict[Dtype, float]:
        return dict(self.flops)

    def peak(self, dtype: Dtype) -> float:
        """Dense FLOP/s for ``dtype``. A kind without tf32 multiplies tf32 at its fp32 rate."""
        rates = self._rates
        if dtype is Dtype.TF32 and dtype not in rates:
            dtype = Dtype.FP32
        if dtype not in rates:
            known = ", ".join(sorted(rates))
            raise bad_input(f"a dtype that {self.name} has ({known})", str(dtype), where="dtype")
        return rates[dtype]

    def __repr__(self) -> str:
        return f"{self.name} ({self.vendor}, {SIZE.format(self.memory, digits=3)})"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator of a cluster."""

    name: str
    """Node and index: ``v1.2``."""
    node: str
    kind: DeviceKind
    efficiency: float = 1.0
    """This device's own share of what its kind usually reaches."""
    price_per_hour: float = 0.0
    """Currency units, whatever the user counts in."""
    speed: Trace = FULL_SPEED
    """Over time, relative to full speed; 0 = lost."""

    def __repr__(self) -> str:
        return f"{self.name} ({self.kind.name})"
