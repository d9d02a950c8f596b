"""Play an island plan: the steps of every island, and what islands exchange over the links between
them.

    (1)  A step of an island is an iteration of its plan (``sim.simulate``), from its own moment on
         under the traces.
    (2)  An exchange begins when the last island has reached its step, and moves, with S the bytes
         of a fragment as the plan compresses it and N islands: weights to each island's lead, S / N
         from each lead to each other one, the sums of these S / N back to each other one, new
         weights from each lead to its island.
    (3)  Blocking: an island goes on when its exchange has ended. Overlapped by tau steps: after tau
         more steps.
    (4)  An island is lost to an exchange that has not ended when no byte has passed between its
         lead and island 0's, in one direction, for ``lost_after`` seconds, which may begin before
         the exchange: the others exchange without it. It returns at the first exchange that finds
         the link up, and takes over parameters and momentum from the others before they go on. What
         it trained meanwhile does not count.

An exchange that is overlapped is played without the traffic inside islands, which uses other links
except for the NICs of leads. Time to add up, compress and copy to host memory is not counted.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

from argosy.cluster.lasting import from_moment, last_change
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.cost.compute import ComputeModel
from argosy.plan.islands import IslandPlan, lead
from argosy.plan.plan import Plan
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import Flow, Task, TaskGraph
from argosy.sim.island_window import IslandWindow
from argosy.sim.simulate import first_end, play
from argosy.timeline import SpanKind, Timeline
from argosy.workload.chain import Chain

LOST_AFTER = 10.0
"""Seconds after which an island that no byte reaches is lost, as in a run (4)."""
_WEIGHT_BYTES = 4
"""Of a parameter between the devices of an island and its lead."""


@dataclass(frozen=True, kw_only=True)
class FragmentExchange:
    """One exchange of a fragment."""

    step: int
    """After which it began."""
    arrived: tuple[float, ...]
    """When each island that takes part had done that step; seconds."""
    end: float
    islands: tuple[int, ...]
    """That took part."""
    lost_seconds: float = 0.0
    """Waited until others were taken for lost (4)."""

    @property
    def begin(self) -> float:
        return max(self.arrived) + self.lost_seconds


@dataclass(frozen=True, kw_only=True)
class IslandCourse:
    """What islands did over a number of steps."""

    steps: int
    ends: tuple[float, ...]
    """Per island, when it had done its last step and had the results of the exchanges that were
    due."""
    exchanges: tuple[FragmentExchange, ...]
    waited: tuple[float, ...]
    """Per island, seconds in which it waited for exchanges or for other islands."""
    samples: int = 0
    """That count: trained on by islands that took part in the exchange that followed."""
    stalled: str | None = None
    """Why a step or an exchange never ends."""

    @property
    def end(self) -> float:
        return max(self.ends)

    @property
    def step_seconds(self) -> float:
        return self.end / self.steps if self.steps else math.inf

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.end if self.end else 0.0


def held_parameters(plan: Plan, chain: Chain) -> list[tuple[str, float, float]]:
    """Per device of a plan: parameters that it keeps, and how many of them it sends when each is
    sent once."""
    found = []
    for stage in plan.stages:
        total = float(sum(layer.parameters for layer in chain.layers[stage.first : stage.end]))
        count = len(stage.devices)
        first = set(stage.holders[0])
        for holder in stage.holders:
            for device in holder:
                kept = total / (count if stage.zero else len(holder))
                found.append((device, kept, kept if stage.zero or device in first else 0.0))
    return found


def exchange_graph(plan: IslandPlan, chain: Chain) -> TaskGraph:
    """The transfers of one exchange (2)."""
    devices = tuple(dict.fromkeys(device for island in plan.islands for device in island.devices))
    index = {name: at for at, name in enumerate(devices)}
    leads = [index[lead(island)] for island in plan.islands]
    count = len(leads)
    piece = chain.parameters * plan.compression.bytes_per_value / plan.fragments / count
    tasks: list[Task] = []

    def inside(at: int, after: tuple[int, ...], *, outward: bool) -> int:
        flows = []
        for device, kept, sent in held_parameters(plan.islands[at], chain):
            amount = _WEIGHT_BYTES * (kept if outward else sent) / plan.fragments
            ends = (leads[at], index[device]) if outward else (index[device], leads[at])
            if amount and index[device] != leads[at]:
                flows.append(Flow(*ends, amount))
        if not flows:
            tasks.append(Task(kind=SpanKind.UPDATE, device=leads[at], after=after))
        else:
            tasks.append(Task(kind=SpanKind.TRANSFER, flows=tuple(flows), after=after))
        return len(tasks) - 1

    def between(after: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """Every lead sends a piece to every other one; per island, the tasks that bring it
        something."""
        come: dict[int, list[int]] = {at: [] for at in range(count)}
        for sender in range(count):
            for receiver in range(count):
                if sender != receiver:
                    flow = Flow(leads[sender], leads[receiver], piece)
                    needs = tuple(dict.fromkeys((*after[sender], *after[receiver])))
                    tasks.append(Task(kind=SpanKind.TRANSFER, flows=(flow,), after=needs))
                    come[receiver].append(len(tasks) - 1)
        return {at: tuple(numbers) for at, numbers in come.items()}

    gathered: dict[int, tuple[int, ...]] = {
        at: (inside(at, (), outward=False),) for at in range(count)
    }
    summed = between(between(gathered))
    for at in range(count):
        inside(at, summed[at], outward=True)
    return TaskGraph(devices=devices, tasks=tuple(tasks), resident=(0.0,) * len(devices))


def exchange_seconds(plan: IslandPlan, chain: Chain, cluster: Cluster) -> float:
    """What one exchange takes from time 0 of the cluster on; infinite if it never ends."""
    return first_end(simulate_exact(exchange_graph(plan, chain), cluster, record=0))


@dataclass
class _Player:
    """An island plan on a cluster, and what was played where nothing changes any more."""

    plan: IslandPlan
    chain: Chain
    cluster: Cluster
    model: ComputeModel | None
    known: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds by island and number of steps, after the last change."""
    exchanged: dict[tuple[int, ...], float] = field(default_factory=dict)
    """Seconds of an exchange between some islands, after the last change."""
    window: IslandWindow | None = None
    """What is to be recorded."""

    def __post_init__(self) -> None:
        self.last = last_change([self.cluster])
        self.leads = [lead(island) for island in self.plan.islands]
        numbers = [len(island.stages) for island in self.plan.islands]
        self.first_stages = [sum(numbers[:at]) for at in range(len(numbers))]

    def steps(self, island: int, begin: float, done: int, count: int) -> float:
        """When an island that begins now, after ``done`` steps, has done ``count`` more (1)."""
        if count == 0 or math.isinf(begin):
            return begin
        key = (island, count)
        record = 0 if self.window is None else self.window.num_recorded(done, count)
        if begin >= self.last and key in self.known and not record:
            return begin + self.known[key]
        where, plan = from_moment(self.cluster, begin), self.plan.islands[island]
        whole = True if record else None
        timeline = play(
            plan, self.chain, where, self.model, whole=whole, iterations=count, record=record
        )
        if record and self.window is not None:
            self.window.add_steps(timeline, begin, done, self.first_stages[island])
        ends = timeline.iteration_ends
        seconds = ends[-1] if len(ends) == count else math.inf
        if begin >= self.last:
            self.known[key] = seconds
        return begin + seconds

    def exchange(self, islands: tuple[int, ...], begin: float) -> float:
        """When an exchange between islands that begins now has ended (2)."""
        if math.isinf(begin) or len(islands) == 1:
            return begin
        if begin >= self.last and islands in self.exchanged:
            return begin + self.exchanged[islands]
        seconds = first_end(self._played_exchange(islands, begin, record=0))
        if begin >= self.last:
            self.exchanged[islands] = seconds
        return begin + seconds

    def _played_exchange(self, islands: tuple[int, ...], begin: float, record: int) -> Timeline:
        part = replace(self.plan, islands=tuple(self.plan.islands[at] for at in islands))
        return simulate_exact(
            exchange_graph(part, self.chain), from_moment(self.cluster, begin), record=record
        )

    def record_exchange(self, exchange: FragmentExchange) -> None:
        """Add the spans of an exchange to the window, if there is one."""
        if (
            self.window is not None
            and self.window.has_exchange(exchange.step)
            and len(exchange.islands) > 1
        ):
            played = self._played_exchange(exchange.islands, exchange.begin, record=1)
            self.window.add_exchange(played, exchange.begin, exchange.step)

    def ways(self, island: int) -> list[list[Trace]]:
        """Bandwidths between the leads of island 0 and another, by direction and route; none for
        island 0."""
        pairs = (
            ((self.leads[0], self.leads[island]), (self.leads[island], self.leads[0]))
            if island
            else ()
        )
        return [
            [self.cluster.bandwidth(way) for way in self.cluster.routes(*pair)] for pair in pairs
        ]

    def is_reached(self, island: int, time: float) -> bool:
        """Whether bytes pass between the leads of island 0 and another, both ways."""
        return all(any(trace.at(time) > 0 for trace in traces) for traces in self.ways(island))

    def lost_at(self, island: int, begin: float, lost_after: float) -> float:
        """The first moment from ``begin`` on at which no byte has passed one way for ``lost_after``
        seconds, which may have begun before; infinite if there is none (4)."""
        found = math.inf
        for traces in self.ways(island):
            knots = sorted({time for trace in traces for time in trace.times})
            silent_since: float | None = None
            for knot, following in itertools.pairwise((*knots, math.inf)):
                if any(trace.at(knot) > 0 for trace in traces):
                    silent_since = None
                    continue
                silent_since = knot if silent_since is None else silent_since
                moment = max(begin, silent_since + lost_after)
                if moment < following:
                    found = min(found, moment)
                    break
        return found

    def catch_up(self, island: int, begin: float) -> float:
        """When an island that comes back has the shared parameters and their momentum."""
        first, there = self.leads[0], self.leads[island]
        amount = 2.0 * _WEIGHT_BYTES * self.chain.parameters
        way = self.cluster.fastest(first, there, amount, begin)
        end = self.cluster.bandwidth(way).advance(begin, amount)
        return end + self.cluster.latency(way, end)


def play_islands(
    plan: IslandPlan,
    chain: Chain,
    cluster: Cluster,
    model: ComputeModel | None = None,
    *,
    steps: int,
    until: float = math.inf,
    lost_after: float = LOST_AFTER,
    window: IslandWindow | None = None,
) -> IslandCourse:
    """Play ``steps`` of an island plan from time 0; no period between exchanges begins after
    ``until`` seconds. Spans of the steps in ``window`` are added to it."""
    player = _Player(plan, chain, cluster, model, window=window)
    shares = [island.global_batch for island in plan.islands]
    numbers = range(len(shares))
    now, waited = [0.0 for _ in numbers], [0.0 for _ in numbers]
    exchanges: list[FragmentExchange] = []
    members: tuple[int, ...] = tuple(numbers)
    done = late = samples = 0
    arrives = 0.0
    while done < steps and max(now[at] for at in members) <= until:
        count = min(plan.period, steps - done)
        first = min(late, count)
        for at in members:
            now[at] = player.steps(at, now[at], done, first)
            if first == late > 0:
                waited[at] += max(0.0, arrives - now[at])
                now[at] = max(now[at], arrives)
            now[at] = player.steps(at, now[at], done + first, count - first)
        stuck = [at for at in members if math.isinf(now[at])]
        if stuck:
            return _stalled(
                f"a step of island {stuck[0]} never ends", done, samples, exchanges, waited, now
            )
        done += count
        if count < plan.period:
            samples += count * sum(shares[at] for at in members)
            break
        met = max(now[at] for at in members)
        end = player.exchange(members, met)
        losses = {at: player.lost_at(at, met, lost_after) for at in members}
        stay = tuple(at for at in members if losses[at] >= end)
        lost = max((losses[at] - met for at in members if at not in stay), default=0.0)
        if len(stay) < len(members):
            end = player.exchange(stay, met + lost)
        if math.isinf(end):
            return _stalled(
                f"the exchange after step {done} never ends", done, samples, exchanges, waited, now
            )
        arrived = tuple(now[at] for at in stay)
        exchanges.append(
            FragmentExchange(step=done, arrived=arrived, end=end, islands=stay, lost_seconds=lost)
        )
        player.record_exchange(exchanges[-1])
        samples += count * sum(shares[at] for at in stay)
        returned = tuple(at for at in numbers if at not in members and player.is_reached(at, end))
        for at in returned:
            end = max(end, player.catch_up(at, end))
            now[at] = end
        members = tuple(sorted({*stay, *returned}))
        arrives, late = end, plan.overlap
        if not plan.overlap:
            for at in members:
                waited[at] += 0.0 if at in returned else end - now[at]
                now[at] = end
    ends = tuple(now)
    return IslandCourse(
        steps=done, ends=ends, exchanges=tuple(exchanges), waited=tuple(waited), samples=samples
    )


def _stalled(
    why: str,
    steps: int,
    samples: int,
    exchanges: list[FragmentExchange],
    waited: list[float],
    now: list[float],
) -> IslandCourse:
    ends = tuple(end if math.isfinite(end) else 0.0 for end in now)
    return IslandCourse(
        steps=steps,
        ends=ends,
        exchanges=tuple(exchanges),
        waited=tuple(waited),
        samples=samples,
        stalled=why,
    )
