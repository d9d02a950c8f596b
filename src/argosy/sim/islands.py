"""Simulate an island plan: the steps of every island, and the exchanges between islands.

    (1)  A step of an island is an iteration of its plan (``sim.simulate``) that starts at the
         island's own time under the traces.
    (2)  An exchange begins when the last island has reached its step. With S the bytes of a
         fragment as the plan compresses it and N islands, it moves: weights to each island's lead,
         S / N from each lead to each other lead, the sums of these S / N back to each other lead,
         new weights from each lead to its island.
    (3)  Blocking: an island continues when its exchange has ended. Overlapped by tau steps: it
         uses the result after tau more steps.
    (4)  An island is lost to an exchange that has not ended when no byte has passed between its
         lead and island 0's, in one direction, for ``lost_after`` seconds, which may begin before
         the exchange: the other islands exchange without it. It returns at the first exchange at
         which the link is up, and copies parameters and momentum from the others before they
         continue. The samples that it trained on meanwhile do not count.

An overlapped exchange is simulated without the traffic inside islands, which uses other links
except for the NICs of leads. The time to add, compress and copy to host memory is not counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
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

# Seconds without a byte after which an island counts as lost, the default of a real run too (4).
LOST_AFTER = 10.0
# Bytes of a parameter (fp32) that is sent between the devices of an island and its lead.
_WEIGHT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class FragmentExchange:
    """An exchange of a fragment that islands took part in."""

    step: int
    """The number of steps after which the exchange began."""
    arrived: tuple[float, ...]
    """The time in seconds at which each island that takes part had finished that step."""
    end: float
    islands: tuple[int, ...]
    """The islands that took part."""
    lost_seconds: float = 0.0
    """Seconds of waiting until the missing islands counted as lost (4)."""

    @property
    def begin(self) -> float:
        """Return the time in seconds at which the exchange began."""
        return max(self.arrived) + self.lost_seconds


@dataclass(frozen=True, kw_only=True)
class IslandCourse:
    """The result of simulating islands over a number of steps: it holds times, exchanges and
    samples."""

    steps: int
    ends: tuple[float, ...]
    """Per island, the time in seconds at which it had finished its last step and received all
    exchanges that were due."""
    exchanges: tuple[FragmentExchange, ...]
    waited: tuple[float, ...]
    """Per island, the seconds in which it waited for exchanges or for other islands."""
    samples: int = 0
    """The number of samples that count: their islands took part in the exchange that followed."""
    stalled: str | None = None
    """The reason why a step or an exchange never ends; None if all end."""

    @property
    def end(self) -> float:
        """Return the time in seconds at which the last island ended."""
        return max(self.ends)

    @property
    def step_seconds(self) -> float:
        """Return the mean seconds of a step; infinite if no step was done."""
        return self.end / self.steps if self.steps else math.inf

    @property
    def samples_per_second(self) -> float:
        """Return the samples that count per second."""
        return self.samples / self.end if self.end else 0.0


def held_parameters(plan: Plan, chain: Chain) -> list[tuple[str, float, float]]:
    """Return (device, parameters that it keeps, parameters that it sends) for each device of a
    plan.

    The last number counts every parameter of a stage once, so that it is sent by one device only.
    """
    held = []
    for stage in plan.stages:
        total = float(sum(layer.parameters for layer in chain.layers_of(stage)))
        count = len(stage.devices)
        first = set(stage.holders[0])
        for holder in stage.holders:
            for device in holder:
                kept = total / (count if stage.zero else len(holder))
                held.append((device, kept, kept if stage.zero or device in first else 0.0))
    return held


def exchange_graph(plan: IslandPlan, chain: Chain) -> TaskGraph:
    """Build the task graph of the transfers of one exchange (2)."""
    devices = tuple(dict.fromkeys(device for island in plan.islands for device in island.devices))
    index = {name: at for at, name in enumerate(devices)}
    leads = [index[lead(island)] for island in plan.islands]
    count = len(leads)
    piece = chain.parameters * plan.compression.bytes_per_value / plan.fragments / count
    tasks: list[Task] = []

    def inside(at: int, after: tuple[int, ...], *, outward: bool) -> int:
        """Add the transfers between an island's devices and its lead, and return the number of the
        task."""
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
        """Add a transfer of a piece from every lead to every other; return the tasks that reach
        each island."""
        arriving: dict[int, list[int]] = {at: [] for at in range(count)}
        for sender in range(count):
            for receiver in range(count):
                if sender != receiver:
                    flow = Flow(leads[sender], leads[receiver], piece)
                    needs = tuple(dict.fromkeys((*after[sender], *after[receiver])))
                    tasks.append(Task(kind=SpanKind.TRANSFER, flows=(flow,), after=needs))
                    arriving[receiver].append(len(tasks) - 1)
        return {at: tuple(numbers) for at, numbers in arriving.items()}

    gathered: dict[int, tuple[int, ...]] = {
        at: (inside(at, (), outward=False),) for at in range(count)
    }
    summed = between(between(gathered))
    for at in range(count):
        inside(at, summed[at], outward=True)
    return TaskGraph(devices=devices, tasks=tuple(tasks), resident=(0.0,) * len(devices))


def exchange_seconds(plan: IslandPlan, chain: Chain, cluster: Cluster) -> float:
    """Return the seconds of one exchange that begins at time 0; infinite if it never ends."""
    return first_end(simulate_exact(exchange_graph(plan, chain), cluster, record=0))


@dataclass
class _Player:
    """An island plan on a cluster, with cached results for the time after the last change of the
    traces."""

    plan: IslandPlan
    chain: Chain
    cluster: Cluster
    model: ComputeModel | None
    known: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds by island and number of steps, after the last change."""
    exchanged: dict[tuple[int, ...], float] = field(default_factory=dict)
    """Seconds of an exchange by its islands, after the last change."""
    window: IslandWindow | None = None
    """The window to record; None to record nothing."""

    def __post_init__(self) -> None:
        self.last = last_change([self.cluster])
        self.leads = [lead(island) for island in self.plan.islands]
        numbers = [len(island.stages) for island in self.plan.islands]
        self.first_stages = [sum(numbers[:at]) for at in range(len(numbers))]

    def steps(self, island: int, begin: float, done: int, count: int) -> float:
        """Return when an island that begins at ``begin`` after ``done`` steps has done ``count``
        more (1)."""
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
        """Return when an exchange between islands that begins at ``begin`` has ended (2)."""
        if math.isinf(begin) or len(islands) == 1:
            return begin
        if begin >= self.last and islands in self.exchanged:
            return begin + self.exchanged[islands]
        seconds = first_end(self._played_exchange(islands, begin, record=0))
        if begin >= self.last:
            self.exchanged[islands] = seconds
        return begin + seconds

    def _played_exchange(self, islands: tuple[int, ...], begin: float, record: int) -> Timeline:
        """Simulate an exchange between islands from ``begin`` on."""
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
        """Return the bandwidth traces between the leads of island 0 and another, by direction and
        route.

        The list is empty for island 0.
        """
        pairs = (
            ((self.leads[0], self.leads[island]), (self.leads[island], self.leads[0]))
            if island
            else ()
        )
        return [
            [self.cluster.bandwidth(route) for route in self.cluster.routes(*pair)]
            for pair in pairs
        ]

    def is_reached(self, island: int, time: float) -> bool:
        """Return whether bytes pass in both directions between the leads of island 0 and another
        island."""
        return all(any(trace.at(time) > 0 for trace in traces) for traces in self.ways(island))

    def lost_at(self, island: int, begin: float, lost_after: float) -> float:
        """Return the first time at or after ``begin`` at which an island counts as lost (4).

        That is when no byte has passed in one direction for ``lost_after`` seconds, which may have
        begun earlier; the result is infinite if there is no such time.
        """
        earliest = math.inf
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
                    earliest = min(earliest, moment)
                    break
        return earliest

    def catch_up(self, island: int, begin: float) -> float:
        """Return when an island that returns has the shared parameters and their momentum."""
        first, returning = self.leads[0], self.leads[island]
        amount = 2.0 * _WEIGHT_BYTES * self.chain.parameters
        route = self.cluster.fastest(first, returning, amount, begin)
        end = self.cluster.bandwidth(route).advance(begin, amount)
        return end + self.cluster.latency(route, end)


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
    """Simulate ``steps`` steps of an island plan from time 0.

    No period between exchanges begins after ``until`` seconds. Spans of the steps in ``window`` are
    added to it.
    """
    player = _Player(plan, chain, cluster, model, window=window)
    run = _IslandRun(player=player, plan=plan)
    while run.done < steps and max(run.now[at] for at in run.members) <= until:
        count = min(plan.period, steps - run.done)
        stuck = run.train(count)
        if stuck is not None:
            return run.course(f"a step of island {stuck} never ends")
        if count < plan.period:
            run.samples += count * run.samples_per_step(run.members)
            break
        if not run.exchange(count, lost_after):
            return run.course(f"the exchange after step {run.done} never ends")
    return run.course()


@dataclass(kw_only=True)
class _IslandRun:
    """The state that islands have during a simulation."""

    player: _Player
    plan: IslandPlan
    done: int = 0
    """Steps done."""
    samples: int = 0
    late: int = 0
    """Steps that islands do before they wait for the last exchange."""
    arrives: float = 0.0
    """When the last exchange ends."""
    exchanges: list[FragmentExchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.plan.islands)
        self.members = tuple(range(count))
        """The islands that take part."""
        self.now, self.waited = [0.0] * count, [0.0] * count
        """Seconds at which each island is, and that it has waited."""

    def samples_per_step(self, members: Sequence[int]) -> int:
        """Return the samples that some islands train in a step."""
        return sum(self.plan.islands[at].global_batch for at in members)

    def train(self, count: int) -> int | None:
        """Simulate ``count`` steps of every member; return an island that never ends them."""
        first = min(self.late, count)
        for at in self.members:
            now = self.player.steps(at, self.now[at], self.done, first)
            if first == self.late > 0:
                self.waited[at] += max(0.0, self.arrives - now)
                now = max(now, self.arrives)
            self.now[at] = self.player.steps(at, now, self.done + first, count - first)
        stuck = next((at for at in self.members if math.isinf(self.now[at])), None)
        if stuck is None:
            self.done += count
        return stuck

    def exchange(self, count: int, lost_after: float) -> bool:
        """Simulate the exchange after ``count`` steps; return False if it never ends."""
        player, now, members = self.player, self.now, self.members
        begin = max(now[at] for at in members)
        end = player.exchange(members, begin)
        losses = {at: player.lost_at(at, begin, lost_after) for at in members}
        stay = tuple(at for at in members if losses[at] >= end)
        lost = max((losses[at] - begin for at in members if at not in stay), default=0.0)
        if len(stay) < len(members):
            end = player.exchange(stay, begin + lost)
        if math.isinf(end):
            return False
        arrived = tuple(now[at] for at in stay)
        exchange = FragmentExchange(
            step=self.done, arrived=arrived, end=end, islands=stay, lost_seconds=lost
        )
        self.exchanges.append(exchange)
        player.record_exchange(exchange)
        self.samples += count * self.samples_per_step(stay)
        self._readmit(stay, end)
        return True

    def _readmit(self, stay: Sequence[int], end: float) -> None:
        """Let islands that are reached again catch up after an exchange that ended at ``end``."""
        absent = (at for at in range(len(self.now)) if at not in self.members)
        returned = tuple(at for at in absent if self.player.is_reached(at, end))
        for at in returned:
            end = max(end, self.player.catch_up(at, end))
            self.now[at] = end
        self.members = tuple(sorted({*stay, *returned}))
        self.arrives, self.late = end, self.plan.overlap
        if not self.plan.overlap:
            for at in self.members:
                self.waited[at] += 0.0 if at in returned else end - self.now[at]
                self.now[at] = end

    def course(self, stalled: str | None = None) -> IslandCourse:
        """Return the result so far; ``stalled`` is the reason why the run never ends."""
        ends = tuple(self.now)
        if stalled is not None:
            ends = tuple(end if math.isfinite(end) else 0.0 for end in ends)
        return IslandCourse(
            steps=self.done,
            ends=ends,
            exchanges=tuple(self.exchanges),
            waited=tuple(self.waited),
            samples=self.samples,
            stalled=stalled,
        )
