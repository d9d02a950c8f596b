"""Define device kinds (as datasheets describe them) and devices (one of a kind in a node of a
cluster)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from argosy.cluster.trace import Trace
from argosy.dtype import Dtype
from argosy.errors import bad_input
from argosy.units import SIZE

# Speed of a device that never changes.
FULL_SPEED = Trace.constant(1.0)


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A set of shares of a device's peaks that training steps reach; the defaults are for kinds
    without measurements."""

    products: tuple[tuple[Dtype, float], ...] = ()
    """Share of the peak that large matrix products reach, per dtype; a missing dtype reaches
    ``USUAL``."""
    attention: float = 0.5
    """Share of the peak for 16-bit numbers that attention proper reaches."""
    passes: float = 2.5
    """Times that kept bytes and weights cross the memory bus in a forward."""
    error: float = 0.5
    """Relative error below which nine of ten measured steps are predicted."""
    source: str = ""

    USUAL: ClassVar[float] = 0.725
    """Share of the peak that matrix products reach if nothing was measured."""

    @cached_property
    def _shares(self) -> dict[Dtype, float]:
        return dict(self.products)

    def share(self, dtype: Dtype) -> float:
        """Return the share of the peak that products in a dtype reach."""
        return self._shares.get(dtype, self.USUAL)


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """A model of accelerator, as its manufacturer describes it."""

    name: str
    vendor: str
    memory: float
    """Bytes."""
    memory_bandwidth: float
    """Bytes/s."""
    flops: tuple[tuple[Dtype, float], ...]
    """Dense matrix FLOP/s per dtype, without structured sparsity; a missing dtype is not
    supported."""
    source: str
    """Source of the figures."""
    reached: Reached = Reached()
    """Shares of these figures that programs reach with a framework's kernels."""
    tuned: Reached = Reached()
    """Shares that they reach with kernels tuned by hand for the generation, as Transformer
    Engine's; those of ``reached`` if nothing was measured."""
    host_bandwidth: float = 12e9
    """Bytes/s that copies to and from pinned host memory reach, in each direction."""
    exchange_rate: float = math.inf
    """Bytes/s that the device would send if all of its multiprocessors did; infinite if it sends
    without them, or if that is not known."""

    @cached_property
    def _rates(self) -> dict[Dtype, float]:
        return dict(self.flops)

    @property
    def fastest(self) -> float:
        """Return the largest of its rates (FLOP/s)."""
        return max(rate for _, rate in self.flops)

    def peak(self, dtype: Dtype) -> float:
        """Return the dense FLOP/s for ``dtype``. A kind without tf32 multiplies tf32 at its fp32
        rate."""
        rates = self._rates
        if dtype is Dtype.TF32 and dtype not in rates:
            dtype = Dtype.FP32
        if dtype not in rates:
            known = ", ".join(sorted(rates))
            raise bad_input(f"a dtype that {self.name} has ({known})", str(dtype), "dtype")
        return rates[dtype]

    def __repr__(self) -> str:
        return f"{self.name} ({self.vendor}, {SIZE.short(self.memory)})"


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator that belongs to a cluster."""

    name: str
    """Node and index: ``v1.2``."""
    node: str
    kind: DeviceKind
    efficiency: float = 1.0
    """Share of what its kind usually reaches that this device reaches."""
    price_per_hour: float = 0.0
    """Price in the user's currency."""
    speed: Trace = FULL_SPEED
    """Speed over time, relative to full speed; 0 = lost."""

    def __repr__(self) -> str:
        return f"{self.name} ({self.kind.name})"
