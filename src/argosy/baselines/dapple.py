"""Plan as DAPPLE does: data and pipeline parallelism together, by the latency of a synchronous
pipeline.

Source: Fan et al. (PPoPP'21; arXiv 2007.01045), its slides and its public planner. It assumes equal
devices. The network between two stages counts as a stage of its own. F and B are forward and
backward of a micro-batch, AR the all-reduce of a stage's gradients, M the number of micro-batches
and Q the pivot (from the last stage to the front, s takes over if (M - 1)(F_s + B_s) exceeds (M -
1)(F_Q + B_Q) and all that lies between):

    (1)  latency   = sum_{s <= Q} F_s  +  (M - 1) (F_Q + B_Q)  +  max over s of ending_s
    (2)  ending_s  = AR_s + sum_{a = s..Q} B_a            for s <= Q
                     AR_s + B_Q - sum_{a = Q..s-1} B_a    for s > Q
    (3)  AR        = 2 (n - 1) / n  bytes / (bandwidth between machines, or inside one:
                     floor(n / 2) times that)
    (4)  transfer  = bytes of the micro-batch / (bandwidth between machines, or inside if both
                     stages are in one)

The planner takes, among these candidates, the one with the least latency that fits in memory:

    (5)  for every r that divides the devices, stages of multiples of r devices with the least
         largest block, a block being a stage's F + B or both transfers of a cut: a programme over
         (layers placed, devices taken of every machine), devices chosen by the three policies of
         ``placement``
    (6)  straight pipelines: as (5), with exactly r devices a stage
    (7)  every cut into two stages, every split of the devices, every pair of policies
    (8)  data parallelism on all devices

Above 16 devices r is at least a sixteenth of them and aligned with the machines, and so are the
splits of (7). The plan runs under 1F1B with its usual depth or DAPPLE's deeper one (2 (S - s) - 1
forwards ahead), whichever is faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from argosy.baselines.assemble import (
    ONE_F_ONE_B,
    Groups,
    assemble,
    fastest,
    lightest,
    shared_evenly,
)
from argosy.baselines.blocks import least_largest_block
from argosy.baselines.equal_devices import EqualDevices, Floats
from argosy.baselines.job import NoPlan, PlanningJob
from argosy.baselines.placement import Counts, placements
from argosy.plan.plan import Plan, Recompute
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.units import counted

# Devices are divided into at most this many units in (5) to (7), which bounds the search time.
_MOST_UNITS = 16
# At most this many candidates, in the order of (1), are checked for one that fits.
_MOST_TRIED = 64


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A stage that takes a number of devices of every machine."""

    first: int
    end: int
    taken: Counts


# The stages of a pipeline, front to back.
Pipeline = tuple[Placed, ...]


@dataclass(frozen=True, kw_only=True)
class DapplePipeline:
    """A pipeline that was planned with a micro-batch size, and its latency (1)."""

    latency: float
    micro_batch: int
    stages: Pipeline


def dapple_plan(job: PlanningJob) -> Plan | NoPlan:
    """Return the candidate with the least latency that fits; recompute only if nothing fits
    without."""
    view = EqualDevices(job)
    candidates: list[DapplePipeline] = []
    for size in job.batches:
        candidates += dapple_candidates(view, size)
    candidates.sort(key=lambda candidate: candidate.latency)
    reason = ""
    for recompute in (Recompute.NONE, Recompute.FULL):
        for candidate in candidates[:_MOST_TRIED]:
            plans = [
                _placed(job, candidate, kind)
                for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.EAGER)
            ]
            lighter = [lightest(job, plan, recompute=(recompute,)) for plan in plans]
            best = fastest(job, [plan for plan in lighter if isinstance(plan, Plan)])
            if best is not None:
                return best
            reason = reason or str(lighter[0])
    return NoPlan(
        reason=reason
        or f"no way to cut {counted(job.global_batch, 'sample')} over {len(job.devices)} devices"
    )


def dapple_candidates(view: EqualDevices, micro_batch: int) -> list[DapplePipeline]:
    """Return the candidates (5) to (8) for one micro-batch size that have a sample for every
    device."""
    count = view.job.global_batch // micro_batch
    pipelines = []
    for stages in dict.fromkeys([*_blocks(view, micro_batch), *_whole(view)]):
        if max(sum(stage.taken) for stage in stages) <= micro_batch:
            groups = [stage.taken for stage in stages]
            ends = np.array([[stage.end] for stage in stages])
            time = float(latency(view, micro_batch, count, groups, ends)[0])
            pipelines.append(DapplePipeline(latency=time, micro_batch=micro_batch, stages=stages))
    return [*pipelines, *_bipartitions(view, micro_batch, count)]


def _blocks(view: EqualDevices, micro_batch: int) -> Iterator[Pipeline]:
    """Yield the pipelines (5) and (6)."""
    for unit in filter(partial(_is_unit, view), range(1, view.count)):
        for straight in (False, True):
            stages = least_largest_block(view, micro_batch, unit, straight=straight)
            if stages is not None:
                yield tuple(
                    Placed(first=first, end=end, taken=taken) for first, end, taken in stages
                )


def _is_unit(view: EqualDevices, unit: int) -> bool:
    """Return whether stages may take multiples of ``unit`` devices; on many devices units must
    align with machines."""
    if view.count % unit:
        return False
    aligned = all(size % unit == 0 or unit % size == 0 for size in view.sizes)
    return view.count <= _MOST_UNITS or (aligned and view.count // unit <= _MOST_UNITS)


def _whole(view: EqualDevices) -> Iterator[Pipeline]:
    """Yield data parallelism on all devices (8)."""
    yield (Placed(first=0, end=view.num_layers, taken=view.sizes),)


def _bipartitions(view: EqualDevices, micro_batch: int, count: int) -> Iterator[DapplePipeline]:
    """Yield the best cut of every split and pair of placements (7)."""
    step = math.ceil(view.count / _MOST_UNITS)
    empty, last = (0,) * len(view.sizes), view.num_layers
    ends = np.array([range(1, last), [last] * (last - 1)])
    for first in range(step, view.count if last > 1 else 0, step):
        if max(first, view.count - first) > micro_batch:
            continue
        for front in placements(view.sizes, empty, first):
            for back in placements(view.sizes, front, view.count - first):
                latencies = latency(view, micro_batch, count, (front, back), ends)
                cut = 1 + int(latencies.argmin())
                stages = (
                    Placed(first=0, end=cut, taken=front),
                    Placed(first=cut, end=last, taken=back),
                )
                yield DapplePipeline(
                    latency=float(latencies[cut - 1]), micro_batch=micro_batch, stages=stages
                )


def latency(
    view: EqualDevices,
    micro_batch: int,
    count: int,
    groups: Sequence[Counts],
    ends: NDArray[np.intp],
) -> Floats:
    """Return the latency (1) of pipelines on the same devices with different ends of their stages:
    ``ends`` is (stages, pipelines)."""
    forward: list[Floats] = []
    backward: list[Floats] = []
    exchange: list[Floats] = []
    for index, taken in enumerate(groups):
        first = ends[index - 1] if index else np.zeros_like(ends[0])
        sums = view.seconds(-(-micro_batch // sum(taken)))
        forward.append(sums[0][ends[index]] - sums[0][first])
        backward.append(sums[1][ends[index]] - sums[1][first])
        exchange.append(all_reduce(view, taken, view.weights[ends[index]] - view.weights[first]))
        if index + 1 < len(groups):
            hop = micro_batch * view.outputs[ends[index]] / _rate(view, (taken, groups[index + 1]))
            forward.append(hop)
            backward.append(hop)
            exchange.append(np.zeros_like(hop))
    return pipeline_latency(np.array(forward), np.array(backward), np.array(exchange), count)


def pipeline_latency(forward: Floats, backward: Floats, exchange: Floats, count: int) -> Floats:
    """Return the latency by (1) and (2) for columns of stages, network stages included."""
    num_stages, columns = forward.shape
    both = forward + backward
    before = np.concatenate([np.zeros((1, columns)), np.cumsum(both, axis=0)])
    pivot = np.full(columns, num_stages - 1)
    at = np.arange(columns)
    for stage in range(num_stages - 2, -1, -1):
        between = before[pivot, at] - before[stage + 1]
        pivot = np.where(
            (count - 1) * both[stage] > (count - 1) * both[pivot, at] + between, stage, pivot
        )
    returned = np.concatenate([np.zeros((1, columns)), np.cumsum(backward, axis=0)])
    filled = np.concatenate([np.zeros((1, columns)), np.cumsum(forward, axis=0)])[pivot + 1, at]
    stages = np.arange(num_stages)[:, None]
    early = returned[pivot + 1, at] - returned[:-1]
    late = backward[pivot, at] - (returned[:-1] - returned[pivot, at])
    ending = exchange + np.where(stages <= pivot, early, late)
    return np.asarray(filled + (count - 1) * both[pivot, at] + ending.max(axis=0))


def all_reduce(view: EqualDevices, taken: Counts, num_bytes: Floats) -> Floats:
    """Return the seconds of an all-reduce by (3)."""
    count = sum(taken)
    if count == 1:
        return np.zeros_like(num_bytes)
    spans = sum(number > 0 for number in taken) > 1
    return (
        2
        * (count - 1)
        / count
        * num_bytes
        / (view.between if spans else view.inside * (count // 2))
    )


def _rate(view: EqualDevices, groups: Iterable[Counts]) -> float:
    """Return the bytes/s between two groups of devices by (4)."""
    machines = {at for taken in groups for at, number in enumerate(taken) if number}
    return view.between if len(machines) > 1 else view.inside


def _placed(job: PlanningJob, candidate: DapplePipeline, kind: ScheduleKind) -> Plan:
    free = [iter(node) for node in job.nodes]
    layout = []
    for stage in candidate.stages:
        taken = zip(free, stage.taken, strict=True)
        names = [name for devices, number in taken for name in itertools.islice(devices, number)]
        samples = shared_evenly(candidate.micro_batch, len(names))
        layout.append(
            Groups(
                first=stage.first,
                end=stage.end,
                groups=tuple((name,) for name in names),
                samples=samples,
            )
        )
    schedule = ONE_F_ONE_B if kind is ScheduleKind.ONE_F_ONE_B else ScheduleSpec(kind=kind)
    return assemble(job, layout, schedule=schedule)
