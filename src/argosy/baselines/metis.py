"""Plan in the manner of Metis: uneven stages for uneven devices, by a closed form.

Source: Um et al., "Metis: fast automatic distributed training on heterogeneous GPUs" (USENIX
ATC'24); its rules in our own words.

    (1)  the nodes form a row, kind after kind, in every order of the kinds
    (2)  the row is cut into S device groups whose sizes are powers of two, none below half of n / S
    (3)  a group of g devices runs d = g / t replicas of width t, t = 1 at first; then, step by
         step, on the stage with least free memory t is doubled, as long as equal devices of one
         node can form the groups
    (4)  layers: a share proportional to the group's speed, then boundaries move by one layer while
         the slowest stage gets faster; a stage that lacks memory has its share reduced to 0.9
         capacity / demand of itself, up to 3 times
    (5)  samples of a replica proportional to its speed, rounded down, the rest to the largest
         fractions
    (6)  the plan with the least estimate of ``closed_form``, over all micro-batch sizes

Metis limits how many groups it permutes, and takes minutes for some dozens of devices; here the
limits are 16 groups, 4 arrangements of one set of sizes, 6 orders of kinds, and 400 plans, first
those that would be fastest if every stage were perfectly balanced and no byte sent:

    (7)  (M + S - 1) b      for micro-batches of b samples and S stages
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from argosy.baselines.assemble import Groups, Shortage, assemble, lightest, shared_by, shortage
from argosy.baselines.closed_form import closed_form_seconds
from argosy.baselines.job import NoPlan, PlanningJob
from argosy.plan.plan import Plan, Recompute
from argosy.units import counted

# The following limits bound the search time. A plan has at most this many groups.
_MOST_GROUPS = 16
# At most this many arrangements of one multiset of sizes are tried.
_MOST_ARRANGEMENTS = 4
# At most this many orders of the device kinds are tried.
_MOST_ORDERS = 6
# At most this many plans are tried in all.
_MOST_PLANS = 400
# A group has at least this share of the mean size n / S (2).
_VARIANCE = 0.5
# The share of a stage that lacks memory is reduced at most this often (4).
_ATTEMPTS = 3

Row = tuple[str, ...]
"""The names of a group's devices."""


@dataclass(frozen=True, kw_only=True)
class _Grouping:
    """A list of device groups that each have a tensor width."""

    groups: tuple[Row, ...]
    widths: tuple[int, ...]

    def replicas(self, stage: int) -> tuple[Row, ...]:
        group, width = self.groups[stage], self.widths[stage]
        return tuple(group[at : at + width] for at in range(0, len(group), width))


def metis_plan(job: PlanningJob) -> Plan | NoPlan:
    """Return the plan with the least estimate (6)."""
    best: tuple[float, Plan] | None = None
    lacking: Shortage | None = None
    speeds = {name: 1 / job.pace(name) for name in job.devices}
    work = [
        forward + backward for forward, backward in job.layer_times(job.usual, job.typical_samples)
    ]
    for plan in itertools.islice(_plans(job, speeds, work), _MOST_PLANS):
        if isinstance(plan, Shortage):
            lacking = (
                plan
                if lacking is None
                else min(lacking, plan, key=lambda short: short.needed - short.usable)
            )
            continue
        seconds = closed_form_seconds(job, plan)
        if best is None or seconds < best[0]:
            best = (seconds, plan)
    if best is not None:
        return best[1]
    few = f"{counted(job.global_batch, 'sample')}, too few for its device groups"
    return NoPlan(reason=str(lacking) if lacking else few)


def _plans(
    job: PlanningJob, speeds: dict[str, float], work: Sequence[float]
) -> Iterator[Plan | Shortage]:
    """Yield plans, or the memory that they lack, in the order of (7)."""
    most = min(job.widest, max(map(len, job.nodes)))
    pairs = [
        (grouping, size)
        for grouping in _groupings(job)
        for size in job.batches
        if size * most >= max(map(len, grouping.groups))
    ]
    pairs.sort(key=lambda pair: job.global_batch + (len(pair[0].groups) - 1) * pair[1])
    for grouping, size in pairs:
        yield from _widened(job, grouping, size, speeds, work)


def _groupings(job: PlanningJob) -> Iterator[_Grouping]:
    """Yield the device groups of (1) and (2)."""
    for order in itertools.islice(itertools.permutations(job.kinds), _MOST_ORDERS):
        row = [
            name
            for kind in order
            for node in job.nodes
            for name in node
            if job.device(name).kind.name == kind
        ]
        for sizes in group_sizes(len(row), min(_MOST_GROUPS, len(job.chain.layers))):
            devices = iter(row)
            groups = tuple(tuple(itertools.islice(devices, size)) for size in sizes)
            yield _Grouping(groups=groups, widths=(1,) * len(groups))


def group_sizes(count: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield sizes by (2): every number of groups up to ``most``, every multiset of sizes.

    Some of each multiset's arrangements are tried.

    >>> list(group_sizes(6, 3))
    [(2, 4), (4, 2), (2, 2, 2), (1, 1, 4), (1, 4, 1), (4, 1, 1)]
    """
    for stages in range(1, min(count, most) + 1):
        powers = [
            2**power
            for power in range(count.bit_length())
            if 2**power >= _VARIANCE * count / stages
        ]
        for sizes in _multisets(count, stages, powers):
            distinct = dict.fromkeys(itertools.islice(_arrangements(sizes), _MOST_ARRANGEMENTS))
            yield from distinct


def _multisets(count: int, parts: int, powers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield nondecreasing sizes from ``powers`` that sum to ``count``, the most even first."""
    if parts == 0:
        if count == 0:
            yield ()
        return
    for index in range(len(powers) - 1, -1, -1):
        if powers[index] * parts <= count:
            for rest in _multisets(count - powers[index], parts - 1, powers[index:]):
                yield (powers[index], *rest)


def _arrangements(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the distinct orders of a multiset."""
    if not sizes:
        yield ()
        return
    for size in dict.fromkeys(sizes):
        left = list(sizes)
        left.remove(size)
        for rest in _arrangements(tuple(left)):
            yield (size, *rest)


def _widened(
    job: PlanningJob,
    grouping: _Grouping,
    size: int,
    speeds: dict[str, float],
    work: Sequence[float],
) -> Iterator[Plan | Shortage]:
    """Yield the plans of (3), from width 1 on."""
    while True:
        plan = None
        if all(len(grouping.replicas(stage)) <= size for stage in range(len(grouping.groups))):
            plan = _plan(job, grouping, size, speeds, work)
            if plan is not None:
                yield plan
        wider = [stage for stage in range(len(grouping.groups)) if _can_widen(job, grouping, stage)]
        if not wider:
            return
        stage = min(
            wider,
            key=lambda at: (len(grouping.groups[at]) * _memory(job, grouping.groups[at][0]), at),
        )
        widths = [width * (2 if at == stage else 1) for at, width in enumerate(grouping.widths)]
        grouping = _Grouping(groups=grouping.groups, widths=tuple(widths))


def _memory(job: PlanningJob, name: str) -> float:
    return job.device(name).kind.memory


def _can_widen(job: PlanningJob, grouping: _Grouping, stage: int) -> bool:
    """Return whether pairs of neighbouring replicas are equal devices of one node."""
    width = 2 * grouping.widths[stage]
    group = grouping.groups[stage]
    if len(group) % width or width > job.widest:
        return False
    wide = (group[at : at + width] for at in range(0, len(group), width))
    return all(len({job.looks[name] for name in members}) == 1 for members in wide)


def _plan(
    job: PlanningJob,
    grouping: _Grouping,
    size: int,
    speeds: dict[str, float],
    work: Sequence[float],
) -> Plan | Shortage | None:
    """Return a plan by (4) and (5), the memory that it lacks, or None if a replica gets no
    sample."""
    capacity = [sum(speeds[name] for name in group) for group in grouping.groups]
    lacks: Plan | Shortage | None = None
    for _ in range(_ATTEMPTS + 1):
        ends = climbed(proportional_ends(work, capacity), work, capacity)
        plan = _assembled(job, grouping, size, speeds, ends)
        if plan is None:
            return None
        lacks = lightest(job, plan, recompute=(Recompute.NONE, Recompute.FULL))
        if isinstance(lacks, Plan):
            return lacks
        stage = next(at for at, member in enumerate(plan.stages) if lacks.device in member.devices)
        worst = shortage(job, plan) or lacks
        capacity[stage] *= 0.9 * worst.usable / worst.needed
    return lacks


def _assembled(
    job: PlanningJob, grouping: _Grouping, size: int, speeds: dict[str, float], ends: Sequence[int]
) -> Plan | None:
    layout = []
    for stage, (first, end) in enumerate(itertools.pairwise((0, *ends))):
        replicas = grouping.replicas(stage)
        samples = shared_by(
            [len(group) * min(speeds[name] for name in group) for group in replicas], size
        )
        if min(samples) == 0:
            return None
        layout.append(Groups(first=first, end=end, groups=replicas, samples=samples))
    return assemble(job, layout, zero=1)


def proportional_ends(work: Sequence[float], capacity: Sequence[float]) -> list[int]:
    """Return ends of stages whose work is proportional to their capacity, with at least one layer.

    >>> proportional_ends([1.0] * 8, [3.0, 1.0])
    [6, 8]
    """
    sums = list(itertools.accumulate(work, initial=0.0))
    ends: list[int] = []
    reached = 0.0
    for stage, share in enumerate(capacity):
        reached += sums[-1] * share / sum(capacity)
        least, most = (ends[-1] if ends else 0) + 1, len(work) - (len(capacity) - stage - 1)
        ends.append(min(range(least, most + 1), key=lambda end: abs(sums[end] - reached)))
    ends[-1] = len(work)
    return ends


def climbed(ends: list[int], work: Sequence[float], capacity: Sequence[float]) -> list[int]:
    """Move boundaries by one layer while the slowest stage gets faster (4).

    >>> climbed([1, 4], [1.0] * 4, [1.0, 1.0])
    [2, 4]
    """
    sums = list(itertools.accumulate(work, initial=0.0))

    def slowest(cuts: Sequence[int]) -> float:
        pairs = zip(itertools.pairwise((0, *cuts)), capacity, strict=True)
        return max((sums[end] - sums[first]) / share for (first, end), share in pairs)

    best = slowest(ends)
    while True:
        moved = []
        for at, step in itertools.product(range(len(ends) - 1), (-1, 1)):
            shifted = [*ends]
            shifted[at] += step
            if (shifted[at - 1] if at else 0) < shifted[at] < shifted[at + 1]:
                moved.append((slowest(shifted), shifted))
        if not moved or min(moved)[0] >= best * (1 - 1e-12):
            return ends
        best, ends = min(moved)
