"""Compile a plan to the tasks of one iteration.

For every action of the schedule, every device of every replica computes. If the sequence is cut
into parts, keys and values go around meanwhile: the part of attention that may run beside them
comes first, and the rest waits for both. A tensor-parallel group then reduces together, and holders
of experts send each other tokens. The result goes to the replicas of the next stage that hold the
same samples (split and concatenated if the replica counts differ; a replica holds what passes
between stages split along the sequence, so each of its devices receives its share only). At the end
of the iteration each stage's holders sum their gradients, and every device updates its weights. A
stage that no backward runs through (``Chain.first_backward``) gets no gradients; its next action
waits until the following stage has finished its backward, so that the number of micro-batches in
flight stays within the schedule.

Under ZeRO 3 a stage gathers its weights while the previous action computes, and an action begins
when they have arrived; under ZeRO 2 and 3 a backward is followed by a scatter of its gradients.
``sim.tasks.copies`` adds copies to hosts. If the cost model has ``prefetch``, layers are exchanged
one by one: in a stage with L layers, all but 1 / L of an action may run before the last weights
have arrived, and all but 1 / L of the gradients are scattered beside a backward.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from argosy.cluster.topology import Cluster
from argosy.cost.collective import Pairs
from argosy.cost.compute import ComputeModel, split_stage_seconds
from argosy.cost.memory import activation_bytes, passing_bytes
from argosy.cost.resident import resident_bytes
from argosy.plan.plan import Collective, Plan, Replica, Stage
from argosy.schedule import Action, ActionKind, build_schedule
from argosy.sim.engine.graph import Flow, Task, TaskGraph
from argosy.sim.tasks.blocking import with_blocking_transfers
from argosy.sim.tasks.copies import HostCopies
from argosy.sim.tasks.exchange import (
    StageExchange,
    gradient_groups,
    key_value_passes,
    key_values,
    reduced_passes,
    reduction,
    routed,
    routed_passes,
    weight_exchange,
)
from argosy.sim.tasks.member import MemberCost, portion_of, updates_of
from argosy.sim.tasks.order import SPAN_KIND, consumers, in_dependency_order
from argosy.sim.tasks.split import overlaps, share_overlaps
from argosy.timeline import SpanKind
from argosy.workload.chain import Chain


def compile_plan(
    plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel | None = None
) -> TaskGraph:
    """Build the task graph of one iteration of a plan that ``check_plan`` accepts."""
    model = model or ComputeModel()
    graph = Compiler(plan, chain, cluster, model).run()
    return with_blocking_transfers(graph, model.blocking)


class Compiler:
    """A builder that collects the tasks of one iteration, action by action."""

    def __init__(self, plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> None:
        self.plan = plan
        self.chain = chain
        self.cluster = cluster
        self.model = model
        self.names = plan.devices
        self.index = {name: position for position, name in enumerate(self.names)}
        self.tasks: list[Task] = []
        self.last: dict[int, int] = {}
        """Per device, the task that occupies it last."""
        self.before_action: dict[int, int] = {}
        """Per device, the task that occupied it last when its latest action began."""
        self.first: dict[int, int] = {}
        self.arriving: dict[tuple[Action, int], list[int]] = defaultdict(list)
        """Per action and device, the transfers that it waits for."""
        self.channel_last: dict[tuple[int, int, bool], int] = {}
        self.channel_first: dict[tuple[int, int, bool], int] = {}
        self.unanchored: list[tuple[int, list[int]]] = []
        """Tasks that wait for nothing in their own iteration, and the devices whose updates they
        follow."""
        self.exchanged: dict[int, int] = {}
        """Per stage, its last gather or scatter under ZeRO 2 or 3."""
        self.gradients_done: dict[tuple[int, int], int] = {}
        """Per stage and device, the last task that adds to its gradients."""
        self.finished: dict[tuple[int, int], tuple[int, ...]] = {}
        """Per stage and micro-batch, the tasks that end its backward, or that of the next stage
        that has one."""
        self.held_back: dict[int, tuple[int, ...]] = {}
        """Per device, the tasks of ``finished`` that its next action waits for."""
        self.handed: dict[tuple[int, int], list[tuple[int, int, float, tuple[Flow, ...]]]] = {}
        self.num_holders = [stage.num_holders for stage in plan.stages]
        self.placed = [[self.index[name] for name in stage.devices] for stage in plan.stages]
        """Per stage, the indices of its devices."""
        self.members = self._members()
        self.copies = HostCopies(self)
        self.reductions = [
            self._reductions(index, stage) for index, stage in enumerate(plan.stages)
        ]
        self.key_values = [
            [key_values(chain, stage, replica) for replica in stage.replicas]
            for stage in plan.stages
        ]
        self.routed = [routed(chain, stage) for stage in plan.stages]
        self.weights: dict[tuple[tuple[int, ...], int], tuple[tuple[Flow, ...], int]] = {}
        """Per stages and weights that they share, the flows that pass these around once, and the
        latencies."""

    def _members(self) -> dict[tuple[int, int, int], MemberCost]:
        """Return the devices of every replica by (stage, replica, position)."""
        return {
            (stage_index, replica_index, member): self._member(stage_index, replica, member)
            for stage_index, stage in enumerate(self.plan.stages)
            for replica_index, replica in enumerate(stage.replicas)
            for member in range(replica.width)
        }

    def _reductions(self, index: int, stage: Stage) -> list[StageExchange | None]:
        """Return the tensor-parallel reduction of every replica of a stage."""
        algorithm = self.plan.algorithm(Collective.TENSOR, index)
        return [
            reduction(self.chain, stage, replica, self.cluster, algorithm)
            for replica in stage.replicas
        ]

    def run(self) -> TaskGraph:
        """Add all tasks of the iteration and return the graph."""
        schedule = build_schedule(
            self.plan.schedule, len(self.plan.stages), self.plan.num_micro_batches
        )
        for action in in_dependency_order(schedule):
            self.add_action(action)
        self.add_synchronisation()
        return self.graph()

    def _member(self, stage_index: int, replica: Replica, member: int) -> MemberCost:
        """Return the cost of one micro-batch of a stage on one device."""
        chain, stage = self.chain, self.plan.stages[stage_index]
        samples, share = replica.samples, replica.shares[member]
        return MemberCost(
            seconds=split_stage_seconds(
                self.model, chain, stage, portion_of(self.cluster, stage, replica, member)
            ),
            kept=activation_bytes(chain, stage, samples, share),
            forward_bytes=passing_bytes(chain, stage, samples, share, backward=False),
            backward_bytes=passing_bytes(chain, stage, samples, share, backward=True),
        )

    def add_action(self, action: Action) -> None:
        """Add the tasks of one action on all devices of its stage."""
        stage = self.plan.stages[action.stage]
        devices = self.placed[action.stage]
        if action.kind is not ActionKind.FORWARD and stage.end <= self.chain.first_backward:
            self._pass_over(action)
            return
        gathered = self._gather_weights(action) if stage.zero == 3 else None
        self.before_action.update(
            {device: self.last[device] for device in devices if device in self.last}
        )
        scatters = (
            stage.zero >= 2 and self.num_holders[action.stage] > 1 and action.kind.frees_activations
        )
        if scatters and self.model.prefetch:
            self._scatter_early(action)
        for position in range(len(stage.replicas)):
            self._run_replica(action, stage, position, gathered)
        passes = routed_passes(action.kind, stage.recompute)
        for exchange in self.routed[action.stage] if passes else ():
            self._add_collective(action, exchange, passes)
        if action.kind.frees_activations:
            self.gradients_done.update(
                {(action.stage, device): self.last[device] for device in devices}
            )
        if scatters:
            self._scatter_gradients(action)
        if action.kind is ActionKind.FORWARD and action.stage + 1 < len(self.plan.stages):
            self._send(action, action.stage + 1, stage.end - 1)
        if action.kind.is_gradient and action.stage > 0:
            if stage.first > self.chain.first_backward:
                self._send(action, action.stage - 1, stage.first - 1)
            else:
                self.finished[action.stage, action.micro_batch] = tuple(
                    self.last[device] for device in devices
                )

    def _pass_over(self, action: Action) -> None:
        """Block the devices of a stage without a backward until the following stage has finished
        its own."""
        done = self.finished[action.stage + 1, action.micro_batch]
        self.finished[action.stage, action.micro_batch] = done
        for device in self.placed[action.stage]:
            self.held_back[device] = tuple(dict.fromkeys((*self.held_back.get(device, ()), *done)))

    def _run_replica(
        self, action: Action, stage: Stage, position: int, gathered: int | None
    ) -> None:
        """Compute on all devices of a replica, and add the exchanges of its parts and groups."""
        devices = [self.index[name] for name in stage.replicas[position].devices]
        waits = [
            self._waits(action, device, None if self.model.prefetch else gathered)
            for device in devices
        ]
        exchange, arrived = self.key_values[action.stage][position], None
        passes = key_value_passes(action.kind, stage.recompute)
        if exchange is not None and passes:
            after = set(itertools.chain.from_iterable(waits))
            arrived = self._add_collective(action, exchange, passes, after=after)
        for member, after_tasks in enumerate(waits):
            layered: tuple[int, ...] = (
                () if gathered is None or not self.model.prefetch else (gathered,)
            )
            if stage.offload:
                layered += self.copies.beside_action(action, position, member, after_tasks)
            self._compute(action, position, member, after_tasks, arrived, layered)
        reduced = self.reductions[action.stage][position]
        if reduced is not None and action.kind is not ActionKind.WEIGHT_GRADIENT:
            times = reduced_passes(self.chain, action.kind, stage.recompute)
            self._add_collective(action, reduced, times)

    def _waits(self, action: Action, device: int, gathered: int | None) -> tuple[int, ...]:
        """Return the tasks that must be over before a device can begin an action."""
        after = [
            *self.arriving[action, device],
            *([self.last[device]] if device in self.last else []),
        ]
        if device in self.held_back:
            after += self.held_back.pop(device)
        if gathered is not None:
            after.append(gathered)
        return tuple(dict.fromkeys(after))

    def _add_collective(
        self, action: Action, exchange: StageExchange, passes: float, after: set[int] | None = None
    ) -> int:
        """Add a collective of all devices of an exchange.

        It occupies the devices, unless ``after`` is given: then it runs beside their work.
        """
        devices = [self.index[name] for name in exchange.devices]
        task = self.add(
            Task(
                kind=SpanKind.COLLECTIVE,
                flows=self._flows_of(exchange.pairs, passes),
                rounds=round(passes * exchange.rounds),
                beside=after is not None,
                after=tuple(
                    sorted({self.last[device] for device in devices} if after is None else after)
                ),
                stage=action.stage,
                micro_batch=action.micro_batch,
            )
        )
        if after is None:
            self._occupy(devices, task)
        elif not after:
            self.unanchored.append((task, devices))
        return task

    def _compute(
        self,
        action: Action,
        position: int,
        member: int,
        after: tuple[int, ...],
        arrived: int | None,
        layered: tuple[int, ...],
    ) -> None:
        """Add one device's part of an action.

        It is split into two pieces if keys and values must have ``arrived``, or if tasks that
        proceed layer by layer (``layered``) must be over before the last layer.
        """
        device = self.index[self.plan.stages[action.stage].replicas[position].devices[member]]
        cost = self.members[action.stage, position, member]
        seconds, beside = cost.of(action.kind)
        is_forward = action.kind is ActionKind.FORWARD
        passing = cost.forward_bytes if is_forward else cost.backward_bytes
        buffers = sum(
            flow.bytes for task in self.arriving[action, device] for flow in self.tasks[task].flows
        )
        taken = passing + (cost.kept if is_forward else 0.0)
        freed = passing + buffers + (cost.kept if action.kind.frees_activations else 0.0)
        pieces = [(seconds, after)]
        awaited = (*(() if arrived is None else (arrived,)), *layered)
        if awaited:
            stage = self.plan.stages[action.stage]
            early = seconds * (1 - 1 / stage.num_layers) if layered else seconds
            beside = early if arrived is None else min(beside, early)
            pieces = [(beside, after), (seconds - beside, awaited)]
        for number, (length, waits) in enumerate(pieces):
            before = (self.last[device],) if number else ()
            task = Task(
                kind=SPAN_KIND[action.kind],
                device=device,
                seconds=length,
                after=tuple(dict.fromkeys((*waits, *before))),
                stage=action.stage,
                micro_batch=action.micro_batch,
                takes=((device, taken),) if taken and not number else (),
                frees=((device, freed),) if freed and number + 1 == len(pieces) else (),
            )
            self._occupy([device], self.add(task))

    def _send(self, action: Action, target_stage: int, layer: int) -> None:
        """Add the transfers of a micro-batch to a neighbouring stage."""
        is_gradient = target_stage < action.stage
        used_by = consumers(target_stage, action.micro_batch, is_gradient=is_gradient)
        for source, destination, num_bytes, flows in self._handed(
            action.stage, target_stage, layer
        ):
            channel = (source, destination, is_gradient)
            transfer = self.add(
                Task(
                    kind=SpanKind.TRANSFER,
                    flows=flows,
                    after=(self.last[source],),
                    behind=self.channel_last.get(channel),
                    stage=action.stage,
                    micro_batch=action.micro_batch,
                    takes=((destination, num_bytes),),
                )
            )
            self.channel_last[channel] = transfer
            self.channel_first.setdefault(channel, transfer)
            for consumer in used_by:
                self.arriving[consumer, destination].append(transfer)

    def _handed(
        self, stage: int, target: int, layer: int
    ) -> list[tuple[int, int, float, tuple[Flow, ...]]]:
        """Return (source, destination, bytes, flows) between replicas that hold the same samples;
        cached."""
        if (stage, target) not in self.handed:
            per_sample = self.chain.layers[layer].output_bytes
            transfers = []
            for giving, taking, samples in overlaps(
                self.plan.stages[stage].replicas, self.plan.stages[target].replicas
            ):
                for sender, receiver, part in share_overlaps(giving.shares, taking.shares):
                    source = self.index[giving.devices[sender]]
                    destination = self.index[taking.devices[receiver]]
                    if source != destination:
                        num_bytes = samples * per_sample * part
                        flows = self._flows(source, destination, num_bytes)
                        transfers.append((source, destination, num_bytes, flows))
            self.handed[stage, target] = transfers
        return self.handed[stage, target]

    def _flows(self, source: int, target: int, num_bytes: float) -> tuple[Flow, ...]:
        """Return the flows of a transfer between two devices."""
        return (Flow(source, target, num_bytes),)

    def _gather_weights(self, action: Action) -> int | None:
        """Gather the stage's weights under ZeRO 3 while the previous action computes."""
        if self.num_holders[action.stage] == 1 or action.kind is ActionKind.WEIGHT_GRADIENT:
            return None
        devices = self.placed[action.stage]
        before = {self.before_action[device] for device in devices if device in self.before_action}
        gathered = self._pass_weights(action, before)
        if not self.tasks[gathered].after:
            self.unanchored.append((gathered, devices))
        return gathered

    def _scatter_gradients(self, action: Action) -> None:
        """Scatter gradients under ZeRO 2 and 3 to their holders while the next action computes."""
        devices = self.placed[action.stage]
        part = 1 / self.plan.stages[action.stage].num_layers if self.model.prefetch else 1.0
        scattered = self._pass_weights(action, {self.last[device] for device in devices}, part)
        self.gradients_done.update({(action.stage, device): scattered for device in devices})

    def _scatter_early(self, action: Action) -> None:
        """Scatter the gradients of all layers but one while their backward runs."""
        part = 1 - 1 / self.plan.stages[action.stage].num_layers
        if part:
            waits = (self._waits(action, device, None) for device in self.placed[action.stage])
            self._pass_weights(action, set(itertools.chain.from_iterable(waits)), part)

    def _pass_weights(self, action: Action, after: set[int], part: float = 1.0) -> int:
        """Pass ``part`` of a stage's weight bytes around its holders once, after its previous
        exchange."""
        if action.stage in self.exchanged:
            after = after | {self.exchanged[action.stage]}
        flows, rounds = self._weights_around((action.stage,), 1)
        if part < 1:
            flows = tuple(replace(flow, bytes=flow.bytes * part) for flow in flows)
        self.exchanged[action.stage] = self.add(
            Task(
                kind=SpanKind.COLLECTIVE,
                flows=flows,
                rounds=rounds,
                beside=True,
                after=tuple(sorted(after)),
                stage=action.stage,
                micro_batch=action.micro_batch,
            )
        )
        return self.exchanged[action.stage]

    def add_synchronisation(self) -> None:
        """Sum the gradients of every stage's holders and of weights that several stages hold, then
        update."""
        waits: dict[int, list[int]] = defaultdict(list)
        for stages, parameters, times in self._gradient_groups():
            devices = [device for stage in stages for device in self.placed[stage]]
            places = [(stage, device) for stage in stages for device in devices]
            ready = {self.gradients_done[place] for place in places if place in self.gradients_done}
            flows, rounds = self._weights_around(stages, times, parameters)
            after = tuple(sorted(ready))
            task = self.add(
                Task(
                    kind=SpanKind.COLLECTIVE,
                    flows=flows,
                    rounds=rounds,
                    after=after,
                    stage=stages[0],
                )
            )
            for device in devices:
                waits[device].append(task)
        for device in range(len(self.names)):
            self._add_update(device, waits[device])

    def _gradient_groups(self) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Yield the groups of stages that sum gradients at the end."""
        return gradient_groups(self.plan, self.chain, self.num_holders)

    def _weights_around(
        self, stages: tuple[int, ...], times: int, parameters: int = 0
    ) -> tuple[tuple[Flow, ...], int]:
        """Return the flows that pass weights around ``times`` times, and the number of latencies.

        The weights are those of a stage, or ``parameters`` that several stages share.
        """
        key = (stages, parameters)
        if key not in self.weights:
            self.weights[key] = self._weights_once(*key)
        flows, rounds = self.weights[key]
        return tuple(replace(flow, bytes=flow.bytes * times) for flow in flows), times * rounds

    def _weights_once(
        self, stages: tuple[int, ...], parameters: int
    ) -> tuple[tuple[Flow, ...], int]:
        """Return the flows that pass weights around once, and the number of latencies."""
        exchange = weight_exchange(self.plan, self.chain, self.cluster, stages, parameters)
        return self._flows_of(exchange.pairs, 1 / self.model.reduction), exchange.rounds

    def _flows_of(self, pairs: Pairs, factor: float) -> tuple[Flow, ...]:
        """Return one flow for each pair of devices."""
        return tuple(
            Flow(self.index[source], self.index[target], size * factor)
            for (source, target), size in pairs.items()
        )

    @cached_property
    def updates(self) -> dict[str, float]:
        """Return, by device, the seconds of its update."""
        return updates_of(self.plan, self.chain, self.cluster)

    def _add_update(self, device: int, waits: list[int]) -> None:
        self._end_with_update(device, self.updates[self.names[device]], waits)

    def _end_with_update(self, device: int, seconds: float, waits: list[int]) -> None:
        """Add the update of a device, after its copies from the host."""
        after = tuple(sorted({self.last[device], *waits}))
        after, frees = self.copies.before_update(device, after)
        task = self.add(
            Task(kind=SpanKind.UPDATE, device=device, seconds=seconds, after=after, frees=frees)
        )
        self._occupy([device], task)

    def graph(self) -> TaskGraph:
        """Return the collected tasks with the edges to the next iteration."""
        held = resident_bytes(self.plan, self.chain)
        resident = tuple(held[name].total for name in self.names)
        carry = [(self.last[device], self.first[device]) for device in range(len(self.names))]
        carry += [
            (self.last[device], task) for task, devices in self.unanchored for device in devices
        ]
        carry += [(last, self.channel_first[at]) for at, last in self.channel_last.items()]
        return TaskGraph(
            devices=self.names, tasks=tuple(self.tasks), carry=tuple(carry), resident=resident
        )

    def add(self, task: Task) -> int:
        """Add a task and return its number."""
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _occupy(self, devices: Sequence[int], task: int) -> None:
        """Record that a task occupies devices last."""
        for device in devices:
            self.last[device] = task
            self.first.setdefault(device, task)
