"""Run one training step of one rank: the actions of its row of the schedule, in order, on real
tensors.

The row comes from ``schedule`` with its communication inserted. A send begins as soon as its tensor
exists and does not block; receives are posted ``lookahead`` computations before they are needed,
because a message is transferred only once its receive is posted. The loss of a portion of n samples
counts n f / N of the global batch of N, with f the weight per sample that ``weighing`` finds; sums
over micro-batches and replicas are then those of the whole batch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from argosy.errors import invalid
from argosy.plan.plan import Plan
from argosy.runtime.communication.ledger import answered, lookahead
from argosy.runtime.communication.marks import Recorder
from argosy.runtime.communication.transport import Arrival, AsyncWork, Transport
from argosy.runtime.processes.failure import in_contact
from argosy.runtime.processes.ranks import (
    PeerLink,
    Seat,
    channels_of,
    links_between,
    seats_of,
    worker_of,
)
from argosy.runtime.stages.carry import Carry, CarryForm, TensorForm, describe, loads_form
from argosy.runtime.stages.defer import Debt, Deferral, settle
from argosy.runtime.stages.moment import Moment
from argosy.runtime.stages.stage import StageProgram
from argosy.runtime.stages.weighing import PartLoss, Tally
from argosy.runtime.step.batch import batch_form, first_samples, portion, without_padding
from argosy.runtime.weights.kept_on_host import HostActivations
from argosy.runtime.weights.overlap import GradientEvents
from argosy.schedule import Action, ActionKind, build_schedule, with_communication
from argosy.schedule.communicate import check_channels

# The first tag of messages about forms; tags of tensors are smaller.
_FORM_TAG = 2**28
# The most tensors that a stage may send on, since tags number them.
_MOST_TENSORS = 64
_FORWARD_KINDS = (ActionKind.RECEIVE_FORWARD, ActionKind.FORWARD, ActionKind.SEND_FORWARD)
"""Actions that an evaluation runs."""
_GATHERING_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD)
"""Actions for which weights are gathered while the action before them runs."""


@dataclass
class HeldActivations:
    """Tensors that a stage keeps of a micro-batch from its forward to its backward."""

    inputs: list[Tensor]
    """Leaves whose gradients are sent back to the previous stage."""
    outputs: list[Tensor]
    """The tensors whose gradients come back, or the weighted loss."""


@dataclass
class Hosted:
    """A stage of which this rank holds a replica."""

    seat: Seat
    program: StageProgram
    upstream: tuple[PeerLink, ...]
    downstream: tuple[PeerLink, ...]
    input_form: CarryForm | None = None
    output_form: CarryForm | None = None
    held: dict[int, HeldActivations] = field(default_factory=dict)
    arriving: dict[tuple[bool, int], Arrival] = field(default_factory=dict)
    """Tensors that are being received, by whether they are gradients, and by micro-batch."""
    handed: dict[tuple[bool, int], list[Tensor]] = field(default_factory=dict)
    """Tensors for a neighbouring stage on this rank, or to be sent, with the same keys."""
    debts: dict[int, list[Debt]] = field(default_factory=dict)


class Executor:
    """A runner of the steps of a plan on this rank."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        programs: Mapping[int, StageProgram],
        transport: Transport,
        recorder: Recorder,
        roster: Sequence[str],
        gradient_events: GradientEvents | None = None,
        activations: HostActivations | None = None,
    ) -> None:
        self.activations = activations
        self.transport = transport
        self.recorder = recorder
        self.rank = rank
        self.devices = tuple(roster)
        """Devices by rank."""
        self.deferral = Deferral()
        self.gradient_events = gradient_events or GradientEvents()
        self.loss_scale = 1.0
        self.stages: dict[int, Hosted] = {}
        self.forms: dict[
            tuple[int, tuple[bool, str]], tuple[CarryForm | None, CarryForm | None]
        ] = {}
        """Forms that stages receive and send, by stage, by whether it trains and by the form of the
        batch."""
        self.programs = programs
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Use the schedule and the shares of a plan with the same stages on the same ranks, from
        the next step on."""
        self.plan = plan
        self.is_warm = False
        """True if a step has been done under this plan."""
        seats = seats_of(plan, self.devices)
        self.transport.connect(channels_of(plan, self.devices))
        earlier = self.stages
        self.stages = {}
        for index, program in self.programs.items():
            seat = next(seat for seat in seats[index] if seat.rank == self.rank)
            before = seats[index - 1] if index > 0 else ()
            after = seats[index + 1] if index + 1 < len(seats) else ()
            self.stages[index] = Hosted(
                seat=seat,
                program=program,
                upstream=links_between(seat, before, sending=False),
                downstream=links_between(seat, after, sending=True),
                input_form=earlier[index].input_form if index in earlier else None,
                output_form=earlier[index].output_form if index in earlier else None,
            )
        schedule = build_schedule(plan.schedule, len(plan.stages), plan.num_micro_batches)
        self.answered = answered(schedule)
        ahead = with_communication(schedule, lookahead=lookahead(plan))
        check_channels(ahead)
        worker = worker_of(plan, min(self.programs)) if self.programs else None
        self.row = () if worker is None else ahead.rows[worker]
        self.last_gradients = {
            action.stage: action for action in self.row if action.kind.frees_activations
        }
        """Per stage, the action that adds the last gradients of a step."""
        self.first_row = (
            () if worker is None else with_communication(schedule, lookahead=0).rows[worker]
        )
        for program in self.programs.values():
            program.deferral = self.deferral if plan.schedule.kind.is_split else None

    @contextlib.contextmanager
    def running(self, programs: Mapping[int, StageProgram]) -> Iterator[None]:
        """Run other programs of the same stages in the context."""
        trained = self.programs
        try:
            self._install(programs)
            yield
        finally:
            self._install(trained)

    def _install(self, programs: Mapping[int, StageProgram]) -> None:
        self.programs = programs
        for index, program in programs.items():
            self.stages[index].program = program

    def step(
        self, batch: Any, tally: Tally, *, samples: int, trains: bool = True, is_final: bool = False
    ) -> Tensor:
        """Run every action of a step, or its forwards alone; return the weighted loss of each
        micro-batch as far as this rank computed it.

        All but the first ``samples`` of the batch are copies with weight zero. With ``is_final`` no
        further batch adds to the gradients.
        """
        self.losses = torch.zeros(
            self.plan.num_micro_batches, dtype=torch.float64, device=self.transport.device
        )
        self.tally, self.samples, self.trains = tally, samples, trains
        self.is_final = is_final
        tally.begin_batch()
        form = (trains, batch_form(batch))
        for index, stage in self.stages.items():
            stage.input_form, stage.output_form = self.forms.get((index, form), (None, None))
        for program in self.programs.values():
            program.begin(first_samples(batch, samples), self._moment(0, samples))
        row = self.row if self._posts_ahead() else self.first_row
        actions = row if trains else [action for action in row if action.kind in _FORWARD_KINDS]
        following = _following(actions)
        with torch.set_grad_enabled(trains):
            for action in actions:
                gate = self.programs[action.stage].gate
                if gate is not None:
                    gate.following = following.get(action)
                self._act(action, batch)
        self.is_warm = self.is_warm or trains
        with in_contact("while the last messages of the step were leaving"):
            self.transport.finish()
        for index, stage in self.stages.items():
            self.forms[index, form] = (stage.input_form, stage.output_form)
        for program in self.programs.values() if trains else ():
            program.finish()
        return self.losses

    def _posts_ahead(self) -> bool:
        """Return whether receives can be posted ahead: after the first step, when all forms are
        known.

        A receive of NCCL is a kernel that waits. So with NCCL the first step under a plan posts
        none ahead either: it loads kernels, for which CUDA may wait until the device is idle.
        """
        if self.transport.in_order and not self.is_warm:
            return False
        last = len(self.plan.stages) - 1
        return all(
            (stage.input_form is not None or index == 0)
            and (stage.output_form is not None or index == last)
            for index, stage in self.stages.items()
        )

    def _act(self, action: Action, batch: Any) -> None:
        stage, index = self.stages[action.stage], action.micro_batch
        match action.kind:
            case ActionKind.RECEIVE_FORWARD:
                self._post(stage, index, gradient=False)
            case ActionKind.RECEIVE_BACKWARD:
                if self._forms(stage, gradient=True):
                    self._post(stage, index, gradient=True)
            case ActionKind.FORWARD:
                self._forward(stage, index, batch)
            case ActionKind.BACKWARD | ActionKind.INPUT_GRADIENT:
                self._backward(stage, action)
            case ActionKind.WEIGHT_GRADIENT:
                debts = stage.debts.pop(index)
                if debts:
                    with self.recorder.computing(action):
                        settle(debts)
                self._added_up(action)
            case ActionKind.SEND_FORWARD:
                self._send(stage, index, gradient=False)
            case ActionKind.SEND_BACKWARD:
                if (True, index) in stage.handed:
                    self._send(stage, index, gradient=True)

    def _forward(self, stage: Hosted, index: int, batch: Any) -> None:
        action = Action(stage.seat.stage, ActionKind.FORWARD, index)
        inputs, carry = self._input(stage, action)
        for earlier in self.answered.get((stage.seat.stage, index), ()):
            self.transport.departed((stage.seat.stage, earlier, True))
        seat, rows = stage.seat, None
        if stage.program.needs_batch:
            rows = portion(batch, self.plan, seat, index, self.transport.device)
        first = index * self.plan.micro_batch_size + seat.begin
        moment = self._moment(first, seat.samples)
        is_last = stage.seat.stage == len(self.plan.stages) - 1
        if is_last and first + seat.samples > self.samples:
            moment, carry, rows = without_padding(moment, self.samples - first, carry, rows)
        with self.recorder.computing(action), self._keeping(stage, index, inputs):
            result = stage.program(carry, rows, moment)
        if is_last:
            outputs = [
                self._weighted(stage, index, result, 0 if moment.is_padding else moment.samples)
            ]
        else:
            outputs = self._handed_on(stage, index, result)
        if self.trains:
            stage.held[index] = HeldActivations(inputs, outputs)

    def _moment(self, first: int, samples: int) -> Moment:
        return Moment(self.recorder.step, first, samples, self.samples)

    def _keeping(
        self, stage: Hosted, index: int, inputs: list[Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        if self.activations is None or not self.trains:
            return contextlib.nullcontext()
        return self.activations.keeping(stage.seat.stage, index, inputs, stage.program.num_layers)

    def _input(self, stage: Hosted, action: Action) -> tuple[list[Tensor], Carry]:
        if stage.seat.stage == 0:
            return [], None
        tensors = self._arrived(stage, action, gradient=False)
        form = stage.input_form
        assert form is not None
        tensors = [tensor.detach() for tensor in tensors]
        inputs = []
        for tensor, described in zip(tensors, form.tensors, strict=True):
            if described.has_gradient:
                inputs.append(tensor.requires_grad_())
        return inputs, form.assemble(tensors)

    def _weighted(
        self, stage: Hosted, index: int, result: Tensor | PartLoss, samples: int
    ) -> Tensor:
        part = result if isinstance(result, PartLoss) else PartLoss(result)
        weighted = part.loss if part.is_share else part.loss * (samples / self.plan.global_batch)
        if stage.seat.member:  # only the first member of a group adds the loss and its gradient
            return weighted * 0.0
        fill = self.tally.weighted(part, samples)
        if isinstance(fill, Tensor):  # a mean over no targets is NaN
            weighted = torch.where(fill > 0, weighted * fill, torch.zeros_like(weighted))
        elif fill != 1.0:
            weighted = weighted * fill
        self.losses[index] += weighted.detach()
        return weighted * self.loss_scale if self.loss_scale != 1.0 else weighted

    def _handed_on(self, stage: Hosted, index: int, carry: Carry) -> list[Tensor]:
        """Keep the tensors for the next stage; the first time, send it their form."""
        number = stage.seat.stage
        form, tensors = describe(carry, stage.seat.samples, where=f"stage {number}")
        if len(tensors) > _MOST_TENSORS:
            actual, expected = f"{len(tensors)} tensors handed on", f"at most {_MOST_TENSORS}"
            raise invalid(f"stage {number}", actual, expected)
        if stage.output_form is None:
            stage.output_form = form
            self._send_form(stage, form)
        elif form != stage.output_form:
            actual = (
                "a hand-over whose names, shapes, dtypes or constants differ from those of the "
                "first micro-batch"
            )
            raise invalid(f"stage {number}", actual, "the same for every micro-batch")
        stage.handed[False, index] = tensors
        return [tensor for tensor in tensors if tensor.requires_grad]

    def _send_form(self, stage: Hosted, form: CarryForm) -> None:
        following = self.stages.get(stage.seat.stage + 1)
        if following is not None and not self._crosses(stage.seat.stage):
            following.input_form = form
            return
        for link in stage.downstream:
            if link.is_first:
                number = stage.seat.stage
                self.transport.send_bytes(
                    form.dumps(where=f"stage {number}"), link.peer, _FORM_TAG + number, number
                )

    def _crosses(self, stage: int) -> bool:
        """Return whether the output of a stage is sent to another worker."""
        return worker_of(self.plan, stage) != worker_of(self.plan, stage + 1)

    def _backward(self, stage: Hosted, action: Action) -> None:
        index = action.micro_batch
        last = stage.seat.stage == len(self.plan.stages) - 1
        held = stage.held.pop(index)
        gradients = (
            None if last or not held.outputs else self._arrived(stage, action, gradient=True)
        )
        self.transport.departed((stage.seat.stage, index, False))
        is_last = action == self.last_gradients[action.stage] and self.is_final
        if is_last and stage.program.deferral is None:
            self.gradient_events.before_last(action.stage)
        if held.outputs:  # otherwise nothing in this stage or before it is trained
            kept = self.activations
            returning = (
                contextlib.nullcontext()
                if kept is None
                else kept.returning(stage.seat.stage, index)
            )
            with self.recorder.computing(action), returning:
                _differentiate(held.outputs, gradients)
                if action.kind is ActionKind.BACKWARD:
                    settle(self.deferral.take())
        if action.kind is ActionKind.INPUT_GRADIENT:
            stage.debts[index] = self.deferral.take()
        if held.inputs:
            stage.handed[True, index] = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for tensor in held.inputs
            ]
        if action.kind is ActionKind.BACKWARD:
            self._added_up(action)

    def _added_up(self, action: Action) -> None:
        self.gradient_events.added(action.stage)
        if action == self.last_gradients[action.stage] and self.is_final:
            self.gradient_events.after_last(action.stage)

    def bytes_handed_on(self) -> dict[int, float]:
        """Return, per stage of this rank, the bytes of one sample that are sent to the next; known
        after the first step."""
        return {
            index: float(sum(form.bytes_per_sample() for form in stage.output_form.tensors))
            for index, stage in self.stages.items()
            if stage.output_form is not None
        }

    def _send(self, stage: Hosted, index: int, *, gradient: bool) -> None:
        tensors = stage.handed.pop((gradient, index))
        links = stage.upstream if gradient else stage.downstream
        target = stage.seat.stage + (-1 if gradient else 1)
        key = (stage.seat.stage, index, gradient)
        contact = self._peers(f"sending micro-batch {index}", links)
        with self.recorder.sending(stage.seat.stage, index, gradient=gradient), in_contact(contact):
            tags = [
                self._tag(target, index, position, gradient=gradient)
                for position in range(len(tensors))
            ]
            for link in links:
                parts = [tensor[link.begin : link.end] for tensor in tensors]
                self.transport.send(list(zip(parts, tags, strict=True)), link.peer, key)
        self.transport.limit_gradients()

    def _post(self, stage: Hosted, index: int, *, gradient: bool) -> None:
        """Post the receives of a micro-batch: one buffer per tensor, filled by every peer that has
        a part of it; for gradients, one buffer per turn of peers."""
        links = stage.downstream if gradient else stage.upstream
        turns = sorted({link.turn for link in links}) if gradient else []
        links_by_turn = [[link for link in links if link.turn == turn] for turn in turns] or [
            list(links)
        ]
        layers: list[list[Tensor]] = []
        works: list[AsyncWork] = []
        with in_contact(self._peers(f"posting receives of micro-batch {index}", links)):
            forms = self._forms(stage, gradient=gradient)
            tags = [
                self._tag(stage.seat.stage, index, at, gradient=gradient)
                for at in range(len(forms))
            ]
            for peers in links_by_turn:
                buffers = [
                    self.transport.buffer((stage.seat.samples, *form.shape), form.dtype)
                    for form in forms
                ]
                if sum(link.end - link.begin for link in peers) < stage.seat.samples:
                    for buffer in buffers:
                        buffer.zero_()
                layers.append(buffers)
                for link in peers:
                    parts = [buffer[link.begin : link.end] for buffer in buffers]
                    works += self.transport.post(
                        list(zip(parts, tags, strict=True)), link.peer, gradient=gradient
                    )
        stage.arriving[gradient, index] = Arrival(layers, works, self.transport.device)

    def _forms(self, stage: Hosted, *, gradient: bool) -> tuple[TensorForm, ...]:
        if gradient:
            assert stage.output_form is not None, "a backward comes after its forward"
            return stage.output_form.gradients
        if stage.input_form is None:
            tag = _FORM_TAG + stage.seat.stage - 1
            stage.input_form = loads_form(self.transport.receive_bytes(stage.upstream[0].peer, tag))
        return stage.input_form.tensors

    def _arrived(self, stage: Hosted, action: Action, *, gradient: bool) -> list[Tensor]:
        key = (gradient, action.micro_batch)
        if key in stage.arriving:
            links = stage.downstream if gradient else stage.upstream
            with (
                self.recorder.waiting(action),
                in_contact(self._peers(f"waiting for {action}'s input", links)),
            ):
                arrival = stage.arriving.pop(key)
                tensors = arrival.wait()
            self.recorder.received(action, arrival.posted)
            return tensors
        neighbour = self.stages[stage.seat.stage + (1 if gradient else -1)]
        return neighbour.handed.pop(key)

    def _peers(self, verb: str, links: tuple[PeerLink, ...]) -> str:
        """Return a phrase such as ``with rank 1 (v0.0) while ...``, for messages about lost
        contact."""
        names = ", ".join(f"rank {link.peer} ({self.devices[link.peer]})" for link in links)
        return f"with {names} while {verb}"

    def _tag(self, target: int, index: int, position: int, *, gradient: bool) -> int:
        """Return a tag that is unique among the messages of a step from one rank to another."""
        return ((index * len(self.plan.stages) + target) * 2 + gradient) * _MOST_TENSORS + position


def _following(actions: Sequence[Action]) -> dict[Action, ActionKind]:
    """Return, by action, the kind of the next one if it is of the same stage and needs all
    weights."""
    computing = [action for action in actions if action.kind.is_computation]
    return {
        action: after.kind
        for action, after in itertools.pairwise(computing)
        if after.stage == action.stage and after.kind in _GATHERING_KINDS
    }


def _differentiate(outputs: list[Tensor], gradients: list[Tensor] | None) -> None:
    """Add up the gradients of everything that ``outputs`` depend on."""
    pairs = [
        (output, None if gradients is None else gradients[at])
        for at, output in enumerate(outputs)
        if output.requires_grad
    ]
    if pairs:
        torch.autograd.backward(
            [output for output, _ in pairs], [gradient for _, gradient in pairs]
        )
