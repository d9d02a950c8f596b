"""Define the plan: which layers run where, split how, in which order. ``file`` reads and writes it
as JSON."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping
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
    """A choice of activations that a backward computes again instead of keeping them from the
    forward."""

    NONE = "none"
    SELECTIVE = "selective"
    """Computes again what needs no projection: norms, activation functions, scores of unfused
    attention."""
    FULL = "full"
    """Computes everything again except each layer's input."""

    # That of enumerations is written in Python, and searches look prices up by this.
    __hash__ = str.__hash__


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """A reference that names a model and its size; ``plan.model.planned_chain`` returns its
    chain."""

    name: str
    sequence_length: int
    dtype: Dtype
    optimizer: str = "adamw"
    content: str = ""
    """Layers of a captured program as canonical JSON, so that its plan is complete on its own; else
    empty."""
    tuning: Tuning = FULL
    """Choice of the weights that are trained."""
    powersgd: int = 0
    """Rank of the matrices as which gradients are summed; 0: gradients are summed whole."""

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
    """Return, for each layer of a captured program, one past its last forward operation."""
    return tuple(layer["operations"][1] for layer in json.loads(content)["layers"])


@dataclass(frozen=True, kw_only=True)
class ClusterRef:
    """A reference that identifies the cluster that the plan was made for."""

    name: str
    hash: str
    content: str
    """The cluster file as canonical JSON, so that a plan is complete on its own."""

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterRef:
        return cls(name=cluster.name, hash=cluster.hash, content=cluster.content)


# Name of the default cost model in certificates and reports.
DEFAULT_COST_MODEL = "default cost model"


@dataclass(frozen=True, kw_only=True)
class CostModelRef:
    """A reference that identifies the cost model that the plan was made with; ``cost.remembered``
    rebuilds it."""

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
        """Return a description for people: ``profile of H200 and calibration (3f2a91c0)``."""
        content = json.loads(self.content)
        kinds = [profile["device"] for profile in content.get("profiles", [])]
        parts = [f"profile of {', '.join(kinds)}"] if kinds else []
        parts += ["calibration"] if content.get("constants") else []
        return f"{' and '.join(parts) or DEFAULT_COST_MODEL} ({self.hash[:8]})"


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A group of devices that runs a stage on samples of its own; each part of the sequence has a
    tensor-parallel group."""

    devices: tuple[str, ...]
    """Names of the devices, part by part."""
    samples: int
    """Samples of every micro-batch."""
    ratios: tuple[float, ...] = ()
    """Shares of the work by device, which sum to 1; empty: equal shares."""

    @property
    def width(self) -> int:
        return len(self.devices)

    @property
    def shares(self) -> tuple[float, ...]:
        """Return ``ratios``, or equal ones if it is empty."""
        return self.ratios or (1 / self.width,) * self.width

    @property
    def members(self) -> Iterator[tuple[str, float]]:
        """Return the devices, each with its share."""
        return zip(self.devices, self.shares, strict=True)

    def parts(self, context: int) -> tuple[tuple[str, ...], ...]:
        """Return the tensor-parallel groups, one for each part of the sequence.

        >>> Replica(devices=("a", "b", "c", "d"), samples=1).parts(2)
        (('a', 'b'), ('c', 'd'))
        """
        width = self.width // context
        return tuple(self.devices[at : at + width] for at in range(0, self.width, width))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A range of layers that is run by one or more replicas."""

    first: int
    end: int
    """One past the last layer."""
    replicas: tuple[Replica, ...]
    recompute: Recompute = Recompute.NONE
    zero: int = 0
    """ZeRO level: holders keep only a part of nothing (0), optimizer state (1), also gradients (2),
    also weights (3)."""
    context: int = 1
    """Parts into which every replica cuts the sequence."""
    expert: int = 1
    """Number of consecutive holders that hold the experts together."""
    experts: tuple[int, ...] = ()
    """Experts of a layer that each holder of a group has, in its order; empty: equally many
    each."""
    offload: Offload = NO_OFFLOAD
    """Choice of what is kept outside the devices."""

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
        """Return whether devices of some replica have unequal shares of its work."""
        return any(len(set(replica.ratios)) > 1 for replica in self.replicas)

    @cached_property
    def parts_are_alone(self) -> bool:
        """Return whether each part of a sequence, or each replica if the sequence is whole, has one
        device."""
        return all(replica.width == self.context for replica in self.replicas)

    def tensor_share(self, share: float) -> float:
        """Return the share of its tensor-parallel group's weights that a device with ``share`` of
        its replica's work has."""
        return 1.0 if self.context > 1 and self.parts_are_alone else share * self.context

    @property
    def expert_shares(self) -> tuple[float, ...]:
        """Return the share of all experts that each holder of a group has."""
        total = sum(self.experts)
        return (
            tuple(count / total for count in self.experts)
            if total
            else (1 / self.expert,) * self.expert
        )

    @property
    def num_holders(self) -> int:
        """Return the number of tensor-parallel groups that hold the stage's weights."""
        return len(self.replicas) * self.context

    @property
    def holders(self) -> tuple[tuple[str, ...], ...]:
        """Return the tensor-parallel groups: every part of every replica, in order. Each holds the
        stage's weights once, experts aside."""
        return tuple(part for replica in self.replicas for part in replica.parts(self.context))

    @property
    def expert_groups(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Return the groups of holders that hold all experts together and send each other
        tokens."""
        holders = self.holders
        return tuple(holders[at : at + self.expert] for at in range(0, len(holders), self.expert))

    @property
    def expert_copies(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Return the groups of holders that have the same experts and sum their gradients."""
        return tuple(self.holders[at :: self.expert] for at in range(self.expert))


@dataclass(frozen=True, kw_only=True)
class PolicyRule:
    """A rule that switches to a schedule while an edge's bandwidth is below a threshold; if several
    rules hold, that of the lowest threshold applies."""

    edge: str
    below: float
    """Bytes/s."""
    schedule: ScheduleSpec


class Collective(StrEnum):
    """A collective that groups of devices of a stage do."""

    TENSOR = "tensor"
    """Reductions in tensor-parallel groups."""
    WEIGHTS = "weights"
    """Sums of gradients over the holders of the same weights, or under ZeRO scatters of gradients
    and gathers of weights."""


class Algorithm(StrEnum):
    """An algorithm that carries out a collective; ``cost.collective`` lists the bytes that devices
    send."""

    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"
    PADDED = "padded"
    """A ring of shards as large as the largest."""
    GROUPED = "grouped"
    """Every shard broadcast on its own."""


@dataclass(frozen=True, kw_only=True)
class CollectiveChoice:
    """A choice of the algorithm that the groups of a stage use for a collective."""

    collective: Collective
    stage: int
    algorithm: Algorithm


@dataclass(frozen=True, kw_only=True)
class Plan(PlanMethods):
    """A plan, which describes how a model runs on a cluster."""

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
    """Reference to the cost model; None: the default one."""
    programs: tuple[GroupProgram, ...] = ()
    """Programs of tensor-parallel groups, in a plan for a captured program."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Return every device in use, once, in stage order."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    @property
    def bare(self) -> Plan:
        """Return the plan without prediction, certificate, search record, runner-ups and left-out
        devices."""
        return replace(
            self, predicted=None, certificate=None, search=None, runner_ups=(), left_out=()
        )

    @property
    def cut(self) -> tuple[int, ...] | None:
        """Return the stage of every operation of the forward; None unless the plan is for a
        captured program."""
        if not self.model.content:
            return None
        stages = [at for at, stage in enumerate(self.stages) for _ in range(stage.first, stage.end)]
        return tuple(stages[layer] for layer in self.operation_layers or ())

    @property
    def operation_layers(self) -> tuple[int, ...] | None:
        """Return the layer of every operation of the forward; None unless the plan is for a
        captured program."""
        if not self.model.content:
            return None
        bounds = itertools.pairwise((0, *_operation_ends(self.model.content)))
        return tuple(at for at, (first, end) in enumerate(bounds) for _ in range(first, end))

    def zero_of(self, stages: Collection[int], num_layers: int) -> int:
        """Return the ZeRO level of weights that are in these stages, and in ``num_layers`` layers
        of each.

        Weights in several stages, and from level 2 on weights in several layers of one stage, are
        kept whole: level 0.
        """
        (first, *others) = sorted(stages)
        zero = self.stages[first].zero
        return 0 if others or (zero > 1 and num_layers > 1) else zero

    def algorithm(self, collective: Collective, stage: int) -> Algorithm:
        """Return the algorithm that the plan chooses, or by default a ring, which is padded if the
        shards of a tensor-parallel group are unequal."""
        for choice in self.collectives:
            if choice.collective is collective and choice.stage == stage:
                return choice.algorithm
        uneven = collective is Collective.TENSOR and self.stages[stage].is_uneven
        return Algorithm.PADDED if uneven else Algorithm.RING

    def schedule_at(self, bandwidths: Mapping[str, float]) -> ScheduleSpec:
        """Return the schedule that the policy prescribes for bandwidths (bytes/s) by edge.

        Of the rules that hold, the one whose edge has fallen furthest below its threshold applies,
        and of several rules of an edge the one with the lowest threshold; if none holds, the plan's
        own schedule.
        """
        lowest: dict[str, PolicyRule] = {}
        for rule in sorted(self.policy, key=lambda rule: rule.below):
            if bandwidths.get(rule.edge, math.inf) < rule.below:
                lowest.setdefault(rule.edge, rule)
        if not lowest:
            return self.schedule
        return min(lowest.values(), key=lambda rule: bandwidths[rule.edge] / rule.below).schedule

    def __repr__(self) -> str:
        stages = counted(len(self.stages), "stage")
        micro_batches = counted(self.num_micro_batches, "micro-batch", "micro-batches")
        return (
            f"Plan: {self.model.name} on {self.cluster.name}, {stages}, "
            f"{micro_batches} of {self.micro_batch_size}, {self.schedule!r}"
        )
