"""List what other training systems run: one table that limits the search and checks plans for the
exporters.

A row names a system, the version that its exporter is written for, and the values that a plan for
it may have. A system with *one grid* has one number of replicas, one tensor-parallel width, one
context and expert parallelism, one ZeRO level and one kind of recomputation for the whole pipeline,
and equal shares of the samples; stages differ in layers and devices only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from argosy.dtype import Dtype
from argosy.plan.plan import Plan, Recompute, Stage
from argosy.schedule import ScheduleKind
from argosy.workload.chain import Chain
from argosy.workload.systems import Selective


class TargetName(StrEnum):
    """A system that a search can be restricted to."""

    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"
    FLAGSCALE = "flagscale"
    TORCH = "torch"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A training system that plans can be exported to, with what it runs: a row of the table."""

    name: str
    """Name as the system writes it."""
    version: str
    """Version that the export is written for and that ``make test-doors`` reads it with."""
    calibration: str
    """Name of the bundled calibration that describes what the system keeps and sums."""
    dtypes: tuple[Dtype, ...]
    schedules: tuple[ScheduleKind, ...]
    zero: tuple[int, ...]
    """ZeRO levels for a pipeline of several stages."""
    zero_alone: tuple[int, ...] = ()
    """ZeRO levels for a plan of one stage; empty: those for several."""
    shards_splits: bool = False
    """Whether sequences and experts are split over ranks that shard weights, so that ZeRO 0 has
    neither."""
    shards_adam_only: bool = False
    """Whether ZeRO divides the state of Adam and AdamW only."""
    optimizers: tuple[str, ...] | None = None
    """Optimizers that an export can name; None: any, because the user's program makes it."""
    recompute: tuple[Recompute, ...]
    selective: Selective | None = None
    """What selective recomputation means there, if plans of another meaning do not fit."""
    one_grid: bool = True
    """Whether the whole pipeline has one grid; else every stage has its own, with equal shares."""
    one_recompute: bool = True
    """Whether all stages have the same recomputation."""
    max_width: int | None = None
    """Largest number of devices of a tensor-parallel group; None: any number."""
    max_context: int | None = None
    max_expert: int | None = None
    mixed: bool = True
    """Whether a stage may have devices of several kinds."""
    whole_hosts: bool = False
    """Whether ranks are numbered host by host, so that a stage takes whole hosts."""
    needs_blocks: bool = False
    """Whether every stage must have a block, not only an embedding or a head."""

    @property
    def full_name(self) -> str:
        """Return name and version: ``torchtitan 0.3.0``."""
        return f"{self.name} {self.version}"

    def levels(self, num_stages: int, optimizer: str) -> tuple[int, ...]:
        """Return the ZeRO levels that a plan with ``num_stages`` may have."""
        if self.shards_adam_only and optimizer not in ("adam", "adamw"):
            return (0,)
        return self.zero if num_stages > 1 or not self.zero_alone else self.zero_alone

    def recomputations(self, chain: Chain) -> tuple[Recompute, ...]:
        """Return the kinds of recomputation that plans of a chain may have."""
        if self.selective in (None, chain.selective):
            return self.recompute
        return tuple(kind for kind in self.recompute if kind is not Recompute.SELECTIVE)

    def runs(self, plan: Plan, chain: Chain) -> bool:
        """Return whether the stages of a plan are as equal as the target requires."""
        if plan.offloads:
            return False
        levels = {stage.zero for stage in plan.stages if has_holders(stage)}
        kinds = {stage.recompute for stage in plan.stages}
        if (
            len(levels) > 1
            or not levels <= set(self.levels(len(plan.stages), plan.model.optimizer))
            or not self._recomputes(kinds)
        ):
            return False
        splits = {max(stage.context, stage.expert) for stage in plan.stages}
        if self.shards_splits and not (
            (0 not in levels or max(splits) == 1)
            and all(experts_divide(stage, chain) for stage in plan.stages)
        ):
            return False
        parts = {
            position_parts(replica.width // stage.context, stage.context)
            for stage in plan.stages
            for replica in stage.replicas
        }
        if chain.sequence_length % math.lcm(*parts):
            return False
        if self.needs_blocks and not all(has_block(stage, chain) for stage in plan.stages):
            return False
        if len({stage.context for stage in plan.stages}) > 1:
            return False
        return not self.one_grid or len({stage.expert for stage in plan.stages}) == 1

    def _recomputes(self, kinds: set[Recompute]) -> bool:
        """Return whether the target runs these kinds together; every system has one setting of
        selective recomputation for all stages."""
        is_one = len(kinds) == 1
        return is_one if self.one_recompute else is_one or Recompute.SELECTIVE not in kinds


def has_block(stage: Stage, chain: Chain) -> bool:
    return any(layer.kind == "block" for layer in chain.layers_of(stage))


def position_parts(width: int, context: int) -> int:
    """Return the number that must divide a sequence's length: its parts in a tensor-parallel
    group of this width, times two parts per device that shares the sequence."""
    return width * (2 * context if context > 1 else 1)


def experts_divide(stage: Stage, chain: Chain) -> bool:
    """Return whether experts can be spread over the parts of a sequence first, and whole experts
    over a tensor-parallel group."""
    holders = stage.expert * stage.replicas[0].width // stage.context
    spread = stage.expert == 1 or stage.expert % stage.context == 0
    return spread and all(layer.num_experts % holders == 0 for layer in chain.layers)


def has_holders(stage: Stage) -> bool:
    """Return whether several devices hold the same weights of a stage, so that ZeRO can divide
    them."""
    return len(stage.replicas) * stage.context > 1


# Kinds of recomputation of a system that has all of them.
_ALL = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
# Kinds of recomputation of a system without selective recomputation.
_WHOLE = (Recompute.NONE, Recompute.FULL)
# Optimizers of Megatron-LM, which FlagScale shares.
_OF_MEGATRON = ("adamw", "adam", "momentum", "sgd")

# The table, by the name of the target.
TARGETS: dict[TargetName, Target] = {
    TargetName.TORCHTITAN: Target(
        name="torchtitan",
        version="0.3.0",
        calibration="torchtitan",
        dtypes=(Dtype.BF16, Dtype.FP32),
        schedules=tuple(ScheduleKind),
        zero=(0, 2, 3),
        shards_splits=True,
        optimizers=("adamw",),
        recompute=_ALL,
    ),
    TargetName.MEGATRON: Target(
        name="Megatron-LM",
        version="0.16.1",
        calibration="megatron",
        dtypes=(Dtype.BF16, Dtype.FP16, Dtype.FP32),
        schedules=(ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED),
        zero=(0, 1),
        shards_adam_only=True,
        optimizers=_OF_MEGATRON,
        recompute=_ALL,
        selective=Selective.ATTENTION,
    ),
    TargetName.DEEPSPEED: Target(
        name="DeepSpeed",
        version="0.19.8",
        calibration="deepspeed",
        dtypes=(Dtype.BF16, Dtype.FP16, Dtype.FP32),
        schedules=(ScheduleKind.ONE_F_ONE_B,),
        zero=(0, 1),
        zero_alone=(0, 1, 2, 3),
        optimizers=("adamw", "adam", "lion", "sgd", "momentum"),
        recompute=_WHOLE,
        one_recompute=False,
        max_width=1,
        max_context=1,
        max_expert=1,
    ),
    TargetName.FLAGSCALE: Target(
        name="FlagScale",
        version="0.9.0",
        calibration="megatron",
        dtypes=(Dtype.BF16, Dtype.FP16, Dtype.FP32),
        schedules=(ScheduleKind.ONE_F_ONE_B,),
        zero=(0, 1),
        shards_adam_only=True,
        optimizers=_OF_MEGATRON,
        recompute=_ALL,
        selective=Selective.ATTENTION,
        one_grid=False,
        one_recompute=False,
        max_context=1,
        mixed=False,
        whole_hosts=True,
        needs_blocks=True,
    ),
    TargetName.TORCH: Target(
        name="torch",
        version="2.13",
        calibration="torch",
        dtypes=(Dtype.BF16, Dtype.FP32),
        schedules=tuple(kind for kind in ScheduleKind if not kind.is_v),
        zero=(0,),
        recompute=_WHOLE,
        one_recompute=False,
        max_width=1,
        max_context=1,
        max_expert=1,
    ),
}
