"""From a plan to the tasks of one iteration.

For every action of the schedule, every device of every replica computes; a tensor-parallel group then reduces
together; the result goes to the replicas of the next stage that hold the same samples (split and concatenated where
the replica counts differ; a tensor-parallel group holds what passes between stages split along the sequence, so each
of its devices receives its share only). At the end of the iteration each stage's replicas sum their gradients, and
every device updates its weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from argosy.cluster.topology import Cluster
from argosy.cost.communicate import num_reductions
from argosy.cost.compute import ComputeModel, Portion, stage_seconds, update_seconds
from argosy.cost.memory import activation_bytes, recomputed_bytes, stage_parameters, state_bytes
from argosy.plan.plan import Plan, Replica, Stage
from argosy.schedule import Action, ActionKind, Schedule, build_schedule
from argosy.schedule.check import needs
from argosy.sim.graph import Flow, Task, TaskGraph
from argosy.sim.split import overlaps, ring_flows, ring_pairs, share_overlaps
from argosy.timeline import SpanKind
from argosy.workload.chain import Chain

SPAN_KIND = {
    ActionKind.FORWARD: SpanKind.FORWARD,
    ActionKind.BACKWARD: SpanKind.BACKWARD,
    ActionKind.INPUT_GRADIENT: SpanKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT: SpanKind.WEIGHT_GRADIENT,
}


def compile_plan(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel | None = None) -> TaskGraph:
    """The task graph of one iteration of a plan that ``check_plan`` has passed."""
    return Compiler(plan, chain, cluster, model or ComputeModel()).run()


def in_dependency_order(schedule: Schedule) -> Iterator[Action]:
    """All computation of a schedule so that everything an action needs comes before it, rows kept in order."""
    done: set[Action] = set()
    rows = [[action for action in row if action.kind.is_computation] for row in schedule.rows]
    position = [0] * len(rows)
    remaining = sum(map(len, rows))
    while remaining:
        before = remaining
        for worker, row in enumerate(rows):
            if position[worker] == len(row):
                continue
            action = row[position[worker]]
            if all(not done.isdisjoint(choices) for choices in needs(action, schedule.num_stages)):
                done.add(action)
                position[worker] += 1
                remaining -= 1
                yield action
        assert remaining < before, "check_schedule finds deadlocks before this"


class Compiler:
    """Collects the tasks of one iteration, action by action."""

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
        self.before_last: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.arriving: dict[tuple[Action, int], list[int]] = defaultdict(list)
        """Per action and device, the transfers it waits for."""
        self.channel_last: dict[tuple[int, int, bool], int] = {}
        self.channel_first: dict[tuple[int, int, bool], int] = {}
        self.unanchored: list[tuple[int, list[int]]] = []
        """Tasks that wait for nothing in their own iteration, and the devices whose updates they follow."""
        self.exchanged: dict[int, int] = {}
        """Per stage, its last gather or scatter under ZeRO 2 or 3."""
        self.gradients_done: dict[tuple[int, int], int] = {}
        """Per stage and device, the last task that adds to its gradients."""
        self.num_replicas = [len(stage.replicas) for stage in plan.stages]
        self.reductions = [sum(map(num_reductions, chain.layers[s.first : s.end])) for s in plan.stages]
        self.seconds = {
            (stage_index, replica_index, member): self._member_seconds(stage, replica, member)
            for stage_index, stage in enumerate(plan.stages)
            for replica_index, replica in enumerate(stage.replicas)
            for member in range(replica.width)
        }

    def run(self) -> TaskGraph:
        schedule = build_schedule(self.plan.schedule, len(self.plan.stages), self.plan.num_micro_batches)
        for action in in_dependency_order(schedule):
            self.add_action(action)
        self.add_synchronisation()
        return self.graph()

    def _member_seconds(self, stage: Stage, replica: Replica, member: int) -> tuple[float, float]:
        return stage_seconds(self.model, self.chain, stage, self._portion(replica, member))

    def _portion(self, replica: Replica, member: int) -> Portion:
        return Portion(
            device=self.cluster.device(replica.devices[member]),
            samples=replica.samples,
            share=replica.shares[member],
            width=replica.width,
        )

    def add_action(self, action: Action) -> None:
        stage = self.plan.stages[action.stage]
        gathered = self._gather_weights(stage, action) if stage.zero == 3 else None
        for position, replica in enumerate(stage.replicas):
            members = [self._compute(action, stage, position, member, gathered) for member in range(replica.width)]
            if replica.width > 1 and action.kind is not ActionKind.WEIGHT_GRADIENT:
                payload = replica.samples * sum(
                    layer.reduced_bytes for layer in self.chain.layers[stage.first : stage.end]
                )
                devices = [self.index[name] for name in replica.devices]
                reduced = self._add(
                    Task(
                        kind=SpanKind.COLLECTIVE,
                        flows=ring_flows(devices, 2 * payload),
                        rounds=2 * (replica.width - 1) * self.reductions[action.stage],
                        after=tuple(members),
                        stage=action.stage,
                        micro_batch=action.micro_batch,
                    )
                )
                self._occupy(devices, reduced)
            for name in replica.devices:
                if action.kind.frees_activations:
                    self.gradients_done[action.stage, self.index[name]] = self.last[self.index[name]]
        if stage.zero >= 2 and self.num_replicas[action.stage] > 1 and action.kind.frees_activations:
            self._scatter_gradients(stage, action)
        if action.kind is ActionKind.FORWARD and action.stage + 1 < len(self.plan.stages):
            self._send(action, action.stage + 1, stage.end - 1)
        if action.kind.is_gradient and action.stage > 0:
            self._send(action, action.stage - 1, stage.first - 1)

    def _compute(self, action: Action, stage: Stage, position: int, member: int, gathered: int | None) -> int:
        replica = stage.replicas[position]
        device = self.index[replica.devices[member]]
        forward, backward = self.seconds[action.stage, position, member]
        seconds = {ActionKind.FORWARD: forward, ActionKind.BACKWARD: backward}.get(action.kind, backward / 2)
        kept = activation_bytes(self.chain, stage, replica.samples, replica.shares[member])
        arrived = self.arriving[action, device]
        buffers = sum(flow.bytes for task in arrived for flow in self.tasks[task].flows)
        after = [*arrived, *([self.last[device]] if device in self.last else [])]
        if gathered is not None:
            after.append(gathered)
        again = recomputed_bytes(self.chain, stage, replica.samples, replica.shares[member])
        taken = kept if action.kind is ActionKind.FORWARD else again
        freed = (kept if action.kind.frees_activations else 0.0) + buffers
        freed += again if action.kind is not ActionKind.FORWARD else 0.0
        task = self._add(
            Task(
                kind=SPAN_KIND[action.kind],
                device=device,
                seconds=seconds,
                after=tuple(dict.fromkeys(after)),
                stage=action.stage,
                micro_batch=action.micro_batch,
                takes=((device, taken),) if taken else (),
                frees=((device, freed),) if freed else (),
            )
        )
        self._occupy([device], task)
        return task

    def _send(self, action: Action, target_stage: int, layer: int) -> None:
        """Hand the micro-batch to a neighbouring stage: replica to replica, the samples that both hold."""
        stage, target = self.plan.stages[action.stage], self.plan.stages[target_stage]
        per_sample = self.chain.layers[layer].output_bytes
        is_gradient = target_stage < action.stage
        for source_replica, target_replica, samples in overlaps(stage.replicas, target.replicas):
            for sender, receiver, part in share_overlaps(source_replica.shares, target_replica.shares):
                source = self.index[source_replica.devices[sender]]
                destination = self.index[target_replica.devices[receiver]]
                if source == destination:
                    continue
                channel = (source, destination, is_gradient)
                num_bytes = samples * per_sample * part
                transfer = self._add(
                    Task(
                        kind=SpanKind.TRANSFER,
                        flows=self._flows(source, destination, num_bytes),
                        after=(self.last[source],),
                        behind=self.channel_last.get(channel),
                        stage=action.stage,
                        micro_batch=action.micro_batch,
                        takes=((destination, num_bytes),),
                    )
                )
                self.channel_last[channel] = transfer
                self.channel_first.setdefault(channel, transfer)
                for consumer in self._consumers(target_stage, action, is_gradient):
                    self.arriving[consumer, destination].append(transfer)

    def _flows(self, source: int, target: int, num_bytes: float) -> tuple[Flow, ...]:
        return (Flow(source, target, num_bytes),)

    def _consumers(self, stage: int, action: Action, is_gradient: bool) -> tuple[Action, ...]:
        if not is_gradient:
            return (Action(stage, ActionKind.FORWARD, action.micro_batch),)
        kinds = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
        return tuple(Action(stage, kind, action.micro_batch) for kind in kinds)

    def _gather_weights(self, stage: Stage, action: Action) -> int | None:
        """ZeRO 3: collect the stage's weights while the action before is still computing."""
        if self.num_replicas[action.stage] == 1 or action.kind is ActionKind.WEIGHT_GRADIENT:
            return None
        weights = stage_parameters(self.chain, stage) * self.chain.dtype.bytes
        devices = [self.index[name] for name in stage.devices]
        gathered = self._add(
            Task(
                kind=SpanKind.COLLECTIVE,
                flows=self._rings([stage], weights),
                rounds=self.num_replicas[action.stage] - 1,
                after=self._after_exchange(
                    action.stage, {self.before_last[d] for d in devices if d in self.before_last}
                ),
                stage=action.stage,
                micro_batch=action.micro_batch,
            )
        )
        if not self.tasks[gathered].after:
            self.unanchored.append((gathered, devices))
        self.exchanged[action.stage] = gathered
        return gathered

    def _scatter_gradients(self, stage: Stage, action: Action) -> None:
        """ZeRO 2 and 3: every replica keeps the sum of its own part of the gradients, while the next action
        computes."""
        gradients = stage_parameters(self.chain, stage) * self.chain.dtype.bytes
        devices = [self.index[name] for name in stage.devices]
        scattered = self._add(
            Task(
                kind=SpanKind.COLLECTIVE,
                flows=self._rings([stage], gradients),
                rounds=self.num_replicas[action.stage] - 1,
                after=self._after_exchange(action.stage, {self.last[device] for device in devices}),
                stage=action.stage,
                micro_batch=action.micro_batch,
            )
        )
        self.exchanged[action.stage] = scattered
        for device in devices:
            self.gradients_done[action.stage, device] = scattered

    def _after_exchange(self, stage: int, tasks: set[int]) -> tuple[int, ...]:
        """Exchanges of one stage follow one another."""
        return tuple(sorted(tasks | ({self.exchanged[stage]} if stage in self.exchanged else set())))

    def add_synchronisation(self) -> None:
        """Sum the gradients of every stage's replicas and of tied layers, then update."""
        waits: dict[int, list[int]] = defaultdict(list)
        for stages, parameters, times in self._gradient_groups():
            devices = [self.index[name] for stage in stages for name in self.plan.stages[stage].devices]
            payload = times * parameters * self.chain.dtype.bytes
            flows = self._rings([self.plan.stages[stage] for stage in stages], payload)
            places = [(stage, device) for stage in stages for device in devices]
            ready = {self.gradients_done[place] for place in places if place in self.gradients_done}
            num_replicas = sum(self.num_replicas[stage] for stage in stages)
            task = self._add(
                Task(
                    kind=SpanKind.COLLECTIVE,
                    flows=flows,
                    rounds=times * (num_replicas - 1),
                    after=tuple(sorted(ready)),
                    stage=stages[0],
                )
            )
            for device in devices:
                waits[device].append(task)
        for device in range(len(self.names)):
            self._add_update(device, waits[device])

    def _gradient_groups(self) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """(stages, parameters, times around the ring) of what all replicas of these stages exchange at the end: a sum
        is twice around; under ZeRO 2 only the gather of the new weights is left, under ZeRO 3 nothing."""
        for index, stage in enumerate(self.plan.stages):
            if self.num_replicas[index] > 1:
                yield (index,), stage_parameters(self.chain, stage), {2: 1, 3: 0}.get(stage.zero, 2)
        for index, layer in enumerate(self.chain.layers):
            if layer.tied_to is None:
                continue
            homes = {self._stage_of(place) for place in (index, layer.tied_to)}
            if len(homes) > 1:
                yield tuple(sorted(homes)), layer.tied_parameters, 2

    def _stage_of(self, layer: int) -> int:
        return next(index for index, stage in enumerate(self.plan.stages) if stage.first <= layer < stage.end)

    def _rings(self, stages: Sequence[Stage], payload: float) -> tuple[Flow, ...]:
        """Ring flows over all replicas of ``stages``; replicas of width w hold w slices, each slice has its own
        ring."""
        replicas = [replica for stage in stages for replica in stage.replicas]
        pairs = ring_pairs([[self.index[name] for name in replica.devices] for replica in replicas], int)
        return tuple(Flow(source, target, share * payload) for (source, target), share in pairs.items())

    def _add_update(self, device: int, waits: list[int]) -> None:
        seconds = 0.0
        for stage in self.plan.stages:
            for replica in stage.replicas:
                for member, name in enumerate(replica.devices):
                    if self.index[name] == device:
                        seconds += update_seconds(self.chain, stage, self._portion(replica, member))
        self._end_with_update(device, seconds, waits)

    def _end_with_update(self, device: int, seconds: float, waits: list[int]) -> None:
        after = tuple(sorted({self.last[device], *waits}))
        task = self._add(Task(kind=SpanKind.UPDATE, device=device, seconds=seconds, after=after))
        self._occupy([device], task)

    def graph(self) -> TaskGraph:
        resident = [0.0] * len(self.names)
        for stage in self.plan.stages:
            for replica in stage.replicas:
                for name, share in zip(replica.devices, replica.shares, strict=True):
                    resident[self.index[name]] += state_bytes(self.chain, stage, share).total
        carry = [(self.last[device], self.first[device]) for device in range(len(self.names))]
        carry += [(self.last[device], task) for task, devices in self.unanchored for device in devices]
        carry += [(self.channel_last[channel], self.channel_first[channel]) for channel in self.channel_last]
        return TaskGraph(devices=self.names, tasks=tuple(self.tasks), carry=tuple(carry), resident=tuple(resident))

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _occupy(self, devices: Sequence[int], task: int) -> None:
        for device in devices:
            if device in self.last:
                self.before_last[device] = self.last[device]
            self.last[device] = task
            self.first.setdefault(device, task)
