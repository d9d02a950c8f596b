"""Judging complete plans of a search, many at a time: the pipeline recurrence with what is known before placement.

    (1)  forward, backward of a stage = those of its slowest replica; ZeRO that cannot hide behind compute stretches
         the backward
    (2)  transfer between stages = what the busiest NIC or shared link needs for a whole micro-batch, and one latency
    (3)  tail of a stage = gradient exchange and update; tied weights are summed across the stages that hold them once
         the first of these is through, beside its own exchange
    (4)  a plan takes no less than M times what the busiest NIC sends per micro-batch, forward and back

Never below the bound of ``solve.bounds``. Boundaries disturb each other in (4) only, and (2) takes any two neighbours
that could share a node to do so, also where a third one leaves no room; the exact engine says what that costs. Of even
plans (``solve.menu``) without ZeRO 2 and 3 it is itself a lower bound: there everything happens in every replica at
once, and contention can only add.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from argosy.cluster.topology import Cluster
from argosy.cost.communicate import ring_seconds
from argosy.schedule import ScheduleSpec
from argosy.schedule.generate import group_size
from argosy.sim.constant import pipeline_seconds
from argosy.solve.pipeline import Choice
from argosy.solve.shape import Shape, held
from argosy.space.option import Option, Part
from argosy.space.place import can_place, place_stages, row_places
from argosy.space.pool import Pool
from argosy.space.price import Prices

Complete = tuple[Choice, ...]
Parts = tuple[Part, ...]
_Columns = tuple[list[float], list[float], list[float], list[float], list[float], float]
"""Per stage: forward, backward, transfer, latency and tail; and the busiest NIC's seconds per micro-batch."""
_NO_HOP = (0.0, 0.0, 0.0, 0.0)


class Judge:
    """Seconds of complete plans; remembers what it has priced."""

    def __init__(self, prices: Prices, cluster: Cluster) -> None:
        self.prices = prices
        self.cluster = cluster
        self.wires: dict[tuple[int, int], tuple[float, float, float, float]] = {}
        self.hops: dict[tuple[Parts, Parts, bool], tuple[float, float, float, float]] = {}
        self.between: dict[tuple[Option, Option, bool], tuple[float, float, float, float]] = {}
        """The same, quicker to ask for."""
        self.stages: dict[tuple[Option, int, int], tuple[float, float, float]] = {}
        """Forward, backward and tail."""
        self.fitting: dict[tuple[Option, int, int, int, int], bool] = {}
        """Whether layers fit with so many micro-batches in flight, so many of them in a row."""
        self.tied: dict[tuple[tuple[Option, ...], int], float] = {}
        """What weights take that several stages hold."""
        self.outputs: list[float] = prices.outputs.tolist()
        self.judged = 0

    def seconds(
        self, shape: Shape, plans: Sequence[Complete], *, below: float = math.inf
    ) -> tuple[list[float], list[ScheduleSpec]]:
        """The time of every plan under the best schedule that fits in memory, and that schedule; infinity if none
        does, or if it is not below a time anyway."""
        best = [math.inf] * len(plans)
        under = [shape.schedules[0]] * len(plans)
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, plan in enumerate(plans):
            if can_place(self.prices.pools, [choice.option for choice in plan]):
                by_length[len(plan)].append(index)
        count = shape.num_micro_batches
        for length, members in by_length.items():
            columns = {index: self._columns(plans[index]) for index in members}
            if below < math.inf:
                members = [index for index in members if _least_seconds(shape, *columns[index]) < below]
            for schedule in shape.schedules:
                kept, group = held(schedule, length, count), group_size(schedule, count)
                fitting = [index for index in members if self._fits(plans[index], kept, group)]
                if not fitting:
                    continue
                names = ("forward", "backward", "transfer", "latency", "tail")
                arrays = {name: np.array([columns[i][at] for i in fitting]).T for at, name in enumerate(names)}
                found = pipeline_seconds(schedule, count, **arrays)
                for index, seconds in zip(fitting, found.tolist(), strict=True):
                    least = max(seconds, count * columns[index][-1])
                    if least < best[index] * (1 - 1e-12):
                        best[index], under[index] = least, schedule
        self.judged += len(plans)
        return best, under

    def _columns(self, plan: Complete) -> _Columns:
        transfer, latency = [], []
        busiest, before = 0.0, 0.0
        stages = [self._stage(choice) for choice in plan]
        forward, backward = [stage[0] for stage in stages], [stage[1] for stage in stages]
        shared = self._shared_nodes(plan)
        for choice, follower, inside in itertools.zip_longest(plan, plan[1:], shared):
            hop = self._between(choice.option, follower.option, inside) if follower is not None else _NO_HOP
            output = self.outputs[choice.end]
            transfer.append(max(hop[:3]) * output)
            latency.append(hop[3])
            busiest = max(busiest, hop[0] * output + before)
            before = hop[1] * output
        busiest = 0.0 if self.cluster.wires else max(busiest, before)
        if self.prices.model.blocking:  # both ends of a transfer wait for it, there and back
            hops = [one + other for one, other in zip(transfer, latency, strict=True)]
            waits = [one + other for one, other in zip(hops, [0.0, *hops[:-1]], strict=True)]
            forward = [seconds + more for seconds, more in zip(forward, waits, strict=True)]
            backward = [seconds + more for seconds, more in zip(backward, waits, strict=True)]
            transfer = latency = [0.0] * len(plan)
        return forward, backward, transfer, latency, self._tails(plan, stages, forward), busiest

    def _fits(self, plan: Complete, depths: Sequence[int], group: int) -> bool:
        for choice, depth in zip(plan, depths, strict=True):
            key = (choice.option, choice.first, choice.end, depth, group)
            fits = self.fitting.get(key)
            if fits is None:
                fits = self.fitting[key] = choice.option.fits(choice.first, choice.end, depth, group)
            if not fits:
                return False
        return True

    def _stage(self, choice: Choice) -> tuple[float, float, float]:
        key = (choice.option, choice.first, choice.end)
        found = self.stages.get(key)
        if found is None:
            found = self.stages[key] = (*choice.option.seconds(*key[1:]), choice.option.tail(*key[1:]))
        return found

    def _tails(
        self, plan: Complete, stages: Sequence[tuple[float, float, float]], forward: Sequence[float]
    ) -> list[float]:
        """(3)."""
        tails = [stage[2] for stage in stages]
        for at, choice in enumerate(plan):
            if choice.option.zero == 3:  # the first gather hides behind the way to the stage only
                tails[at] += max(0.0, choice.option.once_around(choice.first, choice.end) - sum(forward[:at]))
        ends = [choice.end for choice in plan]
        for layers, weights in self.prices.chain.shared:
            homes = sorted({bisect_right(ends, layer) for layer in layers})
            if len(homes) == 1:
                continue
            holders = [plan[home] for home in homes]
            key = (tuple(choice.option for choice in holders), weights)
            around = self.tied.get(key)
            if around is None:
                around = self.tied[key] = self._tied_seconds(*key)
            updates = [self.prices.weigh_range(c.option.update, c.first, c.end) for c in holders]
            tails[homes[0]] = max(tails[homes[0]], around + max(updates))
        return tails

    def _tied_seconds(self, options: tuple[Option, ...], weights: int) -> float:
        """Twice around a ring of all that hold the weights."""
        count = sum(option.holders for option in options)
        pools = [pool for option in options for pool in option.pools]
        first, *others = (option.parts for option in options)
        inside = _side_by_side(first, tuple(itertools.chain.from_iterable(others)), self.prices.pools)
        bandwidth = min(pool.intra_bandwidth if inside else pool.nic_bandwidth for pool in pools)
        latency = max(pool.intra_latency if inside else pool.nic_latency for pool in pools)
        return 2 * ring_seconds(weights * self.prices.bytes_summed, count, bandwidth, latency)

    def _shared_nodes(self, plan: Complete) -> list[bool]:
        """Per boundary, whether both of its stages are in one and the same node."""
        pools = self.prices.pools
        options = [choice.option for choice in plan]
        places = row_places(pools, options)
        homes: list[set[str]] = []
        if places is None:
            for replicas in place_stages(pools, options):
                homes.append({name.partition(".")[0] for replica in replicas for name in replica.devices})
        else:
            for option, stage in zip(options, places, strict=True):
                mine = set()
                for part, (begin, end) in zip(option.parts, stage, strict=True):
                    pool = pools[part.pool]
                    first, last = begin // pool.per_node, (end - 1) // pool.per_node
                    mine |= {pool.nodes[at][0].partition(".")[0] for at in range(first, last + 1)}
                homes.append(mine)
        return [len(one | other) == 1 for one, other in itertools.pairwise(homes)]

    def _between(self, source: Option, target: Option, inside: bool) -> tuple[float, float, float, float]:
        found = self.between.get((source, target, inside))
        if found is None:
            found = self.between[source, target, inside] = self._hop(source.parts, target.parts, inside)
        return found

    def hop_seconds(self, source: Parts, target: Parts, output: float) -> float:
        """(2) and the latency, for so many output bytes of a sample."""
        hop = self._hop(source, target, _side_by_side(source, target, self.prices.pools))
        return max(hop[:3]) * output + hop[3]

    def _hop(self, source: Parts, target: Parts, inside: bool) -> tuple[float, float, float, float]:
        """(2) per output byte of a sample: out of the source's nodes, into the target's, in between; and latency."""
        key = (source, target, inside)
        if key not in self.hops:
            if inside:
                per_byte, latency = self._inside(source, target)
                self.hops[key] = (0.0, 0.0, per_byte, latency)
            else:
                pairs = [self._pair(one, other) for one in source for other in target]
                self.hops[key] = _outside(source, target, pairs, self.prices.pools)
        return self.hops[key]

    def _inside(self, source: Parts, target: Parts) -> tuple[float, float]:
        pool = self.prices.pools[source[0].pool]
        if pool.intra_is_shared:
            return sum(part.most * part.replicas for part in source) / pool.intra_bandwidth, pool.intra_latency
        slowest = max(part.most / (part.width * pool.intra_bandwidth) for part in (*source, *target))
        return slowest, pool.intra_latency

    def _pair(self, one: Part, other: Part) -> tuple[float, float, float, float]:
        """Between two pools: bandwidth out of a node, into a node, of what lies between, and latency."""
        key = (one.pool, other.pool)
        if key not in self.wires:
            source, target = self.prices.pools[one.pool].nodes, self.prices.pools[other.pool].nodes
            start, end = source[0][0], target[-1][-1]
            if len({start.partition(".")[0], end.partition(".")[0]}) == 1:
                pool = self.prices.pools[one.pool]
                self.wires[key] = (pool.intra_bandwidth, pool.intra_bandwidth, math.inf, pool.intra_latency)
            else:
                route = self.cluster.fastest(start, end, 1e6)
                rates = [self.cluster.links[link].bandwidth.at(0) for link in route.links]
                between = min(rates[1:-1], default=math.inf) if len(rates) > 1 else rates[0]
                self.wires[key] = (rates[0], rates[-1], between, self.cluster.latency(route))
        return self.wires[key]


def _least_seconds(
    shape: Shape,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    latency: Sequence[float],
    tail: Sequence[float],
    busiest: float,
) -> float:
    """No schedule is faster: the first micro-batch comes to a stage, all pass through it, and the last goes back to the
    front, at each stage followed by its tail."""
    count, gate = shape.num_micro_batches, shape.gate
    least, ahead, after = count * busiest, 0.0, 0.0
    for stage, rest in enumerate(tail):
        after = max(after, rest) if gate == 1 else rest
        least = max(least, ahead + count * (forward[stage] + backward[stage]) + after)
        hop = transfer[stage] + latency[stage]
        ahead += forward[stage] + hop
        after += backward[stage] + hop
    return least


def _side_by_side(source: Parts, target: Parts, pools: Sequence[Pool]) -> bool:
    """Whether two stages can share a node."""
    used: dict[int, int] = defaultdict(int)
    for part in (*source, *target):
        used[part.pool] += part.devices
    if any(count > pools[pool].per_node for pool, count in used.items()):
        return False
    return bool(frozenset.intersection(*(pools[pool].homes for pool in used)))


def _outside(
    source: Parts, target: Parts, pairs: Sequence[tuple[float, float, float, float]], pools: Sequence[Pool]
) -> tuple[float, float, float, float]:
    samples = sum(part.all_samples for part in source)

    def per_node(part: Part) -> float:
        return part.all_samples / math.ceil(part.devices / pools[part.pool].per_node)

    leaving = max(per_node(part) for part in source) / min(pair[0] for pair in pairs)
    entering = max(per_node(part) for part in target) / min(pair[1] for pair in pairs)
    return leaving, entering, samples / min(pair[2] for pair in pairs), max(pair[3] for pair in pairs)
