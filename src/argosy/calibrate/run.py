"""Define a measured run: the plan that ran, its model and cluster, and the seconds of an
iteration."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from argosy.cluster.topology import Cluster
from argosy.cost.calibration import Calibration
from argosy.errors import bad_input
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Recompute, Replica, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.chain import Chain
from argosy.workload.profile import Profile

Settings = Mapping[str, Any]
"""Fields of a ``Calibration`` by name."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run that was measured."""

    name: str
    plan: Plan
    chain: Chain
    cluster: Cluster
    seconds: float
    """Seconds of one iteration."""
    peak_bytes: float | None = None
    """Highest memory in use on any device; None: not measured."""
    settings: Settings = field(default_factory=dict)
    """Constants that this run states and no fit may change: ``compiled``, ``sequence_parallel``,
    ``selective``, ``gradient_dtype``, ``reduce_dtype``."""
    row: int | None = None
    """Row of the table that the run was read from; None if runs are not rows of a table."""

    @classmethod
    def even(cls, degrees: Degrees, chain: Chain, cluster: Cluster, **facts: Any) -> MeasuredRun:
        """Return a run whose plan divides everything evenly, by its degrees of parallelism; raise
        an ``InputError`` if the devices lack the dtype."""
        cluster.devices[0].kind.peak(chain.dtype)
        plan = even_plan(degrees, chain, cluster)
        return cls(plan=plan, chain=chain, cluster=cluster, **facts)

    def under(self, calibration: Calibration) -> Calibration:
        """Return the calibration with the constants that the run states."""
        return replace(calibration, **self.settings)


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """A set of runs of one piece of software on one kind of machine, which one set of constants
    should explain."""

    source: str
    runs: tuple[MeasuredRun, ...]
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    """Measured layer times by device kind, in place of the roofline."""
    blocking: float = False
    """Share of the transfers between stages for which that software waits instead of overlapping
    them."""
    prefetch: bool = False
    """Whether that software exchanges what ZeRO shards layer by layer, beside compute."""
    left_out: tuple[str, ...] = ()
    """Why rows of a table were left out, a sentence for each."""

    def __repr__(self) -> str:
        return f"{self.source}: {len(self.runs)} runs"


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """An even plan as Megatron-LM describes it: all stages have equal degrees."""

    micro_batch: int
    """Samples of a replica."""
    global_batch: int
    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    context: int = 1
    """Parts of the sequence."""
    expert: int = 1
    chunks: int = 1
    """Stages of a pipeline worker; more than 1 is an interleaved schedule."""
    recompute: Recompute = Recompute.NONE
    zero: int = 0
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    cuts: tuple[int, ...] = ()
    """Blocks of each stage; empty: as even as possible."""

    @property
    def num_devices(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.chunks

    def __repr__(self) -> str:
        degrees = {
            "t": self.tensor,
            "d": self.data,
            "p": self.pipeline,
            "c": self.context,
            "e": self.expert,
        }
        shown = [
            f"{name}{degree}" for name, degree in degrees.items() if degree > 1 or name in "tdp"
        ]
        shown += [f"v{self.chunks}"] if self.chunks > 1 else []
        return " ".join([*shown, f"mb{self.micro_batch}", f"gb{self.global_batch}"])


def even_plan(degrees: Degrees, chain: Chain, cluster: Cluster) -> Plan:
    """Build the plan of these degrees, with ranks in Megatron's order: tensor-parallel neighbours
    first, then parts of the sequence, then data-parallel replicas, then stages."""
    if degrees.num_devices > len(cluster.devices):
        expected = f"at most {len(cluster.devices)} devices, those of {cluster.name}"
        raise bad_input(expected, degrees.num_devices, "tensor x context x data x pipeline")
    size = degrees.micro_batch * degrees.data
    if degrees.global_batch % size:
        expected = f"a multiple of micro_batch x data = {size}"
        raise bad_input(expected, degrees.global_batch, "global_batch")
    names = [device.name for device in cluster.devices]
    width = degrees.tensor * degrees.context
    stages = []
    for index, (first, end) in enumerate(_ranges(chain, degrees)):
        at = index % degrees.pipeline * width * degrees.data
        groups = [names[at + r * width : at + (r + 1) * width] for r in range(degrees.data)]
        has_experts = any(layer.num_experts for layer in chain.layers[first:end])
        stages.append(
            Stage(
                first=first,
                end=end,
                replicas=tuple(
                    Replica(devices=tuple(group), samples=degrees.micro_batch) for group in groups
                ),
                recompute=degrees.recompute,
                zero=degrees.zero,
                context=degrees.context,
                expert=degrees.expert if has_experts else 1,
            )
        )
    kind = ScheduleKind.INTERLEAVED if degrees.chunks > 1 else degrees.schedule
    return Plan(
        model=ModelRef.of(chain),
        cluster=ClusterRef.of(cluster),
        global_batch=degrees.global_batch,
        micro_batch_size=size,
        num_micro_batches=degrees.global_batch // size,
        schedule=ScheduleSpec(kind=kind, chunks=degrees.chunks),
        stages=tuple(stages),
    )


def _ranges(chain: Chain, degrees: Degrees) -> list[tuple[int, int]]:
    """Return the range of layers of each stage; layers before the blocks are in the first stage,
    those after them in the last."""
    kinds = Counter(layer.kind for layer in chain.layers)
    block = max(kinds, key=lambda kind: kinds[kind])
    places = [index for index, layer in enumerate(chain.layers) if layer.kind == block]
    count = degrees.num_stages
    if count > len(places):
        raise bad_input(
            f"at most {len(places)} stages, one for each block of {chain.name}", count, "pipeline"
        )
    fewest, more = divmod(len(places), count)
    counts = degrees.cuts or tuple(fewest + (stage >= count - more) for stage in range(count))
    if len(counts) != count or sum(counts) != len(places) or min(counts) < 1:
        expected = f"the blocks of {count} stages, {len(places)} together"
        raise bad_input(expected, "/".join(map(str, counts)), "cuts")
    starts = list(itertools.accumulate(counts, initial=0))[1:-1]
    return list(itertools.pairwise([0, *(places[start] for start in starts), len(chain.layers)]))
