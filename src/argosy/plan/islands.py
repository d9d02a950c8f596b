"""Define the island plan: groups of devices that each train by their own plan and exchange
parameters every few steps.

The algorithm is DiLoCo (arXiv 2311.08105), and with several fragments its streaming form (arXiv
2501.18512). Island i takes b[i] samples of every step's global batch. With theta the shared
parameters and theta[i] those of island i,

    (1)  w[i]     = b[i] / sum of b
    (2)  delta    = theta - sum of w[i] theta[i]           after H steps
    (3)  m        = momentum m + delta
    (4)  theta    = theta - rate (delta + momentum m)      with Nesterov momentum
         theta    = theta - rate m                         without
    (5)  theta[i] = theta                                  blocking
         theta[i] = mixing theta[i] + (1 - mixing) theta   overlapped

A fragment is a part of the parameters with an exchange of its own. Fragment p of P is exchanged
after the steps t with t = (p + 1) H / P modulo H. Overlapped by tau steps, (5) happens tau steps
after (2).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from argosy.plan.plan import Certificate, ClusterRef, ModelRef, Plan
from argosy.units import counted

# Number of values that share one scale in an exchange of 8-bit integers.
INT8_BLOCK = 1024


class Compression(StrEnum):
    """A number format that is used when islands exchange their differences."""

    NONE = "none"
    """32 bits per value."""
    BF16 = "bf16"
    INT8 = "int8"
    """8-bit integers, with one 32-bit scale per ``INT8_BLOCK`` values."""

    @property
    def bytes_per_value(self) -> float:
        """Return the bytes of one exchanged value, including its part of a scale."""
        return {"none": 4.0, "bf16": 2.0, "int8": 1.0 + 4.0 / INT8_BLOCK}[self.value]


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """An optimizer that applies SGD with momentum to the shared parameters, (3) and (4)."""

    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True


@dataclass(frozen=True, kw_only=True)
class IslandPrediction:
    """A prediction that the simulator makes for an island plan."""

    step_seconds: float
    """Seconds of one step, with its part of the exchange."""
    samples_per_second: float
    island_seconds: tuple[float, ...]
    """Seconds of one step, by island, without the exchange."""
    exchange_seconds: float
    """Seconds of one exchange of a fragment."""
    exchange_bytes: float
    """Bytes that an island sends over the outer links between two exchanges of the same
    fragment."""
    outer_bytes: float
    """Bytes of host memory in each island's first process for the shared parameters, their momentum
    and the values that are exchanged."""
    synchronous_seconds: float | None = None
    """Seconds of one step of the best synchronous plan; None if there is none."""


@dataclass(frozen=True, kw_only=True)
class IslandPlan:
    """A plan that consists of plans of islands and of the rules by which they exchange
    parameters."""

    islands: tuple[Plan, ...]
    """Plans of one model on disjoint parts of one cluster; the ``global_batch`` of each is its
    share of a step's samples."""
    sync_every: int
    """Steps between two exchanges of the same fragment, H."""
    fragments: int = 1
    overlap: int = 0
    """Number of steps that run during an exchange; 0: the islands wait for it."""
    mixing: float = 0.5
    """Weight of an island's own parameters when the result of an overlapped exchange arrives
    (5)."""
    outer: OuterOptimizer = OuterOptimizer()
    compression: Compression = Compression.NONE
    predicted: IslandPrediction | None = None
    certificate: Certificate | None = None

    @property
    def model(self) -> ModelRef:
        return self.islands[0].model

    @property
    def cluster(self) -> ClusterRef:
        return self.islands[0].cluster

    @property
    def global_batch(self) -> int:
        """Return the samples of a step, over all islands."""
        return sum(island.global_batch for island in self.islands)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return, per island, the index of its first sample in a step's global batch."""
        shares = [island.global_batch for island in self.islands]
        return tuple(sum(shares[:at]) for at in range(len(shares)))

    @property
    def period(self) -> int:
        """Return the steps between two exchanges of any fragment."""
        return self.sync_every // self.fragments

    @property
    def algorithm(self) -> str:
        """Return a description for certificates and figures: ``DiLoCo with 2 islands, an exchange
        every 100 steps``."""
        form = "streaming DiLoCo" if self.fragments > 1 or self.overlap else "DiLoCo"
        every = counted(self.sync_every, "step")
        head = f"{form} with {len(self.islands)} islands, an exchange every {every}"
        parts = f" in {self.fragments} fragments" if self.fragments > 1 else ""
        late = f", applied {counted(self.overlap, 'step')} later" if self.overlap else ""
        sent = "" if self.compression is Compression.NONE else f", as {self.compression}"
        return f"{head}{parts}{late}{sent}"

    def __repr__(self) -> str:
        return f"IslandPlan: {self.model.name} on {self.cluster.name}, {self.algorithm}"


def lead(plan: Plan) -> str:
    """Return the device of rank 0 of an island's plan, whose process exchanges parameters with
    other islands."""
    first = plan.devices[0].rpartition(".")[0]
    on_first_node = [name for name in plan.devices if name.rpartition(".")[0] == first]
    return min(on_first_node, key=lambda name: int(name.rpartition(".")[2]))
