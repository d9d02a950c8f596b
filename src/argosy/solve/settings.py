"""Define the settings of a search, and the progress that it reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.errors import bad_input, excluded
from argosy.plan.offload import NO_OFFLOAD, Offload, parse_offload
from argosy.plan.plan import Recompute
from argosy.plan.runnable import OFFLOAD, SplitLimits
from argosy.plan.targets import Target
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.space.enumerate import Scope, only_runnable
from argosy.space.option import Vector
from argosy.space.pool import Pool
from argosy.workload.chain import Chain

# The schedules that a search covers by default.
SCHEDULES = (
    ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
    ScheduleSpec(kind=ScheduleKind.EAGER),
    ScheduleSpec(kind=ScheduleKind.KFKB, k=2),
    ScheduleSpec(kind=ScheduleKind.KFKB, k=4),
)

# On at most this many devices level 1 considers every shape and every setting of memory, and
# tightens its bounds.
FEW_DEVICES = 16
# Level 2 mixes kinds in a stage by default only on at most this many pools and devices.
_MIXED_POOLS, _MIXED_DEVICES = 3, 64


@dataclass(frozen=True, kw_only=True)
class SearchProgress:
    """A report that shows where a search stands."""

    seconds: float
    """Seconds of the best plan so far."""
    bound: float
    candidates: int

    @property
    def gap(self) -> float:
        return self.seconds / self.bound - 1 if self.bound > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A set of limits and choices that control a search."""

    level: int = 1
    """1 takes seconds; 2 searches until ``gap`` or a budget is reached, and considers more
    plans."""
    gap: float = 0.01
    """Level 2 stops at this gap."""
    time_budget: float = math.inf
    """Maximum CPU seconds."""
    memory_budget: float = 3.5 * 2**30
    """Maximum bytes that a search may hold; tables and open sub-problems grow with its units and
    its time."""
    prune: bool = True
    """Whether options are removed that cannot be part of a better plan (``space.prune``); the plan
    is the same."""
    runnable: bool = False
    """Whether only plans that Argosy's own runtime executes are searched (``plan.runnable``)."""
    schedules: tuple[ScheduleSpec, ...] = SCHEDULES
    """Schedules that a plan may choose from; by default 1f1b, eager 1f1b and kfkb with k = 2 and
    4."""
    even_shares: bool = False
    """Whether all replicas of a plan take equal numbers of samples, so that all stages have equal
    numbers of replicas."""
    target: Target | None = None
    """The system that is to run the plan: only plans that it can express are searched
    (``plan.targets``)."""
    replicas: int | None = None
    """Number of replicas of every stage, with equal shares; by default any number."""
    width: int | None = None
    """Width of every tensor-parallel group; by default any up to ``max_width``."""
    context: int | None = None
    """Number of parts of a sequence in every stage; by default any number up to ``max_context``."""
    expert: int | None = None
    """Number of holders of the experts in every stage; by default any number up to
    ``max_expert``."""
    recompute: tuple[Recompute, ...] | None = None
    """Recomputations that a stage may choose from; by default all, and only the extremes on level 1
    of more than 16 devices."""
    zero: tuple[int, ...] | None = None
    """ZeRO levels that a stage may choose from; by default as for ``recompute``."""
    offload: Offload = NO_OFFLOAD
    """State that a stage may keep outside its devices; by default nothing."""
    mixed: bool | None = None
    """Whether stages may mix kinds of devices. The default is yes on level 2 with at most three
    pools and 64 devices, and with at most 8 devices; with four kinds the tables of a one-minute
    search took 15 GB."""
    max_width: int | None = None
    """Maximum number of devices of a tensor-parallel group; by default as many as the layers
    allow."""
    spanning: bool | None = None
    """Whether tensor-parallel groups may fill several nodes. By default they may if ``width``
    requests it, if nothing else fits, or if all groups of the plan have one width
    (``solve.narrower``), never in plans for a target."""
    max_context: int | None = None
    """Maximum number of parts of a sequence of any length; by default only long ones are cut."""
    max_expert: int | None = None
    """Maximum number of holders over which experts are split; by default any divisor of their
    number."""
    ceiling: float = math.inf
    """Seconds of a plan from another search: no slower plan is searched."""
    units: Vector | None = None
    """Number of devices of each pool that are allocated together; by default coarse to fine."""
    progress: Callable[[SearchProgress], None] | None = None
    """Called whenever the best plan or the lower bound has changed."""
    ends_early: bool = True
    """Whether an interrupt ends a search with the best plan so far; otherwise it is raised to a
    caller that searches more than once."""
    executor: Executor | None = None
    """Simulates the finalists in parallel; the result does not depend on it."""

    @property
    def may_span(self) -> bool:
        """Return whether nothing forbids tensor-parallel groups across nodes."""
        return self.spanning is None and self.target is None

    @property
    def interleaved(self) -> tuple[ScheduleSpec, ...]:
        """Return those of ``schedules`` whose workers have several stages."""
        return tuple(spec for spec in self.schedules if spec.kind.is_chunked)


def continuing(limits: SplitLimits, *, level: int = 1) -> Settings:
    """Return the settings with which a run searches for the plan that it continues with."""
    return Settings(
        level=level,
        runnable=True,
        max_width=limits.width,
        max_context=limits.context,
        max_expert=limits.expert,
    )


def search_scope(settings: Settings, pools: Sequence[Pool], units: Vector) -> Scope:
    """Return the scope of a search at a granularity.

    Level 1 mixes kinds in a stage only on small clusters, and leaves recomputation and ZeRO between
    the extremes of memory to level 2. Mixed stages of many devices have tensor-parallel groups of
    one width: pairs of widths would be most of their options. Groups across nodes are searched if
    settings ask for them or request a width.
    """
    mixed, devices = settings.mixed, sum(pool.count for pool in pools)
    if mixed is None:
        mixed = devices <= 8 or (
            settings.level > 1 and len(pools) <= _MIXED_POOLS and devices <= _MIXED_DEVICES
        )
    is_large = devices > FEW_DEVICES
    spanning = settings.spanning
    if spanning is None:
        spanning = settings.may_span and settings.width is not None
    scope = Scope(
        units=units,
        mixed=mixed,
        one_width=mixed and is_large,
        spanning=spanning,
        prune=settings.prune,
    )
    if settings.level == 1 and is_large:
        scope = replace(scope, zero=(1, 0, 3), recompute=(Recompute.NONE, Recompute.FULL))
    scope = allowed(scope, settings)
    return only_runnable(scope) if settings.runnable else scope


def without_deadlock(settings: Settings, model: ComputeModel) -> Settings:
    """Return settings with only 1f1b if transfers block both ends (``sim.tasks.blocking``): other
    schedules could deadlock."""
    return (
        replace(settings, schedules=(ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),))
        if model.blocking
        else settings
    )


def played_scope(settings: Settings, pools: Sequence[Pool]) -> Scope:
    """Return the scope of plans that may be simulated beside the finalists of a search of any
    units."""
    scope = allowed(Scope(units=(1,) * len(pools)), settings)
    return only_runnable(scope) if settings.runnable else scope


def allowed(scope: Scope, settings: Settings) -> Scope:
    """Return the part of a scope that the settings allow."""
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
    """Return the part of the settings that PowerSGD supports (``plan.runnable.powersgd_problems``);
    unchanged without PowerSGD."""
    if not chain.powersgd:
        return settings
    if chain.dtype is Dtype.FP16:
        reason = "whose errors cannot follow the loss scale"
        raise excluded("fp16", f"PowerSGD, {reason}; use bf16 or fp32")
    splits = {settings.width, settings.context, settings.expert} - {None, 1}
    if splits or settings.zero not in (None, (0,)) or settings.offload:
        others = "ZeRO, offload, tensor, context or expert parallelism"
        raise excluded("PowerSGD", f"{others}, which divide gradients")
    if settings.target is not None:
        raise excluded("PowerSGD", f"a plan for {settings.target.full_name}, which lacks it")
    return replace(settings, zero=(0,), max_width=1, max_context=1, max_expert=1)


def for_target(settings: Settings, chain: Chain) -> Settings:
    """Return the part of the settings that the target runs; raise InputError if no schedule
    remains."""
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
        recompute=settings.recompute or target.recomputations(chain),
        max_width=_least(settings.max_width, target.max_width),
        max_context=_least(settings.max_context, target.max_context),
        max_expert=_least(settings.max_expert, target.max_expert),
        mixed=settings.mixed if target.mixed else False,
    )


def with_offload(settings: Settings, text: str) -> Settings:
    """Return the settings with the offload that ``--offload`` allows; raise InputError if it
    conflicts with them."""
    offload = parse_offload(text)
    if settings.runnable and str(offload) not in OFFLOAD.runs:
        runs = ", ".join(str(value) for value in OFFLOAD.runs[1:-1])
        raise bad_input(f"{runs} or both with --runnable", text, where="--offload")
    if offload.activations is not None and any(spec.kind.is_split for spec in settings.schedules):
        raise excluded(f"--offload {text}", "a schedule that splits backwards")
    return replace(settings, offload=offload)


def _least(requested: int | None, allowed_most: int | None) -> int | None:
    return min((number for number in (requested, allowed_most) if number is not None), default=None)
