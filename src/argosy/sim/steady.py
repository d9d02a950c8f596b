"""Times of very many micro-batches, from the times of a few thousand.

In the middle of an iteration a pipeline repeats itself: what a schedule does with micro-batch m it
does again with m + p, where p is a multiple of its group. From some number on, each p micro-batches
more therefore take as long:

    (1)  T(M + p) - T(M) = D  for all M >= M1
    (2)  T(M) = T(M3) + (M - M3) / p * D,  M3 = M1 + 2 p  and  M = M1 modulo p

M1 is taken as found if (1) holds between M1, M1 + p and M1 + 2 p to a millionth; else it is
doubled, until all micro-batches are played. (1) may hold there by chance and fail later, if two of
the pipeline's cycles are nearly as long: then (2) is too small, by no more than the time of one
filling of the pipeline for every M1 micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from argosy.cluster.topology import Cluster
from argosy.cluster.trace import FloatArray
from argosy.errors import bad_input
from argosy.plan.plan import Plan
from argosy.schedule import ScheduleKind, ScheduleSpec

# Up to this many micro-batches, all of them are played.
MOST_PLAYED = 8192
# A plan with more stages times micro-batches than this is shortened before it is shown.
_MOST_SHOWN = 50_000
_FIRST = 512
_SAME = 1e-6
# Lengths of cycles that are looked for, in groups of micro-batches: all their divisors are found,
# too.
_CYCLES = (60, 12, 4, 1)


def steady_seconds(
    seconds: Callable[[int], FloatArray],
    schedule: ScheduleSpec,
    num_stages: int,
    num_micro_batches: int,
) -> FloatArray:
    """Return T for every candidate, where ``seconds`` plays all of some number of micro-batches
    (2)."""
    period = _period(schedule, num_stages) if num_micro_batches > MOST_PLAYED else None
    least = _least(schedule)
    while period is not None:
        first = least + (num_micro_batches - least) % period
        if first + 2 * period >= num_micro_batches // 2:
            break
        one, two, three = (seconds(first + times * period) for times in range(3))
        if np.all(np.isinf(three)):  # a pipeline that never ends
            return three
        growth = three - two
        if np.all(np.abs(growth - (two - one)) <= _SAME * np.abs(growth)):
            more = (num_micro_batches - first - 2 * period) // period
            return three + more * growth
        least *= 2
    return seconds(num_micro_batches)


def shortened(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan itself, or of one with very many micro-batches a shorter one that shows what
    they repeat.

    Raises ``InputError`` if they do not repeat, because devices or links change.
    """
    count, num_stages = plan.num_micro_batches, len(plan.stages)
    period, least = _period(plan.schedule, num_stages), _least(plan.schedule)
    if num_stages * count <= _MOST_SHOWN or period is None or count < 2 * (least + period) or count % _group(
        plan.schedule, num_stages
    ):  # fmt: skip
        return plan
    traces = [trace for link in cluster.links for trace in (link.bandwidth, link.latency)]
    traces += [device.speed for device in cluster.devices]
    if not all(trace.is_constant for trace in traces):
        expected = f"at most {_MOST_SHOWN // num_stages} with {num_stages} stages while devices or links change"
        raise bad_input(
            expected, count, where="num_micro_batches", suggestion="take larger micro-batches"
        )
    kept = least + (count - least) % period
    return replace(
        plan,
        num_micro_batches=kept,
        global_batch=plan.global_batch - (count - kept) * plan.micro_batch_size,
        predicted=None,
        certificate=None,
        runner_ups=(),
    )


def _least(schedule: ScheduleSpec) -> int:
    """The first number of micro-batches that is tried for M1."""
    return max(_FIRST, 2 * max(schedule.depth or (0,)))


def _group(schedule: ScheduleSpec, num_stages: int) -> int:
    """Micro-batches that an interleaved schedule takes together; 1 of any other."""
    return num_stages // schedule.chunks if schedule.kind is ScheduleKind.INTERLEAVED else 1


def _period(schedule: ScheduleSpec, num_stages: int) -> int | None:
    """p of (1); None if all micro-batches are to be played."""
    group = schedule.k if schedule.kind is ScheduleKind.KFKB else _group(schedule, num_stages)
    return next((group * times for times in _CYCLES if 0 < group * times <= _FIRST), None)
