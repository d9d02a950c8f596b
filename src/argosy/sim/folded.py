"""Compute the time of a folded plan on a cluster that does not change, without a task graph.

The result equals that of the exact engine on ``sim.fold``, to rounding, in about a quarter of its
time; searches rank plans by it. Three things make it fast: bundles follow the lists of the
schedule, so that no tasks are built; a transfer that shares no link with another takes its bytes
over its bandwidth and needs no event but its arrival; and the max-min fair rates of the other
transfers are cached by the set of flows that are under way.

    (1)  an action begins when its bundle is free, its inputs have arrived and, under ZeRO 3, its
         weights
    (2)  a transfer follows the previous one on its channel; it arrives one latency after its last
         byte has left
    (3)  ZeRO 2 and 3: a stage scatters its gradients after every backward; under ZeRO 3 it gathers
         its weights for an action while the previous action computes; the exchanges of a stage run
         one after the other
    (4)  at the end a stage sums its gradients, stages with tied weights sum those, and each bundle
         updates its weights

Not supported: parts of a sequence, experts, blocking transfers, ZeRO with prefetch, and interleaved
schedules; ``sim.simulate`` runs such plans in the exact engine.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from argosy.cluster.topology import Cluster
from argosy.cluster.trace import FloatArray
from argosy.cost.compute import ComputeModel
from argosy.plan.plan import Plan
from argosy.schedule import ActionKind, ScheduleSpec
from argosy.sim.constant import orders_of
from argosy.sim.engine.graph import Flow
from argosy.sim.fold import Folder
from argosy.sim.folded_links import FoldedLinks
from argosy.sim.lanes import Crowd, Lane, LaneMessage, LinkUsers
from argosy.sim.steady import steady_seconds
from argosy.sim.tasks.known import Known
from argosy.workload.chain import Chain

# Kinds of actions; an index of this tuple is one of the four numbers that follow.
_KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT,
)
_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(4)
# Kinds of events on the heap.
_COMPUTED, _ARRIVED, _FLOW_LEFT, _FLOW_ENDS = range(4)


def folded_seconds(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    model: ComputeModel | None = None,
    known: Known | None = None,
) -> float | None:
    """Return the seconds of one iteration; None if the plan is not supported here."""
    if plan.schedule.kind.is_chunked:
        return None
    folded = FoldedPlan(plan, chain, cluster, model or ComputeModel(), known or Known())
    return folded.seconds(plan.schedule) if folded.is_playable else None


class FoldedPlan(Folder):
    """A folded plan that is prepared once and can be timed under several schedules."""

    def __init__(
        self, plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel, known: Known
    ) -> None:
        super().__init__(plan, chain, cluster, model, known)
        self.folded_links = FoldedLinks(cluster, self.known)
        self.stage_of = [bundle.stage for bundle in self.bundles]
        self.bundles_of: list[list[int]] = [[] for _ in plan.stages]
        for number, stage in enumerate(self.stage_of):
            self.bundles_of[stage].append(number)
        speeds = [cluster.device(bundle.devices[0]).speed.at(0) for bundle in self.bundles]
        members = [member for _, member in sorted(self.members.items())]
        self.action_seconds = [
            tuple(_over(member.of(kind)[0], speed) for kind in _KINDS)
            for member, speed in zip(members, speeds, strict=True)
        ]
        """Per bundle and kind of action, its seconds."""
        self.update = [
            _over(self._bundle_update(number), speed) for number, speed in enumerate(speeds)
        ]
        """Per bundle, the seconds of its update."""
        self.messages: list[LaneMessage] = []
        self.sends: tuple[list[list[int]], list[list[int]]] = (
            [[] for _ in speeds],
            [[] for _ in speeds],
        )
        """Per bundle, the messages that a forward sends on, and the messages that a backward sends
        back."""
        self.waits = ([0] * len(speeds), [0] * len(speeds))
        """Per bundle, the number of messages that a forward waits for, and that a backward waits
        for."""
        for stage, (sender, _) in enumerate(itertools.pairwise(plan.stages)):
            self._add_channels(stage, stage + 1, sender.end - 1)
            self._add_channels(stage + 1, stage, sender.end - 1)
        self.zero = [
            stage.zero if holders > 1 else 0
            for stage, holders in zip(plan.stages, self.num_holders, strict=True)
        ]
        self.exchanges = {
            stage: self._add_message(*self._weights_around((stage,), 1))
            for stage, zero in enumerate(self.zero)
            if zero >= 2
        }
        """Per stage under ZeRO 2 or 3, the message that passes its weights around once."""
        self.groups = [
            (stages, self._add_message(*self._weights_around(stages, times, parameters)))
            for stages, parameters, times in self._gradient_groups()
        ]
        """Stages that sum gradients together, and the message by which they do so."""
        self.network = LinkUsers(self.messages, self.folded_links.capacity)

    @property
    def is_playable(self) -> bool:
        """Return whether ``seconds`` covers the whole plan, on devices and links that do not
        change."""
        if self.model.blocking or self.plan.schedule.kind.is_v or self.whole.offloads:
            return False
        if self.model.prefetch and any(
            self.zero[stage] >= 2 for stage in range(len(self.plan.stages))
        ):
            return False
        if any(stage.context > 1 or stage.expert > 1 for stage in self.whole.stages):
            return False
        traces = [self.real.device(bundle.devices[0]).speed for bundle in self.bundles]
        traces += [
            trace for link in self.folded_links.links for trace in (link.bandwidth, link.latency)
        ]
        return all(trace.is_constant for trace in traces)

    def seconds(self, schedule: ScheduleSpec) -> float:
        """Return the seconds of one iteration under a schedule; infinite if it never ends."""
        num_stages = len(self.plan.stages)

        def seconds(count: int) -> FloatArray:
            return np.array([_Play(self, _orders(schedule, num_stages, count), count).run()])

        return float(steady_seconds(seconds, schedule, num_stages, self.plan.num_micro_batches)[0])

    def _add_channels(self, source_stage: int, target_stage: int, layer: int) -> None:
        """Add the messages from every bundle of a stage to those of a neighbouring stage."""
        direction = int(target_stage < source_stage)
        is_sent = not direction or layer >= self.chain.first_backward
        for source, target, _, flows in self._handed(source_stage, target_stage, layer):
            flows = flows if is_sent else ()
            self.sends[direction][source].append(self._add_message(flows, 1, target, direction))
            self.waits[direction][target] += 1

    def _add_message(
        self, flows: Sequence[Flow], rounds: int, target: int = -1, direction: int = 0
    ) -> int:
        """Add a message and return its number."""
        lanes = []
        for flow in flows:
            bundle = self.bundles[flow.source]
            if flow.target >= len(self.bundles):
                route = self.folded_links.inside(bundle)
            else:
                route = self.folded_links.between(bundle, self.bundles[flow.target], self.sites)
            assert route is not None, "every flow has a route"
            latency = sum(self.folded_links.links[link].latency.at(0) for link in route.links)
            lanes.append(Lane(route.links, flow.bytes, rounds * latency))
        self.messages.append(LaneMessage(tuple(lanes), target, direction))
        return len(self.messages) - 1


@lru_cache(maxsize=256)
def _orders(
    schedule: ScheduleSpec, num_stages: int, num_micro_batches: int
) -> list[list[tuple[int, int]]]:
    """Return, for each stage, the kind and the micro-batch of its actions in order."""
    orders = orders_of(schedule, num_stages, num_micro_batches)
    return [[(_KINDS.index(kind), index) for _, kind, index in order] for order in orders]


def _over(seconds: float, speed: float) -> float:
    """Return the seconds of work at a speed; infinite at speed 0."""
    return seconds / speed if speed else math.inf


class _Play:
    """The state of one simulated iteration: it holds the clock, the event heap and what is under
    way."""

    def __init__(self, parts: FoldedPlan, orders: list[list[tuple[int, int]]], count: int) -> None:
        """Prepare an iteration of ``count`` micro-batches."""
        self.parts = parts
        self.orders = orders
        self.network = parts.network
        self.network.clear()
        self.messages = parts.messages
        self.now = 0.0
        self.end = 0.0
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.number = 0
        self.changed: list[Crowd] = []
        """Crowds in which flows have begun or ended at the present time."""
        num_bundles, num_messages = len(parts.stage_of), len(parts.messages)
        self.position = [0] * num_bundles
        self.is_busy = [False] * num_bundles
        self.missing = tuple([[need] * count for need in needs] for needs in parts.waits)
        """Per direction, bundle and micro-batch, the number of messages that have not arrived."""
        self.free_at = [0.0] * num_messages
        """Per message that shares no link, the time at which its channel is free."""
        self.queues: list[deque[int]] = [deque() for _ in range(num_messages)]
        self.carrying = [-1] * num_messages
        """Per channel, the micro-batch under way; -1 if there is none."""
        self.flows_left = [0] * num_messages
        self.arrival = [0.0] * num_messages
        self.chains = {stage: self._chain(stage) for stage in parts.exchanges}
        self.num_exchanged = dict.fromkeys(parts.exchanges, 0)
        self.num_begun = dict.fromkeys(parts.exchanges, 0)
        self.num_gathered = {stage: 0 for stage in parts.exchanges if parts.zero[stage] == 3}
        """Per stage under ZeRO 3, the number of actions whose weights have been gathered."""
        self.stages_left = [set(stages) for stages, _ in parts.groups]
        self.groups_left = [0] * num_bundles
        for stages, _ in parts.groups:
            for stage in stages:
                for bundle in parts.bundles_of[stage]:
                    self.groups_left[bundle] += 1
        self.bundles_left = [len(members) for members in parts.bundles_of]

    def _chain(self, stage: int) -> list[tuple[int, int]]:
        """Return, for each exchange of a stage, how many actions it needs and which action needs it
        (3).

        The first number counts actions of the stage that must be over before the exchange begins;
        the second is the action that waits for the exchange, or -1.
        """
        chain = []
        zero = self.parts.zero[stage]
        for at, (kind, _) in enumerate(self.orders[stage]):
            if zero == 3 and kind != _WEIGHT:
                chain.append((max(0, at - 1), at))
            if kind in (_BACKWARD, _WEIGHT):
                chain.append((at + 1, -1))
        return chain

    def run(self) -> float:
        """Run the iteration and return its seconds; infinite if it never ends."""
        for stage in self.chains:
            self._exchange(stage)
        for bundle in range(len(self.position)):
            self._try(bundle)
        heap = self.heap
        while heap or self.changed:
            if self.changed and (not heap or heap[0][0] > self.now):
                self._refresh()
                continue
            self.now, _, event, subject, detail = heapq.heappop(heap)
            if event == _COMPUTED:
                self._computed(subject)
            elif event == _ARRIVED:
                self._arrived(subject, detail)
            elif event == _FLOW_LEFT:
                self._flow_left(subject)
            else:
                self._flow_ends(subject, detail)
        is_over = not any(self.bundles_left) and not any(self.groups_left)
        return self.end if is_over else math.inf

    def _refresh(self) -> None:
        """Compute the rates of crowds that have changed at the present time."""
        for crowd in self.changed:
            end, flow = crowd.refresh(self.now)
            self._at(end, _FLOW_ENDS, flow, crowd.version)
        self.changed.clear()

    def _flow_ends(self, flow: int, version: int) -> None:
        """End a flow of a crowd, unless its rate has changed since the event was scheduled."""
        crowd = self.network.crowds[flow]
        if version == crowd.version and flow in crowd.under_way:
            crowd.finish(flow)
            self._change(crowd)
            self._flow_left(flow)

    def _change(self, crowd: Crowd) -> None:
        """Mark a crowd whose rates must be computed again."""
        if not crowd.is_changed:
            crowd.is_changed = True
            self.changed.append(crowd)

    def _at(self, time: float, event: int, subject: int, detail: int = 0) -> None:
        """Schedule an event, unless it never happens."""
        if time < math.inf:
            self.number += 1
            heapq.heappush(self.heap, (time, self.number, event, subject, detail))

    def _try(self, bundle: int) -> None:
        """Begin the next action of a bundle if its inputs and weights have arrived (1)."""
        at, stage = self.position[bundle], self.parts.stage_of[bundle]
        order = self.orders[stage]
        if self.is_busy[bundle] or at == len(order):
            return
        kind, index = order[at]
        if kind != _WEIGHT and self.missing[kind != _FORWARD][bundle][index]:
            return
        if kind != _WEIGHT and self.num_gathered.get(stage, at + 1) <= at:
            return
        self.is_busy[bundle] = True
        self._at(self.now + self.parts.action_seconds[bundle][kind], _COMPUTED, bundle)

    def _computed(self, bundle: int) -> None:
        """End the action of a bundle: send its results and begin the next action."""
        at, stage = self.position[bundle], self.parts.stage_of[bundle]
        order = self.orders[stage]
        kind, index = order[at]
        self.is_busy[bundle] = False
        self.position[bundle] = at + 1
        if kind != _WEIGHT:
            for message in self.parts.sends[kind != _FORWARD][bundle]:
                self._send(message, index)
        if stage in self.chains:
            self._exchange(stage)
        if at + 1 == len(order):
            self.bundles_left[stage] -= 1
            if not self.bundles_left[stage] and stage not in self.chains:
                self._stage_done(stage)
            self._finish(bundle)
        else:
            self._try(bundle)

    def _send(self, message: int, index: int) -> None:
        """Send a message for a micro-batch, after the previous one on its channel (2)."""
        if self.network.is_alone[message]:
            start = max(self.now, self.free_at[message])
            left = arrival = start
            for flow, lane in enumerate(
                self.messages[message].lanes, self.network.first_flow[message]
            ):
                end = start + lane.bytes / self.network.alone[flow]
                left = max(left, end)
                arrival = max(arrival, end + lane.latency)
            self.free_at[message] = left
            self._at(arrival, _ARRIVED, message, index)
        elif self.carrying[message] >= 0:
            self.queues[message].append(index)
        else:
            self._begin(message, index)

    def _begin(self, message: int, index: int) -> None:
        """Start the flows of a message."""
        self.carrying[message] = index
        lanes = self.messages[message].lanes
        self.flows_left[message] = len(lanes)
        self.arrival[message] = self.now
        for flow, lane in enumerate(lanes, self.network.first_flow[message]):
            if not lane.bytes:
                self._flow_left(flow)
            elif self.network.alone[flow]:
                self._at(self.now + lane.bytes / self.network.alone[flow], _FLOW_LEFT, flow)
            else:
                crowd = self.network.crowds[flow]
                crowd.start(flow, self.now)
                self._change(crowd)

    def _flow_left(self, flow: int) -> None:
        """Record that the last byte of a flow has left; schedule the arrival after the last
        flow."""
        message = self.network.message_of[flow]
        self.arrival[message] = max(
            self.arrival[message], self.now + self.network.lanes[flow].latency
        )
        self.flows_left[message] -= 1
        if not self.flows_left[message]:
            index, self.carrying[message] = self.carrying[message], -1
            self._at(self.arrival[message], _ARRIVED, message, index)
            if self.queues[message]:
                self._begin(message, self.queues[message].popleft())

    def _arrived(self, message: int, index: int) -> None:
        """Deliver a message to the bundle that waits for it."""
        sent = self.messages[message]
        if sent.target < 0:
            self._collected(message)
            return
        missing = self.missing[sent.direction][sent.target]
        missing[index] -= 1
        if not missing[index]:
            self._try(sent.target)

    def _collected(self, message: int) -> None:
        """Continue after a collective has ended."""
        for stage, exchange in self.parts.exchanges.items():
            if exchange == message:
                self._exchanged(stage)
                return
        stages = next(stages for stages, group in self.parts.groups if group == message)
        for stage in stages:
            for bundle in self.parts.bundles_of[stage]:
                self.groups_left[bundle] -= 1
                self._finish(bundle)

    def _exchange(self, stage: int) -> None:
        """Begin the next exchange of a stage if its actions are over (3)."""
        begun, chain = self.num_begun[stage], self.chains[stage]
        if begun > self.num_exchanged[stage] or begun == len(chain):
            return
        if min(self.position[bundle] for bundle in self.parts.bundles_of[stage]) >= chain[begun][0]:
            self.num_begun[stage] += 1
            self._send(self.parts.exchanges[stage], 0)

    def _exchanged(self, stage: int) -> None:
        """Continue after an exchange of a stage has ended (3)."""
        chain = self.chains[stage]
        action = chain[self.num_exchanged[stage]][1]
        self.num_exchanged[stage] += 1
        if action >= 0:
            self.num_gathered[stage] = action + 1
            for bundle in self.parts.bundles_of[stage]:
                self._try(bundle)
        self._exchange(stage)
        if self.num_exchanged[stage] == len(chain):
            self._stage_done(stage)

    def _stage_done(self, stage: int) -> None:
        """Begin the sums of gradients that are complete now that this stage has finished (4)."""
        for (_, message), stages in zip(self.parts.groups, self.stages_left, strict=True):
            if stage in stages:
                stages.remove(stage)
                if not stages:
                    self._send(message, 0)

    def _finish(self, bundle: int) -> None:
        """Update the weights of a bundle if all its gradients are summed."""
        if not self.groups_left[bundle]:
            self.end = max(self.end, self.now + self.parts.update[bundle])
