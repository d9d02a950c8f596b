"""Evaluate the pipeline recurrence for complete plans of one length, and bound its error from
shared links.

    (1)  least = the recurrence of ``sim.constant`` with every link to itself, and at least M times
         what the busiest link needs per micro-batch
    (2)  most  = the recurrence with every transfer taking as long as all that share its links
    (3)  late  = gradient sums that follow one another on the same links, beside each other and
         beside gradients that are sent on
    (4)  a plan is sure if ((2) - (1)) / 3 + (3), plus what ZeRO 2 and 3 pass around, is at most 5 %
         of (1)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from argosy.schedule import ScheduleSpec
from argosy.sim.constant import pipeline_seconds
from argosy.solve.finalists.wiring import Wiring
from argosy.solve.search.pipeline import Choice
from argosy.solve.search.shape import Shape
from argosy.space.option import Option

# A plan is not simulated if sharing adds at most this share to its time.
_SURE = 0.05
# Transfers that could always share their links do so in less than one of this many cases, as
# measured on random clusters; exchanges at the end that could share usually do.
_SELDOM = 3.0
# Fields of ``Columns`` that ``sim.constant`` takes as arrays.
_NAMES = ("forward", "backward", "transfer", "latency", "tail")


@dataclass(slots=True)
class Columns:
    """The inputs that the recurrence needs per stage of a plan, and bounds on its error."""

    forward: list[float]
    backward: list[float]
    transfer: list[float]
    latency: list[float]
    tail: list[float]
    busiest: float
    """Seconds per micro-batch of the busiest link."""
    shared: list[float]
    """Like ``transfer``, if all boundaries send at the same time."""
    late: float
    """Seconds that exchanges on the same links can add at the end."""
    passing: float
    """Seconds per micro-batch in which weights and gradients are passed around under ZeRO 2 and 3,
    beside transfers."""
    is_known: bool
    """Whether the nodes of the stages are known, and the rates at which they exchange weights."""
    returns: list[float] | None = None
    """1 for a stage to which gradients return, 0 for one without a backward; None if they return to
    all."""


class ScheduleTime(NamedTuple):
    """A time that the recurrence gives for a plan under a schedule, with every link to itself."""

    schedule: ScheduleSpec
    least: float


def recurrence_seconds(
    schedule: ScheduleSpec, count: int, plans: Sequence[Columns], *, shared: bool = False
) -> list[float]:
    """Return the seconds of plans of one length if every link is exclusive (1) or, with ``shared``,
    if transfers share all their links (2)."""
    arrays = {name: np.array([getattr(plan, name) for plan in plans]).T for name in _NAMES}
    if shared:
        arrays["transfer"] = np.array([plan.shared for plan in plans]).T
    if any(plan.returns is not None for plan in plans):
        all_return = [1.0] * len(plans[0].forward)
        arrays["returns"] = np.array([plan.returns or all_return for plan in plans]).T
    times = pipeline_seconds(schedule, count, **arrays)
    return [
        max(seconds, count * plan.busiest)
        for seconds, plan in zip(times.tolist(), plans, strict=True)
    ]


def is_plain_sum(option: Option) -> bool:
    """Return whether a stage sums all its gradients at the end, among all its replicas."""
    return option.zero < 2 and option.context == 1 and option.expert == 1


def _over(wiring: Wiring, source: int, target: int) -> Hashable:
    """Return the resource that bytes between two stages, or inside one, may share with others: the
    medium of a node, or the NICs of a site."""
    home = wiring.homes[source]
    return home if home is not None and home == wiring.homes[target] else wiring.sites[source]


def late_seconds(
    plan: Sequence[Choice], exchanges: Sequence[float], transfer: Sequence[float], wiring: Wiring
) -> float:
    """Return the seconds by which gradient sums on the same links can be delayed by each other, and
    by gradients that are sent at the same time."""
    late = 0.0
    together: dict[Hashable, list[float]] = defaultdict(list)
    for at, choice in enumerate(plan):
        option = choice.option
        if option.holders < 2 or (
            wiring.homes[at] is not None and not option.pools[0].intra_is_shared
        ):
            continue
        over = _over(wiring, at, at)
        together[over].append(exchanges[at])
        if at and over == _over(wiring, at, at - 1):
            late += min(exchanges[at], transfer[at - 1])
    return late + sum(sum(seconds) - max(seconds) for seconds in together.values())


def is_sure(least: float, most: float, plan: Columns, count: int) -> bool:
    """Return whether the time of a plan is accurate enough: ``least`` is the one without shared
    links, ``most`` the one if every transfer shares its links with all others."""
    shared = (most - least) / _SELDOM + plan.late + count * plan.passing
    return plan.is_known and shared <= _SURE * least


def may_share(plan: Columns) -> bool:
    """Return whether sharing links can cost more than ``_SURE``: a transfer on the longest path is
    followed by the compute that waited for it."""
    for stage in range(len(plan.forward) - 1):
        following = min(plan.forward[stage + 1], plan.backward[stage])
        if plan.shared[stage] - plan.transfer[stage] > _SURE * _SELDOM * following:
            return True
    return False


def least_seconds(shape: Shape, plan: Columns) -> float:
    """Return a lower bound over all schedules: the first micro-batch reaches a stage, all pass
    through it, and the last goes back to the front, at each stage followed by its tail."""
    count, gate = shape.num_micro_batches, shape.gate
    least, ahead, after = count * plan.busiest, 0.0, 0.0
    for stage, rest in enumerate(plan.tail):
        after = max(after, rest) if gate == 1 else rest
        least = max(least, ahead + count * (plan.forward[stage] + plan.backward[stage]) + after)
        hop = plan.transfer[stage] + plan.latency[stage]
        ahead += plan.forward[stage] + hop
        after += plan.backward[stage] + (hop if plan.returns is None else plan.returns[stage] * hop)
    return least
