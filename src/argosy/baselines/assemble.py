"""Turn the decisions of a baseline into a plan: place stages, check memory, choose the fastest.

A device fits its stage if, with n samples of a micro-batch in its replica of width w and d
micro-batches in flight,

    (1)  state + n / w (d kept + recomputed + 3 largest output) <= 0.92 of its memory

which is the rule of Argosy's own search (``space.option``): three receive buffers, and a margin for
workspace and fragmentation. So the memory limit is equal for all planners.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from argosy.baselines.closed_form import closed_form_seconds
from argosy.baselines.job import RECOMPUTE, NoPlan, PlanningJob
from argosy.cost.memory import USABLE, activation_bytes, passing_bytes, state_bytes
from argosy.plan.plan import ClusterRef, LeftOut, ModelRef, Plan, Recompute, Replica, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.schedule.generate import depth_of
from argosy.sim.simulate import iteration_seconds, plays_whole
from argosy.units import SIZE, counted

# The schedule of planners that assume 1F1B.
ONE_F_ONE_B = ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B)
# The exact engine simulates this many of the best plans by the closed form, folded along
# symmetries.
_PLAYED_FOLDED = 24
# The exact engine simulates this many of the fastest folded plans again, whole.
_PLAYED_WHOLE = 3


@dataclass(frozen=True, kw_only=True)
class Groups:
    """A stage that a baseline describes by its layers and by tensor-parallel groups of devices with
    their samples."""

    first: int
    end: int
    groups: tuple[tuple[str, ...], ...]
    samples: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A shortage of memory, in bytes, on the device that lacks most."""

    device: str
    needed: float
    usable: float

    def __str__(self) -> str:
        needed, usable = SIZE.short(self.needed), SIZE.short(self.usable)
        return f"{self.device} would need {needed} of the {usable} that a plan may fill"


def assemble(
    job: PlanningJob,
    stages: Sequence[Groups],
    *,
    schedule: ScheduleSpec = ONE_F_ONE_B,
    recompute: Recompute = Recompute.NONE,
    zero: int = 0,
) -> Plan:
    """Return the plan of these stages, with ZeRO in stages of several replicas."""
    chain, cluster = job.chain, job.cluster
    micro_batch = sum(stages[0].samples)
    used = {name for stage in stages for group in stage.groups for name in group}
    return Plan(
        model=ModelRef.of(chain),
        cluster=ClusterRef.of(cluster),
        global_batch=job.global_batch,
        micro_batch_size=micro_batch,
        num_micro_batches=job.global_batch // micro_batch,
        schedule=schedule,
        stages=tuple(
            Stage(
                first=stage.first,
                end=stage.end,
                replicas=tuple(
                    Replica(devices=group, samples=samples)
                    for group, samples in zip(stage.groups, stage.samples, strict=True)
                ),
                recompute=recompute,
                zero=zero if len(stage.groups) > 1 else 0,
            )
            for stage in stages
        ),
        left_out=tuple(
            LeftOut(device=device.name, reason="not used by this planner")
            for device in cluster.devices
            if device.name not in used
        ),
    )


def shortage(job: PlanningJob, plan: Plan) -> Shortage | None:
    """Return the largest shortage of memory by (1), or None if the plan fits."""
    depths = depth_of(plan.schedule, len(plan.stages), plan.num_micro_batches)
    buffers = 3 * max((layer.output_bytes for layer in job.chain.layers[:-1]), default=0.0)
    worst: Shortage | None = None
    for stage, depth in zip(plan.stages, depths, strict=True):
        for name, samples, share in _unlike_members(job, stage):
            kept = depth * activation_bytes(job.chain, stage, samples, share)
            passing = passing_bytes(job.chain, stage, samples, share, backward=True)
            needed = (
                state_bytes(job.chain, stage, share).total
                + kept
                + passing
                + samples * share * buffers
            )
            usable = USABLE * job.device(name).kind.memory
            if needed > usable and (worst is None or needed - usable > worst.needed - worst.usable):
                worst = Shortage(device=name, needed=needed, usable=usable)
    return worst


def _unlike_members(job: PlanningJob, stage: Stage) -> Iterator[tuple[str, int, float]]:
    """Yield one device for each combination of memory, samples and share in a stage."""
    seen = set()
    for replica in stage.replicas:
        for name, share in replica.members:
            key = (job.device(name).kind.memory, replica.samples, share)
            if key not in seen:
                seen.add(key)
                yield name, replica.samples, share


def lightest(
    job: PlanningJob, plan: Plan, *, recompute: Iterable[Recompute] = RECOMPUTE
) -> Plan | Shortage:
    """Return the plan with the least recomputation, equal in all stages, with which it fits."""
    lacks: Shortage | None = None
    for choice in recompute:
        lighter = replace(
            plan, stages=tuple(replace(stage, recompute=choice) for stage in plan.stages)
        )
        lacks = shortage(job, lighter)
        if lacks is None:
            return lighter
    assert lacks is not None, "there is something to try"
    return lacks


def shared_evenly(samples: int, count: int) -> tuple[int, ...]:
    """Divide samples into ``count`` shares that differ by at most one.

    >>> shared_evenly(8, 3)
    (3, 3, 2)
    """
    base, more = divmod(samples, count)
    return tuple(base + (index < more) for index in range(count))


def shared_by(weights: Sequence[float], samples: int) -> tuple[int, ...]:
    """Return integer shares in proportion to weights; the largest fractions are rounded up.

    >>> shared_by([2.0, 1.0, 1.0], 9)
    (5, 2, 2)
    """
    exact = [samples * weight / sum(weights) for weight in weights]
    shares = [math.floor(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda at: (shares[at] - exact[at], at))
    for at in order[: samples - sum(shares)]:
        shares[at] += 1
    return tuple(shares)


def even_cuts(job: PlanningJob, stages: int) -> list[tuple[int, int]]:
    """Return the layers of each stage: equal numbers of blocks as far as possible, the embedding
    with the first stage, the head with the last."""
    layers = job.chain.layers
    usual = max((layer.kind for layer in layers), key=[layer.kind for layer in layers].count)
    blocks = [index for index, layer in enumerate(layers) if layer.kind == usual]
    if len(blocks) < stages:
        blocks = list(range(len(layers)))
    counts = shared_evenly(len(blocks), stages)
    starts = [0, *(blocks[at] for at in list(itertools.accumulate(counts))[:-1])]
    return list(itertools.pairwise([*starts, len(layers)]))


def played(job: PlanningJob, plan: Plan, *, whole: bool = False) -> float:
    """Return the seconds of an iteration in the exact engine, folded along its symmetries or whole;
    infinity if it never ends."""
    return iteration_seconds(plan, job.chain, job.cluster, job.model, whole=whole)


def fastest(job: PlanningJob, plans: Iterable[Plan]) -> Plan | None:
    """Return the plan that the exact engine finds fastest among the best by a closed form. This is
    the plan that a user who tries all of them would choose."""
    ranked = sorted(plans, key=lambda plan: closed_form_seconds(job, plan))[:_PLAYED_FOLDED]
    ranked.sort(key=lambda plan: played(job, plan))
    few = ranked[:_PLAYED_WHOLE]
    if len(few) > 1 and all(map(plays_whole, few)):
        few.sort(key=lambda plan: played(job, plan, whole=True))
    return few[0] if few else None


def fastest_fitting(job: PlanningJob, plans: Iterable[Plan]) -> Plan | NoPlan:
    """Return the fastest plan that fits, each with the least recomputation; if none fits, the
    smallest shortage."""
    fitting, lacking = [], []
    for plan in plans:
        light = lightest(job, plan)
        if isinstance(light, Plan):
            fitting.append(light)
        else:
            lacking.append(light)
    best = fastest(job, fitting)
    if best is not None:
        return best
    if not lacking:
        samples = counted(job.global_batch, "sample")
        return NoPlan(reason=f"no way to cut {samples} over its {len(job.devices)} devices")
    return NoPlan(reason=str(min(lacking, key=lambda short: short.needed - short.usable)))
