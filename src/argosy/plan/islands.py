"""An island plan: groups of devices that each train by a plan of their own and exchange parameters
every few steps.

The algorithm is DiLoCo (arXiv 2311.08105), and with several fragments its streaming form (arXiv
2501.18512). Island i takes b[i] samples of every step's global batch. With theta the shared
parameters and theta[i] those of island i,

    (1)  w[i]   = b[i] / sum of b
    (2)  delta  = theta - sum of w[i] theta[i]                       after H steps
    (3)  m      = momentum m + delta
    (4)  theta  = theta - rate (delta + momentum m)    Nesterov;     theta - rate m    without
    (5)  theta[i] = theta                              blocking;     mixing theta[i] + (1 - mixing) theta   overlapped

A fragment is a part of the parameters with an exchange of its own. Fragment p of P is exchanged
after the steps t with t = (p + 1) H / P modulo H. Overlapped by tau steps, (5) happens tau steps
after (2).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from argosy.plan.plan import Certificate, ClusterRef, ModelRef, Plan
from argosy.units import counted

INT8_BLOCK = 1024
"""Values that share one scale in an exchange of 8-bit integers."""


class Compression(StrEnum):
    """In which numbers islands exchange their differences."""

    NONE = "none"
    """32 bits each."""
    BF16 = "bf16"
    INT8 = "int8"
    """8-bit integers, with one 32-bit scale for ``INT8_BLOCK`` of them."""

    @property
    def bytes_per_value(self) -> float:
        return {"none": 4.0, "bf16": 2.0, "int8": 1.0 + 4.0 / INT8_BLOCK}[self.value]


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """SGD with momentum on the shared parameters, (3) and (4)."""

    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True


@dataclass(frozen=True, kw_only=True)
class IslandPrediction:
    """What the simulator says an island plan will do."""

    step_seconds: float
    """Of one step, with its part of the exchange."""
    samples_per_second: float
    island_seconds: tuple[float, ...]
    """Of one step, by island, without the exchange."""
    exchange_seconds: float
    """Of one exchange of a fragment."""
    exchange_bytes: float
    """That an island sends over the outer links between two exchanges of the same fragment."""
    outer_bytes: float
    """Host memory of each island's first process for the shared parameters, their momentum and what
    is exchanged."""
    synchronous_seconds: float | None = None
    """Of one step of the best synchronous plan; None if there is none."""


@dataclass(frozen=True, kw_only=True)
class IslandPlan:
    """Plans of islands, and what they exchange when."""

    islands: tuple[Plan, ...]
    """Of one model on disjoint parts of one cluster; the ``global_batch`` of each is its share of a
    step's samples."""
    sync_every: int
    """Steps between two exchanges of the same fragment, H."""
    fragments: int = 1
    overlap: int = 0
    """Steps that go on during an exchange; 0: the islands wait for it."""
    mixing: float = 0.5
    """Weight of an island's own parameters when a result arrives that was overlapped (5)."""
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
        """Samples of a step, over all islands."""
        return sum(island.global_batch for island in self.islands)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Per island, the first of its samples in a step's global batch."""
        shares = [island.global_batch for island in self.islands]
        return tuple(sum(shares[:at]) for at in range(len(shares)))

    @property
    def period(self) -> int:
        """Steps between two exchanges of any fragment."""
        return self.sync_every // self.fragments

    @property
    def algorithm(self) -> str:
        """``DiLoCo with 2 islands, an exchange every 100 steps``: what its certificate and its
        figures are about."""
        form = "streaming DiLoCo" if self.fragments > 1 or self.overlap else "DiLoCo"
        head = f"{form} with {len(self.islands)} islands, an exchange every {counted(self.sync_every, 'step')}"
        parts = f" in {self.fragments} fragments" if self.fragments > 1 else ""
        late = f", applied {counted(self.overlap, 'step')} later" if self.overlap else ""
        sent = "" if self.compression is Compression.NONE else f", as {self.compression}"
        return f"{head}{parts}{late}{sent}"

    def __repr__(self) -> str:
        return f"IslandPlan: {self.model.name} on {self.cluster.name}, {self.algorithm}"


def lead(plan: Plan) -> str:
    """The device of an island's plan whose process exchanges parameters with other islands: that of
    rank 0."""
    first = plan.devices[0].rpartition(".")[0]
    here = [name for name in plan.devices if name.rpartition(".")[0] == first]
    return min(here, key=lambda name: int(name.rpartition(".")[2]))
