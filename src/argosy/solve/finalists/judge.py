"""Judge complete plans of a search, many at a time, on the devices that they will be placed on.

Most plans are timed by the pipeline recurrence (``sim.constant``), all of one length together:

    (1)  forward, backward of a stage = those of its slowest replica; ZeRO that cannot overlap with
         compute lengthens the backward
    (2)  transfer between stages = (4) of ``solve.finalists.wiring`` and its latency, by the places
         of both
    (3)  tail of a stage = gradient exchange and update; tied weights are summed across the stages
         that hold them once the first of these is through, beside its own exchange
    (4)  a plan takes at least M times what its busiest link needs per micro-batch

This is exact if no simultaneous transfers share a link. The maximum cost of sharing is known, too
(``solve.finalists.recurrence``). If it is too large, the plan is folded and simulated on its links
(``sim.folded``), under every schedule that may be the best. On level 1 this is done only for plans
near the best, and not again if sharing has cost little under the same wiring: such plans keep a
guess, based on the cost of sharing in other plans.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from argosy.cluster.lasting import at_time_zero
from argosy.cluster.topology import Cluster
from argosy.cost.communicate import ring_seconds
from argosy.plan.plan import Algorithm, Recompute
from argosy.schedule import ScheduleSpec
from argosy.schedule.generate import group_size
from argosy.sim.folded import FoldedPlan
from argosy.sim.tasks.known import Known
from argosy.solve.budget import never
from argosy.solve.finalists.devices import on_devices
from argosy.solve.finalists.recurrence import (
    Columns,
    ScheduleTime,
    is_plain_sum,
    is_sure,
    late_seconds,
    least_seconds,
    may_share,
    recurrence_seconds,
)
from argosy.solve.finalists.sums import Sums
from argosy.solve.finalists.wiring import Wiring, Wirings
from argosy.solve.search.pipeline import Choice
from argosy.solve.search.shape import Shape, held
from argosy.solve.settings import FEW_DEVICES
from argosy.space.option import Option, PoolPart
from argosy.space.place import Places, can_place
from argosy.space.price import Prices

# A complete plan as its stages; a key of dictionaries; the parts of one stage.
Complete = tuple[Choice, ...]
Key = tuple[object, ...]
Parts = tuple[PoolPart, ...]
# Sharing links under one schedule costs a plan at least this share of what it costs under another.
_ALIKE = 0.97
# If sharing links costs a plan at most this factor, plans of the same wiring are not simulated.
_CHEAP = 1.03
# A plan is simulated if its guessed time is within this factor of the best time.
NEAR = 1.05
# Judged times that differ by less than this share are the same.
SAME = 1e-6
# A judge that guesses simulates at most this many stages times micro-batches in all; further plans
# keep a guess.
_MOST_STEPS = 100_000


def plan_key(shape: Shape, plan: Complete) -> Key:
    """Return what identifies a complete plan, apart from its schedule."""
    return (shape, *((choice.option.way, choice.first, choice.end) for choice in plan))


def _at_both_ends(ways: Sequence[float]) -> list[float]:
    """Return for each stage the seconds of the transfers on both its sides."""
    return [behind + before for behind, before in zip(ways, [0.0, *ways[:-1]], strict=True)]


def _with_waits(seconds: Sequence[float], ways: Sequence[float]) -> list[float]:
    """Return the seconds of stages with those of the transfers at both of their ends."""
    return [own + more for own, more in zip(seconds, _at_both_ends(ways), strict=True)]


class Judge:
    """A judge that computes the seconds of complete plans, and caches what it has priced."""

    def __init__(
        self,
        prices: Prices,
        cluster: Cluster,
        *,
        guesses: bool = False,
        is_late: Callable[[], bool] = never,
    ) -> None:
        self.prices = prices
        self.cluster = cluster
        self.guesses = guesses
        """Whether plans need not be played if others of their wiring were."""
        self.is_frugal = guesses and sum(pool.count for pool in prices.pools) > FEW_DEVICES
        """Whether none is played that the recurrence finds no faster than the best."""
        self.calm = at_time_zero(cluster)
        self.wirings = Wirings(self.calm, prices.pools)
        self.sums = Sums(self.calm, prices.pools)
        self.stages: dict[tuple[Option, int, int], tuple[float, float, float]] = {}
        """Forward, backward and tail seconds of a stage."""
        self.fitting: dict[tuple[Option, int, int, int, int], bool] = {}
        """Whether layers fit with a number of micro-batches in flight, a number of them in a
        row."""
        self.tied: dict[tuple[tuple[Option, ...], int], float] = {}
        """Seconds to sum weights that several stages hold."""
        self.closed: dict[int, list[bool]] = {}
        """For each wiring, whether the exchanges of its stages are in closed form."""
        self.hops: dict[tuple[Parts, Parts], tuple[float, float]] = {}
        """Seconds per output byte of a sample, and latency."""
        self.outputs: list[float] = prices.outputs.tolist()
        self.costs: dict[tuple[int, int, ScheduleSpec], float] = {}
        """For each wiring, number of micro-batches and schedule, the least factor that sharing
        links has cost."""
        self.guessed: set[tuple[Shape, Complete]] = set()
        """Plans that share links and were not simulated."""
        self.judged = 0
        self.played: dict[Key, float] = {}
        """Seconds of plans that were folded and played, by schedule and plan."""
        self.known = Known()
        """What placed plans have in common."""
        self.is_late = is_late
        """Whether the time of the search is up; then no further plan is simulated."""
        self.steps_left = _MOST_STEPS if guesses else math.inf
        """Stages times micro-batches that may still be simulated."""

    def stop_guessing(self) -> None:
        """Play whatever shares links and is near the best from now on."""
        self.guesses, self.is_frugal, self.steps_left = False, False, math.inf

    def seconds(
        self,
        shape: Shape,
        plans: Sequence[Complete],
        *,
        below: float = math.inf,
        best: float = math.inf,
    ) -> tuple[list[float], list[ScheduleSpec]]:
        """Return the seconds of every plan under the best schedule that fits in memory, and that
        schedule.

        The time is infinite if no schedule fits, or if it is not below ``below``. Given the
        ``best`` time so far, plans that are hardly faster may keep a guess.
        """
        found = [math.inf] * len(plans)
        under = [shape.schedules[0]] * len(plans)
        self.judged += len(plans)
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, plan in enumerate(plans):
            if can_place(self.prices.pools, [choice.option for choice in plan]):
                by_length[len(plan)].append(index)
        for members in by_length.values():
            if below < math.inf and self.guesses:
                members = [
                    index for index in members if self._least_work(shape, plans[index]) < below
                ]
            columns = {index: self._columns(plans[index]) for index in members}
            if below < math.inf:
                members = [
                    index
                    for index in members
                    if least_seconds(shape, columns[index]) - self._slack(shape, columns[index])
                    < below
                ]
            times_of = self._times(shape, plans, members, columns)
            shared = self._least_shared(shape, times_of, columns)
            for index, times in times_of.items():
                fastest = min(times, key=lambda time: time.least)
                most = shared.get(index, fastest.least)
                if is_sure(fastest.least, most, columns[index], shape.num_micro_batches):
                    under[index], found[index] = fastest
                else:
                    slack = self._slack(shape, columns[index])
                    found[index], under[index] = self._shared_time(
                        shape, plans[index], times, below + slack, best + slack
                    )
                if found[index] >= below:
                    found[index] = math.inf
        return found, under

    def _times(
        self,
        shape: Shape,
        plans: Sequence[Complete],
        members: Sequence[int],
        columns: dict[int, Columns],
    ) -> dict[int, list[ScheduleTime]]:
        """Return for each plan of one length its times under the schedules that fit."""
        times: dict[int, list[ScheduleTime]] = defaultdict(list)
        count = shape.num_micro_batches
        for schedule in shape.schedules if members else ():
            kept, group = held(schedule, len(plans[members[0]]), count), group_size(schedule, count)
            fitting = [index for index in members if self._fits(plans[index], kept, group)]
            if not fitting:
                continue
            found = recurrence_seconds(schedule, count, [columns[index] for index in fitting])
            for index, seconds in zip(fitting, found, strict=True):
                times[index].append(ScheduleTime(schedule, seconds))
        return times

    def _least_shared(
        self,
        shape: Shape,
        times_of: Mapping[int, Sequence[ScheduleTime]],
        columns: Mapping[int, Columns],
    ) -> dict[int, float]:
        """Return the least seconds over all schedules of the plans that may share links, if every
        transfer shares them.

        Sharing makes no plan faster, so a schedule that is slower without it is not evaluated.
        """
        least = {index: math.inf for index in times_of if may_share(columns[index])}
        alone = {(index, time.schedule): time.least for index in least for time in times_of[index]}
        order = sorted(alone, key=lambda key: alone[key])
        for schedule in dict.fromkeys(schedule for _, schedule in order):
            chosen = [
                index for index in least if alone.get((index, schedule), math.inf) < least[index]
            ]
            if not chosen:
                continue
            plans = [columns[index] for index in chosen]
            found = recurrence_seconds(schedule, shape.num_micro_batches, plans, shared=True)
            for index, seconds in zip(chosen, found, strict=True):
                least[index] = min(least[index], seconds)
        return least

    def _shared_time(
        self, shape: Shape, plan: Complete, times: Sequence[ScheduleTime], below: float, best: float
    ) -> tuple[float, ScheduleSpec]:
        """The time of a plan on links that it shares with itself, under the best schedule: played
        if it may be faster than the best plan and is near what it has to beat; else guessed by what
        sharing has cost other plans of its wiring. Small costs are not looked at twice if there is
        something to beat."""
        wiring = self.wirings.of(tuple(choice.option for choice in plan))
        number, count = wiring.number if wiring is not None else -1, shape.num_micro_batches
        keys = [(number, count, time.schedule) for time in times]
        costs = self.costs if self.guesses else {}
        guesses = [time.least * costs.get(key, 1.0) for time, key in zip(times, keys, strict=True)]
        order = sorted(range(len(times)), key=guesses.__getitem__)
        guess, under = guesses[order[0]], times[order[0]].schedule
        is_cheap = best < math.inf and 1.0 <= costs.get(keys[order[0]], 0.0) <= _CHEAP
        may_win = not self.is_frugal or min(time.least for time in times) < (1 - SAME) * best
        is_played = may_win and guess < min(below, NEAR * best) and not is_cheap
        is_played = (
            is_played
            and not self.prices.model.blocking
            and self._has_devices(plan)
            and self.steps_left > 0
            and not self.is_late()
        )
        folded = self._folded(shape, plan) if is_played else None
        if folded is None:
            self.guessed.add((shape, plan))
            return guess, under
        best, cost = math.inf, 1.0
        for at in order:
            schedule, least = times[at]
            if cost * least >= best:
                continue
            self.steps_left -= len(plan) * count
            seconds = self.played[schedule, plan_key(shape, plan)] = folded.seconds(schedule)
            cost = max(1.0, _ALIKE * seconds / least) if self.guesses else 1.0
            if number >= 0:
                self.costs[keys[at]] = min(
                    self.costs.get(keys[at], math.inf), max(1.0, seconds / least)
                )
            if seconds < best * (1 - 1e-12):
                best, under = seconds, schedule
        return best, under

    def _folded(self, shape: Shape, plan: Complete) -> FoldedPlan | None:
        """The plan on devices, folded; None if that cannot be played."""
        placed = on_devices(shape, shape.schedules[0], plan, self.prices, self.cluster, self.known)
        job = (self.prices.chain, self.calm, self.prices.model)
        folded = FoldedPlan(placed, *job, self.known)
        return folded if folded.is_playable else None

    def _least_work(self, shape: Shape, plan: Complete) -> float:
        """Return a lower bound like ``least_seconds``, without transfers."""
        least = way = 0.0
        for choice in plan:
            forward, backward, _ = self._stage(choice)
            least = max(least, way + shape.num_micro_batches * (forward + backward))
            way += forward + shape.gate * backward
        return least

    def _slack(self, shape: Shape, plan: Columns) -> float:
        """Return the seconds by which the recurrence may be too long: ZeRO 2 and 3 overlap more
        than it assumes. A judge that guesses ignores this."""
        return 0.0 if self.guesses else shape.num_micro_batches * plan.passing

    def _has_devices(self, plan: Complete) -> bool:
        """Return whether there are devices for all stages at once."""
        taken = [
            sum(counts) for counts in zip(*(choice.option.vector for choice in plan), strict=True)
        ]
        return all(
            pool.count >= count for pool, count in zip(self.prices.pools, taken, strict=True)
        )

    def _columns(self, plan: Complete) -> Columns:
        stages = [self._stage(choice) for choice in plan]
        forward, backward = [stage[0] for stage in stages], [stage[1] for stage in stages]
        wiring = self.wirings.of(tuple(choice.option for choice in plan))
        outputs = [self.outputs[choice.end] for choice in plan[:-1]]
        first = self.prices.chain.first_backward
        returns = None if plan[0].end > first else [float(choice.end > first) for choice in plan]
        is_known = wiring is not None and self.wirings.are_apart
        if wiring is not None:
            alone, shared, busiest = wiring.seconds(outputs)
            latency = [*wiring.latency]
        else:
            hops = [
                self._hop(choice.option.parts, following.option.parts)
                for choice, following in itertools.pairwise(plan)
            ]
            alone = shared = [hop[0] * output for hop, output in zip(hops, outputs, strict=True)]
            busiest, latency = 0.0, [hop[1] for hop in hops]
        transfer, latency, shared = [*alone, 0.0], [*latency, 0.0], [*shared, 0.0]
        if share := self.prices.model.blocking:
            # Both ends of a transfer wait for it, there and back.
            ways = [share * sent + late for sent, late in zip(transfer, latency, strict=True)]
            forward = _with_waits(forward, ways)
            if returns is not None:
                ways = [way * is_sent for way, is_sent in zip(ways, returns, strict=True)]
            backward = _with_waits(backward, ways)
            transfer = [(1 - share) * seconds for seconds in transfer]
            shared = [(1 - share) * seconds for seconds in shared]
            latency = [0.0] * len(plan)
        tail, late = self._tails(plan, stages, forward, transfer, wiring)
        passing = 0.0
        for at, choice in enumerate(plan):
            if choice.option.zero > 1 and choice.option.holders > 1:
                if wiring is None or not self._closed_forms(plan, wiring)[at]:
                    is_known = False
                if len(plan) > 1:
                    passing += choice.option.zero * choice.option.once_around(
                        choice.first, choice.end
                    )
        times = (forward, backward, transfer, latency, tail)
        return Columns(*times, busiest, shared, late, passing, is_known, returns)

    def _fits(self, plan: Complete, depths: Sequence[int], group: int) -> bool:
        for choice, depth in zip(plan, depths, strict=True):
            key = (choice.option, choice.first, choice.end, depth, group)
            fits = self.fitting.get(key)
            if fits is None:
                fits = self.fitting[key] = choice.option.fits(
                    choice.first, choice.end, depth, group
                )
            if not fits:
                return False
        return True

    def _stage(self, choice: Choice) -> tuple[float, float, float]:
        key = (choice.option, choice.first, choice.end)
        seconds = self.stages.get(key)
        if seconds is None:
            seconds = (*choice.option.seconds(*key[1:]), choice.option.tail(*key[1:]))
            self.stages[key] = seconds
        return seconds

    def _tails(
        self,
        plan: Complete,
        stages: Sequence[tuple[float, float, float]],
        forward: Sequence[float],
        transfer: Sequence[float],
        wiring: Wiring | None,
    ) -> tuple[list[float], float]:
        """Return the gradient exchange and update of each stage (3), and by how much exchanges can
        be delayed by each other and by transfers."""
        tails = [stage[2] for stage in stages]
        updates = [self.prices.weigh_range(c.option.update, c.first, c.end) for c in plan]
        closed = self._closed_forms(plan, wiring) if wiring is not None else []
        for at, choice in enumerate(plan):
            if choice.option.zero == 3:  # the first gather overlaps only with the way to the stage
                ahead = sum(forward[: at + choice.option.prefetches])
                tails[at] += max(0.0, choice.option.once_around(choice.first, choice.end) - ahead)
            if (
                wiring is not None
                and not closed[at]
                and choice.option.holders > 1
                and is_plain_sum(choice.option)
            ):
                tails[at] = self._sum_seconds(choice, wiring.places[at]) + updates[at]
        exchanges = [max(0.0, tail - update) for tail, update in zip(tails, updates, strict=True)]
        late = late_seconds(plan, exchanges, transfer, wiring) if wiring is not None else 0.0
        ends = [choice.end for choice in plan]
        for layers, weights in self.prices.chain.shared:
            homes = sorted({bisect_right(ends, layer) for layer in layers})
            if len(homes) > 1:
                around = self._tied_seconds(plan, homes, weights, wiring)
                late += min(around, max(exchanges[home] for home in homes))
                tails[homes[0]] = max(
                    tails[homes[0]], around + max(updates[home] for home in homes)
                )
        return tails, late

    def _closed_forms(self, plan: Complete, wiring: Wiring) -> list[bool]:
        """Return for each stage whether its option has its exchange in closed form."""
        if self.sums.is_simple:
            return [True] * len(plan)
        if wiring.number not in self.closed:
            stages = zip((choice.option.parts for choice in plan), wiring.places, strict=True)
            self.closed[wiring.number] = [self.sums.is_in_closed_form([stage]) for stage in stages]
        return self.closed[wiring.number]

    def _sum_seconds(self, choice: Choice, places: Places) -> float:
        """Return the seconds of a stage's gradient sum on its links."""
        option = choice.option
        algorithms = (
            Algorithm.RING,
            Algorithm.HIERARCHICAL,
            *(() if option.zero else (Algorithm.TREE,)),
        )
        num_bytes = self.prices.weigh_range(
            (self.prices.exchanged_bytes(option.zero), 0.0, 0.0), choice.first, choice.end
        )
        return self.sums.seconds([(option.parts, places)], algorithms, num_bytes)

    def _tied_seconds(
        self, plan: Complete, homes: Sequence[int], weights: int, wiring: Wiring | None
    ) -> float:
        """Return the seconds of twice around a ring of all devices that hold the tied weights."""
        options = tuple(plan[home].option for home in homes)
        num_bytes = weights * self.prices.exchanged_bytes(0)
        are_together = wiring is not None and wiring.homes[homes[0]] is not None
        if wiring is not None and (are_together or not self.sums.is_simple):
            stages = [
                (option.parts, wiring.places[home])
                for option, home in zip(options, homes, strict=True)
            ]
            if not self.sums.is_in_closed_form(stages):
                return self.sums.seconds(stages, (Algorithm.RING,), num_bytes)
        if (options, weights) not in self.tied:
            count = sum(option.holders for option in options)
            ways = [
                way for option in options for way in zip(option.ways_out, option.pools, strict=True)
            ]
            bandwidth = min(rate or pool.intra_bandwidth for rate, pool in ways)
            latency = max(pool.nic_latency for _, pool in ways)
            self.tied[options, weights] = 2 * ring_seconds(num_bytes, count, bandwidth, latency)
        return self.tied[options, weights]

    def hop_seconds(self, source: Parts, target: Parts, output: float) -> float:
        """Return the seconds between two stages at the beginning of their rows, for output bytes of
        a sample."""
        per_byte, latency = self._hop(source, target)
        return per_byte * output + latency

    def _hop(self, source: Parts, target: Parts) -> tuple[float, float]:
        """Return the seconds per output byte between two stages, and the latency."""
        key = (source, target)
        if key not in self.hops:
            options = tuple(
                Option(prices=self.prices, vector=(), parts=parts, recompute=Recompute.NONE, zero=0)
                for parts in key
            )
            wiring = self.wirings.of(options)
            if wiring is not None:
                self.hops[key] = (wiring.seconds([1.0])[0][0], wiring.latency[0])
            else:
                self.hops[key] = self._hop_between_nodes((*source, *target))
        return self.hops[key]

    def _hop_between_nodes(self, parts: Parts) -> tuple[float, float]:
        """Return the seconds per output byte and the latency if a replica of one stage fills
        several nodes."""
        ways = []
        for part in parts:
            pool = self.prices.pools[part.pool]
            nodes = math.ceil(part.devices / pool.per_node)
            ways.append(
                (
                    part.all_samples / nodes / pool.nic_bandwidth if pool.nic_bandwidth else 0.0,
                    pool.nic_latency,
                )
            )
        return max(way[0] for way in ways), max(way[1] for way in ways)
