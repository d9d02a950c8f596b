"""Simulate one iteration of a plan by events."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from support.planner_oracle.network import Flow, Network
from support.planner_oracle.plans import Plan
from support.planner_oracle.prices import GRADIENT, price
from support.planner_oracle.problem import Problem


@dataclass(eq=False)
class Work:
    """A computation, or flows that begin together."""

    seconds: float = 0.0
    flows: list[Flow] = field(default_factory=list)
    rounds: int = 1
    after: list[Work] = field(default_factory=list)
    behind: Work | None = None
    """Work on the same channel, whose last byte must have left."""
    takes: tuple[str, float] = ("", 0.0)
    frees: tuple[str, float] = ("", 0.0)
    sent: float = math.inf
    """The time at which its last byte has left."""
    arrival: float = 0.0
    """The time at which the last of its flows that have left arrives."""
    end: float = math.inf


class Iteration:
    """One iteration of a plan as work, and the time at which it ends."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        self.network = Network(problem)
        self.work: list[Work] = []
        self.prices = [
            [
                price(problem, stage, *pair)
                for pair in zip(stage.devices, stage.samples, strict=True)
            ]
            for stage in plan.stages
        ]
        self.last: dict[str, Work] = {}
        """By device, its latest computation."""
        self.channels: dict[tuple[str, str, bool], Work] = {}
        self.inbox: dict[tuple[str, int, bool], list[Work]] = {}
        """By device, micro-batch and direction, the transfers that a computation waits for."""
        self.exchanged: dict[int, Work] = {}
        """By stage, its latest gather or scatter."""
        self.begun: dict[str, list[Work]] = {}
        """By device, the computation before its latest one."""
        self._build()
        self.seconds = self._play()

    def _build(self) -> None:
        rows = [self._row(depth) for depth in self.plan.depths]
        done: set[tuple[int, str, int]] = set()
        count = len(rows)
        while any(rows):
            for index, row in enumerate(rows):
                while row:
                    way, batch = row[0]
                    needed = (index - 1, "F", batch) if way == "F" else (index + 1, "B", batch)
                    if 0 <= needed[0] < count and needed not in done:
                        break
                    done.add((index, *row.pop(0)))
                    self._act(index, batch, forward=way == "F")
        for index in range(count):
            self._finish(index)

    def _row(self, depth: int) -> list[tuple[str, int]]:
        """Return the actions of a stage: ``depth`` forwards, then groups of each in turn."""
        total, group = self.plan.micro_batches, self.plan.group
        row = [("F", batch) for batch in range(depth)]
        ahead, back = depth, 0
        while back < total:
            some = range(back, min(back + group, total))
            row += [("B", batch) for batch in some]
            row += [("F", batch) for batch in range(ahead, min(ahead + group, total))]
            ahead, back = min(ahead + group, total), some.stop
        return row

    def _add(self, work: Work) -> Work:
        self.work.append(work)
        return work

    def _act(self, index: int, batch: int, *, forward: bool) -> None:
        stage = self.plan.stages[index]
        shares = len(stage.devices) > 1
        gathered = [self._gather(index)] if shares and stage.zero == 3 else []
        for device, cost in zip(stage.devices, self.prices[index], strict=True):
            before = [self.last[device]] if device in self.last else []
            arrived = self.inbox.get((device, batch, forward), [])
            received = sum(flow.bytes for work in arrived for flow in work.flows)
            passing = cost.gathered[0] if forward else cost.gathered[1] + cost.dropped
            work = Work(
                seconds=cost.forward if forward else cost.backward,
                after=[*before, *arrived, *gathered],
                takes=(device, passing + (cost.kept if forward else 0.0)),
                frees=(device, passing + received + (0.0 if forward else cost.kept)),
            )
            self.begun[device] = before
            self.last[device] = self._add(work)
        if not forward and shares and stage.zero >= 2:
            self._pass_weights(index, [self.last[device] for device in stage.devices])
        target = index + 1 if forward else index - 1
        if 0 <= target < len(self.plan.stages):
            self._send(index, target, batch, forward=forward)

    def _send(self, index: int, target: int, batch: int, *, forward: bool) -> None:
        """Send each replica of the other stage the samples that both hold."""
        source, taker = self.plan.stages[index], self.plan.stages[target]
        per_sample = self.problem.layers[max(source.first, taker.first) - 1].output
        for giving, (start, end) in zip(source.devices, _spans(source.samples), strict=True):
            for taking, (first, last) in zip(taker.devices, _spans(taker.samples), strict=True):
                common = min(end, last) - max(start, first)
                if common <= 0:
                    continue
                flow = self.network.flow(giving, taking, common * per_sample)
                channel = (giving, taking, forward)
                work = Work(
                    flows=[flow],
                    after=[self.last[giving]],
                    behind=self.channels.get(channel),
                    takes=(taking, flow.bytes),
                )
                self.channels[channel] = self._add(work)
                self.inbox.setdefault((taking, batch, forward), []).append(work)

    def _bytes(self, index: int) -> float:
        layers = self.plan.stages[index].layers
        return float(GRADIENT * sum(self.problem.layers[at].parameters for at in layers))

    def _gather(self, index: int) -> Work:
        """Gather weights while the previous action of the stage computes."""
        devices = self.plan.stages[index].devices
        return self._pass_weights(index, [w for name in devices for w in self.begun.get(name, [])])

    def _pass_weights(self, index: int, after: list[Work]) -> Work:
        flows, rounds = self._around(index, 1)
        earlier = [self.exchanged[index]] if index in self.exchanged else []
        work = Work(flows=flows, rounds=rounds, after=[*after, *earlier])
        self.exchanged[index] = self._add(work)
        return work

    def _around(self, index: int, times: int) -> tuple[list[Flow], int]:
        stage, num_bytes = self.plan.stages[index], self._bytes(index)
        algorithm = stage.algorithm or self.network.fastest(stage, num_bytes)
        flows, rounds = self.network.around(stage.devices, times * num_bytes, algorithm)
        return flows, times * rounds

    def _finish(self, index: int) -> None:
        """Sum gradients, or gather new weights, and update."""
        stage = self.plan.stages[index]
        ready = [self.last[device] for device in stage.devices]
        ready += [self.exchanged[index]] if stage.zero >= 2 and index in self.exchanged else []
        if len(stage.devices) > 1 and stage.zero < 3:
            flows, rounds = self._around(index, 1 if stage.zero == 2 else 2)
            ready = [*ready, self._add(Work(flows=flows, rounds=rounds, after=ready))]
        for cost in self.prices[index]:
            self._add(Work(seconds=cost.update, after=ready))

    def _play(self) -> float:
        """Play all work (4): repeat until everything is over; between events rates are constant."""
        waiting, now = list(self.work), 0.0
        left: dict[tuple[Work, int], float] = {}
        self.changes: list[tuple[float, float, str]] = []
        while True:
            ready = [work for work in waiting if _is_ready(work, now)]
            for work in ready:
                self.changes.append((now, work.takes[1], work.takes[0]))
                if work.flows:
                    left |= {(work, at): flow.bytes for at, flow in enumerate(work.flows)}
                else:
                    work.sent = work.end = now + work.seconds
            waiting = [work for work in waiting if work not in ready]
            rates = self.network.shared([work.flows[at] for work, at in left])
            drained = [now + rest / rate for rest, rate in zip(left.values(), rates, strict=True)]
            ends = [work.end for work in self.work if now < work.end < math.inf]
            if not drained and not ends:
                assert not waiting
                return now
            following = min([*drained, *ends])
            for key, rate, end in zip(list(left), rates, drained, strict=True):
                left[key] -= rate * (following - now)
                if end <= following * (1 + 1e-15):
                    del left[key]
                    self._left(*key, left, following)
            now = following

    def _left(
        self, work: Work, at: int, left: Mapping[tuple[Work, int], float], now: float
    ) -> None:
        """Note that the last byte of a flow has left; work ends when its last flow arrives."""
        work.arrival = max(work.arrival, now + work.rounds * work.flows[at].latency)
        if not any(other is work for other, _ in left):
            work.sent, work.end = now, work.arrival

    def peaks(self) -> dict[str, float]:
        """Return the largest number of bytes that each device holds."""
        held = {
            device: cost.state
            for stage, costs in zip(self.plan.stages, self.prices, strict=True)
            for device, cost in zip(stage.devices, costs, strict=True)
        }
        most = dict(held)
        freed = [(work.end, -work.frees[1], work.frees[0]) for work in self.work]
        for _, amount, device in sorted(self.changes + freed):
            if device:
                held[device] += amount
                most[device] = max(most[device], held[device])
        return most


def _is_ready(work: Work, now: float) -> bool:
    on_channel = work.behind is None or work.behind.sent <= now
    return on_channel and all(earlier.end <= now for earlier in work.after)


def _spans(samples: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(samples))
    return list(zip([0, *ends], ends, strict=False))
