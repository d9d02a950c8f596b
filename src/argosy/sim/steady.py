"""Extrapolate the time of many thousand micro-batches from the times of a few thousand.

In the middle of an iteration a pipeline is periodic: a schedule treats micro-batch m + p as it
treated m, where p is a multiple of its group. From some number M1 on, every further p micro-batches
therefore take the same time:

    (1)  T(M + p) - T(M) = D  for all M >= M1
    (2)  T(M) = T(M3) + (M - M3) / p * D,  M3 = M1 + 2 p  and  M = M1 modulo p

M1 is accepted if (1) holds between M1, M1 + p and M1 + 2 p to a relative error of 1e-6; otherwise
it is doubled, until all micro-batches are simulated. (1) may hold there by chance and fail later,
if two of the pipeline's cycles have nearly the same length: then (2) is too small, by at most the
time of one filling of the pipeline for every M1 micro-batches.
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

# Up to this number, all micro-batches are simulated.
MOST_PLAYED = 8192
# A plan with more stages times micro-batches than this is shortened before it is shown.
_MOST_SHOWN = 50_000
# The smallest number of micro-batches that is tried for M1.
_FIRST = 512
# The relative difference of two growths up to which (1) counts as satisfied.
_SAME = 1e-6
# Lengths of cycles that are tried, in groups of micro-batches; cycles of all their divisors match
# too.
_CYCLES = (60, 12, 4, 1)


def steady_seconds(
    seconds: Callable[[int], FloatArray],
    schedule: ScheduleSpec,
    num_stages: int,
    num_micro_batches: int,
) -> FloatArray:
    """Return the seconds T for every candidate (2).

    ``seconds`` simulates all of the number of micro-batches that it is given.
    """
    period = _period(schedule, num_stages) if num_micro_batches > MOST_PLAYED else None
    least = _least(schedule)
    while period is not None:
        first = least + (num_micro_batches - least) % period
        if first + 2 * period >= num_micro_batches // 2:
            break
        shortest, middle, longest = (seconds(first + times * period) for times in range(3))
        if np.all(np.isinf(longest)):  # a pipeline that never ends
            return longest
        growth = longest - middle
        if np.all(np.abs(growth - (middle - shortest)) <= _SAME * np.abs(growth)):
            num_periods = (num_micro_batches - first - 2 * period) // period
            return longest + num_periods * growth
        least *= 2
    return seconds(num_micro_batches)


def shortened(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan, or a shorter one with the same period if it has very many micro-batches.

    Raises ``InputError`` if the micro-batches are not periodic because devices or links change.
    """
    count, num_stages = plan.num_micro_batches, len(plan.stages)
    period, least = _period(plan.schedule, num_stages), _least(plan.schedule)
    if num_stages * count <= _MOST_SHOWN or period is None:
        return plan
    if count < 2 * (least + period) or count % _group(plan.schedule, num_stages):
        return plan
    traces = [trace for link in cluster.links for trace in (link.bandwidth, link.latency)]
    traces += [device.speed for device in cluster.devices]
    if not all(trace.is_constant for trace in traces):
        most = _MOST_SHOWN // num_stages
        stages = "1 stage" if num_stages == 1 else f"{num_stages} stages"
        expected = f"at most {most} with {stages} while devices or links change"
        raise bad_input(
            expected, count, "num_micro_batches", suggestion="take larger micro-batches"
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
    """Return the first number of micro-batches that is tried for M1."""
    return max(_FIRST, 2 * max(schedule.depth or (0,)))


def _group(schedule: ScheduleSpec, num_stages: int) -> int:
    """Return the number of micro-batches that an interleaved schedule takes together, else 1."""
    return num_stages // schedule.chunks if schedule.kind is ScheduleKind.INTERLEAVED else 1


def _period(schedule: ScheduleSpec, num_stages: int) -> int | None:
    """Return the period p of (1); None if all micro-batches must be simulated."""
    group = schedule.k if schedule.kind is ScheduleKind.KFKB else _group(schedule, num_stages)
    return next((group * times for times in _CYCLES if 0 < group * times <= _FIRST), None)
