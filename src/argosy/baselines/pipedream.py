"""Plan as PipeDream does: contiguous stages with replication that minimise the slowest stage.

Source: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training" (SOSP'19),
section 3.1. It assumes equal devices and proceeds level by level: machines of g devices first, then
the machines. With t the time of layers, w their weights, a the bytes that cross a cut, B the
bandwidth of the level, T_0 the time on one device:

    (1)  T_k(i..j, m) = 1/m max( A_{k-1}(i..j, g_{k-1}),  2 (m - 1) w(i..j) / B_k ), replicated over
         m components
    (2)  A_k(i..j, m) = min( T_k(i..j, m), min over s, m' max( A_k(i..s, m - m'), 2 a_s / B_k,
         T_k(s+1..j, m') ) )

with A_0 = t on a single device. Machines of unequal size are one level at the bandwidth between
machines. PipeDream trains asynchronously; here, as in the comparison of DAPPLE, its partition runs
under synchronous 1F1B. It is planned with profiles of a few samples per device; the fastest of
these partitions and of the micro-batch sizes that fit, in the simulator, counts.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from argosy.baselines.assemble import Groups, assemble, fastest_fitting, shared_evenly
from argosy.baselines.equal_devices import EqualDevices, Floats
from argosy.baselines.job import NoPlan, PlanningJob
from argosy.plan.plan import Plan

# Partitions are planned with at most this many different profiles.
_PROFILES = 5

Partition = tuple[tuple[int, int, tuple[int, ...]], ...]
"""The (first layer, end, ranks of the devices) of every stage."""
Component = tuple[int, ...]
"""The ranks of the devices of a machine, or of one device."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A set of components that are joined at one bandwidth."""

    count: int
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """A profile of a model that the planner uses: running sums over the layers."""

    seconds: Floats
    weights: Floats
    """Running sum of bytes."""
    outputs: Floats
    """Bytes across the cut before each layer."""


def pipedream_plan(job: PlanningJob) -> Plan | NoPlan:
    """Return the partition on real devices, with the micro-batch size that is fastest."""
    view = EqualDevices(job)
    partitions: dict[Partition, None] = {}
    for samples in _profiled(job):
        outputs = np.asarray(view.outputs * samples)
        amounts = Amounts(seconds=view.both(samples, 1), weights=view.weights, outputs=outputs)
        partitions[pipedream_partition(amounts, _levels(view))[1]] = None
    plans = (
        _placed(job, partition, size)
        for partition in partitions
        for size in job.batches
        if size >= max(len(devices) for *_, devices in partition)
    )
    return fastest_fitting(job, plans)


def _profiled(job: PlanningJob) -> list[int]:
    """Return the numbers of samples with which a device is profiled: powers of two up to its even
    share of the batch."""
    return [2**power for power in range(job.typical_samples.bit_length())][-_PROFILES:]


def _levels(view: EqualDevices) -> list[Level]:
    machines, machine_size = len(view.sizes), view.sizes[0]
    if machines == 1:
        return [Level(count=machine_size, bandwidth=view.inside)]
    if len(set(view.sizes)) > 1 or machine_size == 1:
        return [Level(count=view.count, bandwidth=view.between)]
    return [
        Level(count=machine_size, bandwidth=view.inside),
        Level(count=machines, bandwidth=view.between),
    ]


def pipedream_partition(amounts: Amounts, levels: list[Level]) -> tuple[float, Partition]:
    """Return the seconds of the slowest stage, and the stages, by (2)."""
    last = len(amounts.seconds) - 1
    alone = amounts.seconds[None, :] - amounts.seconds[:, None]
    tables: list[_Table] = []
    for level in levels:
        tables.append(
            _Table(amounts, level, tables[-1].cost[tables[-1].level.count] if tables else alone)
        )
    top = tables[-1]
    value = float(top.cost[top.level.count][0, last])
    return value, tuple(_stages(tables, 0, last, [_components(levels)]))


def _components(levels: list[Level]) -> list[Component]:
    """Return the ranks of every component of the top level."""
    size = math.prod(level.count for level in levels[:-1])
    return [tuple(range(at * size, (at + 1) * size)) for at in range(levels[-1].count)]


class _Table:
    """A table of A_k of one level for all ranges, by the number of components, that records the
    choice behind each minimum."""

    def __init__(self, amounts: Amounts, level: Level, below: Floats) -> None:
        self.level = level
        self.cost: list[Floats] = [np.full_like(below, np.inf)]
        self.choice: list[tuple[np.ndarray, np.ndarray]] = []
        """For each number of components: the cut (-1: one replicated stage) and m'."""
        weights = amounts.weights[None, :] - amounts.weights[:, None]
        whole = [
            np.maximum(below, 2 * (count - 1) * weights / level.bandwidth) / count
            for count in range(1, level.count + 1)
        ]
        crossing = 2 * amounts.outputs / level.bandwidth
        size = len(crossing)
        for count in range(1, level.count + 1):
            best = np.where(
                np.arange(size)[None, :] > np.arange(size)[:, None], whole[count - 1], np.inf
            )
            cuts, taken = np.full((size, size), -1), np.full((size, size), count)
            for last, cut in itertools.product(range(1, count), range(1, size - 1)):
                before = np.maximum(self.cost[count - last][:cut, cut], crossing[cut])[:, None]
                joined = np.maximum(before, whole[last - 1][cut, cut + 1 :][None, :])
                better = joined < best[:cut, cut + 1 :]
                best[:cut, cut + 1 :] = np.where(better, joined, best[:cut, cut + 1 :])
                cuts[:cut, cut + 1 :][better] = cut
                taken[:cut, cut + 1 :][better] = last
            self.cost.append(best)
            self.choice.append((cuts, taken))


def _stages(
    tables: list[_Table], first: int, end: int, copies: list[list[Component]]
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the stages of A for layers first..end-1 on the components of the last table's level,
    in equal copies that train data-parallel."""
    if not tables:
        return [(first, end, tuple(sorted(itertools.chain(*itertools.chain(*copies)))))]
    cuts, taken = tables[-1].choice[len(copies[0]) - 1]
    cut, last = int(cuts[first, end]), int(taken[first, end])
    split = len(copies[0]) - last
    inner = [_parts(component, tables[:-1]) for copy in copies for component in copy[split:]]
    if cut < 0:
        return _stages(tables[:-1], first, end, inner)
    before = _stages(tables, first, cut, [copy[:split] for copy in copies])
    return [*before, *_stages(tables[:-1], cut, end, inner)]


def _parts(component: Component, below: list[_Table]) -> list[Component]:
    """Return the components of the next level that form a component."""
    if not below:
        return [component]
    size = len(component) // below[-1].level.count
    return [component[at : at + size] for at in range(0, len(component), size)]


def _placed(job: PlanningJob, partition: Partition, size: int) -> Plan:
    layout = [
        Groups(
            first=first,
            end=end,
            groups=tuple((job.devices[rank],) for rank in ranks),
            samples=shared_evenly(size, len(ranks)),
        )
        for first, end, ranks in partition
    ]
    return assemble(job, layout)
