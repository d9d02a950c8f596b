"""A run that somebody measured: the plan that ran, what it ran on, and how long an iteration took."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from argosy.cluster.topology import Cluster
from argosy.errors import bad_input
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Recompute, Replica, Stage
from argosy.schedule import ScheduleSpec
from argosy.workload.chain import Chain
from argosy.workload.profile import Profile


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One run."""

    name: str
    plan: Plan
    chain: Chain
    cluster: Cluster
    seconds: float
    """Of one iteration."""
    peak_bytes: float | None = None
    """Highest memory in use on any device; None: not measured."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Runs of one piece of software on one kind of machine, which one set of constants should explain."""

    source: str
    runs: tuple[MeasuredRun, ...]
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    """Measured layer times by device kind, in place of the roofline."""
    blocking: bool = False
    """Whether that software waits for transfers between stages instead of overlapping them."""

    def __repr__(self) -> str:
        return f"{self.source}: {len(self.runs)} runs"


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """An even plan as Megatron-LM names it: the same tensor, data and pipeline degree everywhere."""

    tensor: int
    data: int
    pipeline: int
    micro_batch: int
    """Samples of a replica."""
    global_batch: int
    recompute: Recompute = Recompute.NONE
    zero: int = 0

    @property
    def num_devices(self) -> int:
        return self.tensor * self.data * self.pipeline

    def __repr__(self) -> str:
        return f"t{self.tensor} d{self.data} p{self.pipeline} mb{self.micro_batch} gb{self.global_batch}"


def even_plan(degrees: Degrees, chain: Chain, cluster: Cluster) -> Plan:
    """Ranks in Megatron's order: tensor-parallel neighbours first, then data-parallel ones, then stages."""
    if degrees.num_devices > len(cluster.devices):
        expected = f"at most {len(cluster.devices)} devices, those of {cluster.name}"
        raise bad_input(expected, degrees.num_devices, where="tensor x data x pipeline")
    size = degrees.micro_batch * degrees.data
    if degrees.global_batch % size:
        expected = f"a multiple of micro_batch x data = {size}"
        raise bad_input(expected, degrees.global_batch, where="global_batch")
    names = [device.name for device in cluster.devices]
    stages = []
    for index, (first, end) in enumerate(_even_ranges(chain, degrees.pipeline)):
        at = index * degrees.tensor * degrees.data
        groups = [names[at + r * degrees.tensor : at + (r + 1) * degrees.tensor] for r in range(degrees.data)]
        replicas = tuple(Replica(devices=tuple(group), samples=degrees.micro_batch) for group in groups)
        stages.append(Stage(first=first, end=end, replicas=replicas, recompute=degrees.recompute, zero=degrees.zero))
    return Plan(
        model=ModelRef.of(chain),
        cluster=ClusterRef.of(cluster),
        global_batch=degrees.global_batch,
        micro_batch_size=size,
        num_micro_batches=degrees.global_batch // size,
        schedule=ScheduleSpec(),
        stages=tuple(stages),
    )


def _even_ranges(chain: Chain, pipeline: int) -> list[tuple[int, int]]:
    """Equal numbers of blocks; what comes before the blocks is with the first, what comes after with the last."""
    kinds = Counter(layer.kind for layer in chain.layers)
    block = max(kinds, key=lambda kind: kinds[kind])
    places = [index for index, layer in enumerate(chain.layers) if layer.kind == block]
    if len(places) % pipeline:
        raise bad_input(f"a divisor of the {len(places)} blocks of {chain.name}", pipeline, where="pipeline")
    each = len(places) // pipeline
    cuts = [0, *(places[each * stage] for stage in range(1, pipeline)), len(chain.layers)]
    return list(itertools.pairwise(cuts))
