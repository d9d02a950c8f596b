"""The plan: which layers run where, split how, in which order. A value; ``file`` reads and writes
it as JSON."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

from argosy.cluster.topology import Cluster, canonical
from argosy.dtype import Dtype
from argosy.plan.group_program import GroupProgram
from argosy.plan.methods import PlanMethods
from argosy.plan.offload import NO_OFFLOAD, Offload
from argosy.plan.outcome import Certificate as Certificate
from argosy.plan.outcome import LeftOut as LeftOut
from argosy.plan.outcome import Predicted as Predicted
from argosy.plan.outcome import RunnerUp as RunnerUp
from argosy.plan.outcome import Search as Search
from argosy.schedule import ScheduleSpec
from argosy.units import counted
from argosy.workload.chain import Chain
from argosy.workload.layers_file import layers_to_dict
from argosy.workload.tuning import FULL, Tuning


class Recompute(StrEnum):
    """What is computed again in the backward instead of being kept from the forward."""

    NONE = "none"
    SELECTIVE = "selective"
    """What comes back without a projection: norms, activation functions, unfused attention's
    scores."""
    FULL = "full"
    """Everything but each layer's input."""


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """Which model, at which size; ``plan.model.planned_chain`` gives its chain."""

    name: str
    sequence_length: int
    dtype: Dtype
    optimizer: str = "adamw"
    content: str = ""
    """Of a captured program, its layers as canonical JSON, so that its plan is whole on its own;
    else empty."""
    tuning: Tuning = FULL
    """Which of its weights are trained."""
    powersgd: int = 0
    """Rank of the matrices as which its gradients are summed; 0: they are summed as they are."""

    @classmethod
    def of(cls, chain: Chain) -> ModelRef:
        return cls(
            name=chain.name,
            sequence_length=chain.sequence_length,
            dtype=chain.dtype,
            optimizer=chain.optimizer,
            content=canonical(layers_to_dict(chain.layers)) if chain.is_captured else "",
            tuning=chain.tuning,
            powersgd=chain.powersgd,
        )


@lru_cache(maxsize=8)
def _operation_ends(content: str) -> tuple[int, ...]:
    """Of a captured program's layers, one past the last forward operation of each."""
    return tuple(layer["operations"][1] for layer in json.loads(content)["layers"])


@dataclass(frozen=True, kw_only=True)
class ClusterRef:
    """Which cluster the plan was made for."""

    name: str
    hash: str
    content: str
    """The cluster file as canonical JSON, so that a plan is whole on its own."""

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterRef:
        return cls(name=cluster.name, hash=cluster.hash, content=cluster.content)


DEFAULT_COST_MODEL = "default cost model"


@dataclass(frozen=True, kw_only=True)
class CostModelRef:
    """Which cost model the plan was made with; ``cost.remembered`` rebuilds it."""

    hash: str
    content: str
    """Canonical JSON: ``constants`` that differ from the default ones, and ``profiles`` with the
    measured times that this model on these device kinds uses."""

    @classmethod
    def of(cls, content: dict[str, Any]) -> CostModelRef:
        text = canonical(content)
        return cls(hash=hashlib.sha256(text.encode()).hexdigest(), content=text)

    @property
    def words(self) -> str:
        """``profile of H200 and calibration (3f2a91c0)``."""
        content = json.loads(self.content)
        kinds = [profile["device"] for profile in content.get("profiles", [])]
        parts = [f"profile of {', '.join(kinds)}"] if kinds else []
        parts += ["calibration"] if content.get("constants") else []
        return f"{' and '.join(parts) or DEFAULT_COST_MODEL} ({self.hash[:8]})"


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A group of devices that runs a stage on samples of its own: parts of the sequence, each a
    tensor-parallel group."""

    devices: tuple[str, ...]
    """Part by part."""
    samples: int
    """Its share of every micro-batch."""
    ratios: tuple[float, ...] = ()
    """How its work is split over the devices; sums to 1. Empty: evenly."""

    @property
    def width(self) -> int:
        return len(self.devices)

    @property
    def shares(self) -> tuple[float, ...]:
        """``ratios``, or equal ones."""
        return self.ratios or (1 / self.width,) * self.width

    def parts(self, context: int) -> tuple[tuple[str, ...], ...]:
        """The tensor-parallel groups, one for each part of the sequence.

        >>> Replica(devices=("a", "b", "c", "d"), samples=1).parts(2)
        (('a', 'b'), ('c', 'd'))
        """
        width = self.width // context
        return tuple(self.devices[at : at + width] for at in range(0, self.width, width))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A range of layers and the replicas that run it."""

    first: int
    end: int
    """One past the last layer."""
    replicas: tuple[Replica, ...]
    recompute: Recompute = Recompute.NONE
    zero: int = 0
    """What the holders keep only a part of: 0 nothing, 1 optimizer state, 2 and gradients, 3 and
    weights."""
    context: int = 1
    """Parts into which every replica cuts the sequence."""
    expert: int = 1
    """Holders that follow one another and hold the experts together."""
    experts: tuple[int, ...] = ()
    """Experts of a layer that each holder of a group has, in its order. Empty: as many each."""
    offload: Offload = NO_OFFLOAD
    """What is kept outside the devices."""

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(replica.devices for replica in self.replicas))

    @cached_property
    def num_devices(self) -> int:
        return sum(replica.width for replica in self.replicas)

    @property
    def num_layers(self) -> int:
        return self.end - self.first

    @property
    def is_uneven(self) -> bool:
        """Whether devices of some replica have unequal shares of its work."""
        return any(len(set(replica.ratios)) > 1 for replica in self.replicas)

    @cached_property
    def parts_are_alone(self) -> bool:
        """Whether every part of a sequence, or every replica where it is whole, has one device."""
        return all(replica.width == self.context for replica in self.replicas)

    def tensor_share(self, share: float) -> float:
        """Of a device with this share of its replica's work, the share of its tensor-parallel
        group's weights."""
        return 1.0 if self.context > 1 and self.parts_are_alone else share * self.context

    @property
    def expert_shares(self) -> tuple[float, ...]:
        """Of all experts, those that each holder of a group has."""
        total = sum(self.experts)
        return (
            tuple(count / total for count in self.experts)
            if total
            else (1 / self.expert,) * self.expert
        )

    @property
    def num_holders(self) -> int:
        return len(self.replicas) * self.context

    @property
    def holders(self) -> tuple[tuple[str, ...], ...]:
        """The tensor-parallel groups, each of which holds the stage's weights once, experts aside:
        every part of every replica, in order."""
        return tuple(part for replica in self.replicas for part in replica.parts(self.context))

    @property
    def expert_groups(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Holders that hold all experts together and send each other tokens."""
        holders = self.holders
        return tuple(holders[at : at + self.expert] for at in range(0, len(holders), self.expert))

    @property
    def expert_copies(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Holders of the same experts, which sum their gradients."""
        return tuple(self.holders[at :: self.expert] for at in range(self.expert))


@dataclass(frozen=True, kw_only=True)
class PolicyRule:
    """Which schedule to switch to while an edge's bandwidth is below a threshold; of several that
    hold, the lowest."""

    edge: str
    below: float
    """Bytes/s."""
    schedule: ScheduleSpec


class Collective(StrEnum):
    """What groups of devices of a stage do together."""

    TENSOR = "tensor"
    """The reductions of its tensor-parallel groups."""
    WEIGHTS = "weights"
    """Gradients summed, or under ZeRO scattered and weights gathered, over the holders that have
    them."""


class Algorithm(StrEnum):
    """How a collective is done; ``cost.collective`` says who sends what to whom."""

    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"
    PADDED = "padded"
    """A ring of shards as large as the largest."""
    GROUPED = "grouped"
    """Every shard broadcast on its own."""


@dataclass(frozen=True, kw_only=True)
class CollectiveChoice:
    """Which algorithm the groups of a stage use for which collective."""

    collective: Collective
    stage: int
    algorithm: Algorithm


@dataclass(frozen=True, kw_only=True)
class Plan(PlanMethods):
    """How a model runs on a cluster."""

    model: ModelRef
    cluster: ClusterRef
    global_batch: int
    """Samples per iteration: ``micro_batch_size * num_micro_batches``."""
    micro_batch_size: int
    num_micro_batches: int
    schedule: ScheduleSpec
    stages: tuple[Stage, ...]
    collectives: tuple[CollectiveChoice, ...] = ()
    policy: tuple[PolicyRule, ...] = ()
    predicted: Predicted | None = None
    certificate: Certificate | None = None
    search: Search | None = None
    runner_ups: tuple[RunnerUp, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    cost_model: CostModelRef | None = None
    """None: the default one."""
    programs: tuple[GroupProgram, ...] = ()
    """What tensor-parallel groups do, in a plan for a captured program."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device in use, once, in stage order."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    @property
    def bare(self) -> Plan:
        """Without what was said about it: what is predicted and proven, what finding it took, what
        lost."""
        return replace(
            self, predicted=None, certificate=None, search=None, runner_ups=(), left_out=()
        )

    @property
    def cut(self) -> tuple[int, ...] | None:
        """The stage of every operation of the forward, in a plan for a captured program; else
        None."""
        if not self.model.content:
            return None
        stages = [at for at, stage in enumerate(self.stages) for _ in range(stage.first, stage.end)]
        return tuple(stages[layer] for layer in self.operation_layers or ())

    @property
    def operation_layers(self) -> tuple[int, ...] | None:
        """The layer of every operation of the forward, in a plan for a captured program; else
        None."""
        if not self.model.content:
            return None
        bounds = itertools.pairwise((0, *_operation_ends(self.model.content)))
        return tuple(at for at, (first, end) in enumerate(bounds) for _ in range(first, end))

    def zero_of(self, stages: Collection[int], num_layers: int) -> int:
        """The level of ZeRO at which weights of some stages are kept that ``num_layers`` of a stage
        use.

        Weights in several stages, and from level 2 on in several layers of one, are kept whole:
        level 0.
        """
        (first, *others) = sorted(stages)
        zero = self.stages[first].zero
        return 0 if others or (zero > 1 and num_layers > 1) else zero

    def algorithm(self, collective: Collective, stage: int) -> Algorithm:
        """As the plan says; else a ring, padded where the shards of a tensor-parallel group are
        unequal."""
        for choice in self.collectives:
            if choice.collective is collective and choice.stage == stage:
                return choice.algorithm
        uneven = collective is Collective.TENSOR and self.stages[stage].is_uneven
        return Algorithm.PADDED if uneven else Algorithm.RING

    def schedule_at(self, bandwidths: Mapping[str, float]) -> ScheduleSpec:
        """What the policy says for bandwidths (bytes/s) by edge: of the rules that hold, the one
        whose edge has fallen furthest below its threshold, and of an edge's several the lowest; the
        plan's own schedule where none holds."""
        lowest: dict[str, PolicyRule] = {}
        for rule in sorted(self.policy, key=lambda rule: rule.below):
            if bandwidths.get(rule.edge, math.inf) < rule.below:
                lowest.setdefault(rule.edge, rule)
        if not lowest:
            return self.schedule
        return min(lowest.values(), key=lambda rule: bandwidths[rule.edge] / rule.below).schedule

    def __repr__(self) -> str:
        return (
            f"Plan: {self.model.name} on {self.cluster.name}, {counted(len(self.stages), 'stage')}, "
            f"{counted(self.num_micro_batches, 'micro-batch', 'micro-batches')} of {self.micro_batch_size}, "
            f"{self.schedule!r}"
        )
