"""Judging complete plans of a search, many at a time: the pipeline recurrence with what is known before placement.

    (1)  forward, backward of a stage = those of its slowest replica; ZeRO that cannot hide behind compute stretches
         the backward
    (2)  transfer between stages = what the busiest NIC or shared link needs for a whole micro-batch, and one latency
    (3)  tail of a stage = gradient exchange and update

Never below the bound of ``solve.bounds``. Boundaries do not disturb each other here; the exact engine says what
that costs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from argosy.cluster.topology import Cluster
from argosy.schedule import ScheduleSpec
from argosy.sim.constant import pipeline_seconds
from argosy.solve.bounds import Shape, group_size, in_flight
from argosy.solve.pipeline import Choice
from argosy.space.option import Option, Part
from argosy.space.pool import Pool
from argosy.space.price import Prices

Complete = tuple[Choice, ...]


class Judge:
    """Seconds of complete plans; remembers what it has priced."""

    def __init__(self, prices: Prices, cluster: Cluster) -> None:
        self.prices = prices
        self.cluster = cluster
        self.wires: dict[tuple[int, int], tuple[float, float, float, float]] = {}
        self.hops: dict[tuple[tuple[Part, ...], tuple[Part, ...]], tuple[float, float]] = {}
        self.judged = 0

    def seconds(self, shape: Shape, plans: Sequence[Complete]) -> tuple[list[float], list[ScheduleSpec]]:
        """The time of every plan under the best schedule that fits in memory, and that schedule; infinity if none
        does."""
        best = [math.inf] * len(plans)
        under = [shape.schedules[0]] * len(plans)
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, plan in enumerate(plans):
            by_length[len(plan)].append(index)
        for length, members in by_length.items():
            columns = {index: self._columns(plans[index]) for index in members}
            for schedule in shape.schedules:
                depths = [in_flight(schedule, left, shape.num_micro_batches) for left in range(length, 0, -1)]
                group = group_size(schedule)
                fitting = [index for index in members if _fits(plans[index], depths, group)]
                if not fitting:
                    continue
                forward, backward, transfer, tail = (np.array([columns[i][at] for i in fitting]).T for at in range(4))
                found = pipeline_seconds(
                    depths,
                    group,
                    shape.num_micro_batches,
                    forward=forward,
                    backward=backward,
                    transfer=transfer,
                    tail=tail,
                )
                for index, seconds in zip(fitting, found.tolist(), strict=True):
                    if seconds < best[index] * (1 - 1e-12):
                        best[index], under[index] = seconds, schedule
        self.judged += len(plans)
        return best, under

    def _columns(self, plan: Complete) -> tuple[list[float], list[float], list[float], list[float]]:
        forward, backward, transfer, tail = [], [], [], []
        for index, choice in enumerate(plan):
            option, first, end = choice.option, choice.first, choice.end
            ahead, back = option.seconds(first, end)
            forward.append(ahead)
            backward.append(back)
            tail.append(option.tail(first, end) + self._exposed(choice, ahead + back))
            follower = plan[index + 1].option if index + 1 < len(plan) else None
            transfer.append(self._transfer(option, follower, end))
        if self.prices.model.blocking:  # both ends of a transfer wait for it, there and back
            waits = [one + other for one, other in zip(transfer, [0.0, *transfer[:-1]], strict=True)]
            forward = [seconds + more for seconds, more in zip(forward, waits, strict=True)]
            backward = [seconds + more for seconds, more in zip(backward, waits, strict=True)]
            transfer = [0.0] * len(transfer)
        return forward, backward, transfer, tail

    def _exposed(self, choice: Choice, seconds: float) -> float:
        """What no compute hides of ZeRO's exchanges: the last scatter, and under ZeRO 3 the first gather; nothing more
        where they already fill all of the stage's ``seconds``."""
        if choice.option.zero < 2:
            return 0.0
        busy = self.prices.weigh_range(choice.option.load, choice.first, choice.end)
        if busy >= seconds:
            return 0.0
        return busy if choice.option.zero == 2 else busy * 2 / 3

    def _transfer(self, source: Option, target: Option | None, cut: int) -> float:
        """(2), for one micro-batch."""
        if target is None:
            return 0.0
        key = (source.parts, target.parts)
        if key not in self.hops:
            pairs = [self._pair(one, other) for one in source.parts for other in target.parts]
            inside = _side_by_side(source, target, self.prices.pools)
            self.hops[key] = (
                self._inside(source, target) if inside else _outside(source, target, pairs, self.prices.pools)
            )
        per_byte, latency = self.hops[key]
        return per_byte * float(self.prices.outputs[cut]) + latency

    def _inside(self, source: Option, target: Option) -> tuple[float, float]:
        pool = self.prices.pools[source.parts[0].pool]
        sides = (source.parts, target.parts)
        if pool.intra_is_shared:
            return sum(part.most * part.replicas for part in sides[0]) / pool.intra_bandwidth, pool.intra_latency
        slowest = max(part.most / (part.width * pool.intra_bandwidth) for side in sides for part in side)
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


def _fits(plan: Complete, depths: Sequence[int], group: int) -> bool:
    return all(
        choice.option.fits(choice.first, choice.end, depth, group) for choice, depth in zip(plan, depths, strict=True)
    )


def _side_by_side(source: Option, target: Option, pools: Sequence[Pool]) -> bool:
    """Whether two stages can share a node."""
    used: dict[int, int] = defaultdict(int)
    for part in (*source.parts, *target.parts):
        used[part.pool] += part.width * part.replicas
    if any(count > pools[pool].per_node for pool, count in used.items()):
        return False
    homes = [{node[0].partition(".")[0] for node in pools[pool].nodes} for pool in used]
    return bool(set.intersection(*homes))


def _outside(
    source: Option, target: Option, pairs: Sequence[tuple[float, float, float, float]], pools: Sequence[Pool]
) -> tuple[float, float]:
    samples = sum(part.samples * part.replicas + part.extra for part in source.parts)

    def per_node(part: Part) -> float:
        nodes = math.ceil(part.width * part.replicas / pools[part.pool].per_node)
        return (part.samples * part.replicas + part.extra) / nodes

    leaving = max(per_node(part) for part in source.parts) / min(pair[0] for pair in pairs)
    entering = max(per_node(part) for part in target.parts) / min(pair[1] for pair in pairs)
    return max(leaving, entering, samples / min(pair[2] for pair in pairs)), max(pair[3] for pair in pairs)
