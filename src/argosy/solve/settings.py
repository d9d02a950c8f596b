"""What a search may do, and what it says while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.errors import bad_input
from argosy.plan.offload import NO_OFFLOAD, Offload, parse_offload
from argosy.plan.plan import Recompute
from argosy.plan.runnable import OFFLOAD
from argosy.plan.targets import Target
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.space.enumerate import Scope, only_runnable
from argosy.space.option import Vector
from argosy.space.pool import Pool
from argosy.workload.chain import Chain

SCHEDULES = (
    ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
    ScheduleSpec(kind=ScheduleKind.EAGER),
    ScheduleSpec(kind=ScheduleKind.KFKB, k=2),
    ScheduleSpec(kind=ScheduleKind.KFKB, k=4),
)

FEW_DEVICES = 16
"""Up to so many devices level 1 looks at every shape and every setting of memory, and tightens its
bounds."""
_MIXED_POOLS, _MIXED_DEVICES = 3, 64


@dataclass(frozen=True, kw_only=True)
class SearchProgress:
    """Where a search stands."""

    seconds: float
    """Of the best plan so far."""
    bound: float
    candidates: int

    @property
    def gap(self) -> float:
        return self.seconds / self.bound - 1 if self.bound > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a search may do."""

    level: int = 1
    """1 takes seconds; 2 searches on until ``gap`` or a budget is reached, and looks at more
    plans."""
    gap: float = 0.01
    """Level 2 stops at this gap."""
    time_budget: float = math.inf
    """CPU seconds."""
    memory_budget: float = 3.5 * 2**30
    """Bytes that a search may come to hold; tables and open sub-problems grow with its units and
    its time."""
    prune: bool = True
    """Whether options are removed that cannot be part of a better plan
    (``space.operations.rules``); the plan is the same."""
    runnable: bool = False
    """Whether only plans count that our own runtime executes (``plan.runnable``)."""
    schedules: tuple[ScheduleSpec, ...] = SCHEDULES
    """What a plan may choose from; by default 1f1b, eager 1f1b and kfkb with k = 2 and 4."""
    even_shares: bool = False
    """Whether all replicas of a plan take the same number of samples, so that every stage has as
    many replicas."""
    target: Target | None = None
    """The system that is to run the plan: only plans count that it can express
    (``plan.targets``)."""
    replicas: int | None = None
    """Of every stage, with equal shares; by default any number."""
    width: int | None = None
    """Of every tensor-parallel group; by default any up to ``max_width``."""
    context: int | None = None
    """Parts of a sequence in every stage; by default any number up to ``max_context``."""
    expert: int | None = None
    """Holders of the experts of every stage; by default any number up to ``max_expert``."""
    recompute: tuple[Recompute, ...] | None = None
    """What a stage may recompute; by default anything, and the extremes on level 1 of more than 16
    devices."""
    zero: tuple[int, ...] | None = None
    """Levels of ZeRO that a stage may choose from; by default as for ``recompute``."""
    offload: Offload = NO_OFFLOAD
    """What a stage may keep outside its devices; by default nothing."""
    mixed: bool | None = None
    """Whether stages may mix kinds; by default on level 2 of up to three pools and 64 devices, and
    of up to 8 devices: in a minute of search the tables of mixtures of four kinds took 15 GB."""
    max_width: int | None = None
    """Devices of a tensor-parallel group at most; by default as many as a node and the layers
    allow."""
    max_context: int | None = None
    """Parts of a sequence at most, of whatever length; by default only long ones are cut."""
    max_expert: int | None = None
    """Holders over which experts are split at most; by default any number that divides theirs."""
    ceiling: float = math.inf
    """Seconds of a plan from another search: none slower is looked for."""
    units: Vector | None = None
    """Devices of each pool that are taken together; by default coarse to fine."""
    progress: Callable[[SearchProgress], None] | None = None
    """Called whenever the best plan or the lower bound has moved."""
    ends_early: bool = True
    """Whether an interrupt ends a search with the best plan so far; else it is for whoever searches
    more than once."""
    executor: Executor | None = None
    """Simulates the finalists side by side; the result does not depend on it."""

    @property
    def interleaved(self) -> tuple[ScheduleSpec, ...]:
        """Those of ``schedules`` whose workers have several stages."""
        return tuple(spec for spec in self.schedules if spec.kind.is_chunked)


def search_scope(settings: Settings, pools: Sequence[Pool], units: Vector) -> Scope:
    """Level 1 leaves mixed stages to small clusters, and what lies between the extremes of memory
    to level 2. Mixed stages of many devices have tensor-parallel groups of one width: pairs of
    widths are most of their options."""
    mixed, devices = settings.mixed, sum(pool.count for pool in pools)
    if mixed is None:
        mixed = devices <= 8 or (
            settings.level > 1 and len(pools) <= _MIXED_POOLS and devices <= _MIXED_DEVICES
        )
    is_large = devices > FEW_DEVICES
    scope = Scope(units=units, mixed=mixed, one_width=mixed and is_large, prune=settings.prune)
    if settings.level == 1 and is_large:
        scope = replace(scope, zero=(1, 0, 3), recompute=(Recompute.NONE, Recompute.FULL))
    scope = allowed(scope, settings)
    return only_runnable(scope) if settings.runnable else scope


def without_deadlock(settings: Settings, model: ComputeModel) -> Settings:
    """Of the schedules only 1f1b where transfers keep both ends waiting (``sim.tasks.blocking``):
    others could lock up."""
    return (
        replace(settings, schedules=(ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),))
        if model.blocking
        else settings
    )


def played_scope(settings: Settings, pools: Sequence[Pool]) -> Scope:
    """What may be played beside the finalists of a search, whatever its units."""
    scope = allowed(Scope(units=(1,) * len(pools)), settings)
    return only_runnable(scope) if settings.runnable else scope


def allowed(scope: Scope, settings: Settings) -> Scope:
    """What the settings leave of a scope."""
    return replace(
        scope,
        replicas=settings.replicas,
        even=settings.target is not None,
        widths=_widths(scope, settings),
        context=scope.context if settings.context is None else (settings.context,),
        expert=scope.expert if settings.expert is None else (settings.expert,),
        max_context=settings.max_context,
        max_expert=settings.max_expert,
        zero=settings.zero or scope.zero,
        recompute=settings.recompute or scope.recompute,
        offload=settings.offload,
    )


def _widths(scope: Scope, settings: Settings) -> tuple[int, ...] | None:
    if settings.width is not None:
        return (settings.width,)
    return scope.widths if settings.max_width is None else tuple(range(1, settings.max_width + 1))


def for_powersgd(settings: Settings, chain: Chain) -> Settings:
    """What of the settings PowerSGD can do (``plan.runnable.powersgd_problems``); all of them
    without PowerSGD."""
    if not chain.powersgd:
        return settings
    if chain.dtype is Dtype.FP16:
        expected = "bf16 or fp32 with PowerSGD, whose errors cannot follow the loss scale of fp16"
        raise bad_input(expected, chain.dtype, where="dtype")
    splits = {settings.width, settings.context, settings.expert} - {None, 1}
    if splits or settings.zero not in (None, (0,)) or settings.offload:
        found = "ZeRO, offload, tensor, context or expert parallelism"
        raise bad_input("whole gradients of whole matrices on the device", found, where="powersgd")
    if settings.target is not None:
        expected = f"sums of whole gradients, which {settings.target.full_name} is written for"
        raise bad_input(expected, chain.powersgd, where="powersgd")
    return replace(settings, zero=(0,), max_width=1, max_context=1, max_expert=1)


def for_target(settings: Settings) -> Settings:
    """What of the settings the target runs; an ``InputError`` if that leaves no schedule."""
    target = settings.target
    if target is None:
        return settings
    schedules = tuple(spec for spec in settings.schedules if spec.kind in target.schedules)
    if not schedules:
        names = " or ".join(target.schedules)
        raise bad_input(
            f"{names}, which {target.full_name} runs", settings.schedules[0].kind, where="schedules"
        )
    return replace(
        settings,
        schedules=schedules,
        recompute=settings.recompute or target.recompute,
        max_width=_least(settings.max_width, target.max_width),
        max_context=_least(settings.max_context, target.max_context),
        max_expert=_least(settings.max_expert, target.max_expert),
        mixed=settings.mixed if target.mixed else False,
    )


def with_offload(settings: Settings, text: str) -> Settings:
    """The settings with what ``--offload`` allows; an ``InputError`` for what they cannot go
    together with."""
    offload = parse_offload(text)
    if settings.runnable and str(offload) not in OFFLOAD.runs:
        runs = ", ".join(str(value) for value in OFFLOAD.runs[1:-1])
        raise bad_input(f"{runs} or both with --runnable", text, where="--offload")
    if offload.activations is not None and any(spec.kind.is_split for spec in settings.schedules):
        raise bad_input(
            "no activations with a schedule that splits backwards", text, where="--offload"
        )
    return replace(settings, offload=offload)


def _least(asked: int | None, allowed_most: int | None) -> int | None:
    return min((number for number in (asked, allowed_most) if number is not None), default=None)
