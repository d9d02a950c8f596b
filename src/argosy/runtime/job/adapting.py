"""Let a job measure itself and change its schedule, shares or plan between two steps.

After every step all ranks exchange one small message of fixed size. Adapting sends nothing else.

    (1)  each rank reports, on a common clock, when its messages left and when it stopped waiting
         for those that arrived; the seconds of one micro-batch, over the whole step and over its
         later half; and the seconds that it exchanged parts of a micro-batch with other ranks of
         its stage
    (2)  rank 0 turns these into bandwidths and speeds (``adapt.signals``) and passes them to the
         controller, which runs in a process of its own (``adapt.advisor``) while steps go on
    (3)  rank 0 announces a decision that has arrived meanwhile in its next message, so that all
         ranks apply it before the same step

In the first step after the start or a migration, stages also learn which messages will come, so
that step is not used as a measurement.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from argosy.adapt.advisor import Advisor, Brief, Observation
from argosy.adapt.controller import Decision
from argosy.adapt.signals import (
    ObservedTransfer,
    ObservedWork,
    bandwidths_seen,
    speeds_seen,
    work_of,
)
from argosy.adapt.watch import World
from argosy.cost.moving import is_same_division
from argosy.errors import InputError
from argosy.plan.file import dumps_plan, loads_plan, schedule_to_dict
from argosy.plan.plan import Plan
from argosy.runtime.communication.measured import clock_offsets
from argosy.runtime.processes.failure import in_contact
from argosy.runtime.processes.ranks import links_between, seats_of
from argosy.runtime.state.migrate import Moved
from argosy.runtime.step.trainer import Trainer
from argosy.timeline import ContactKind, SpanKind

# Kinds of rows of a message; kind 0 marks a row that is not used.
_SENT, _WAITED, _WORKED, _SIZE, _NEWS = 1, 2, 3, 4, 5
# Numbers in a row: its kind and five values.
_COLUMNS = 6
# Steps after which clocks are compared again, because they drift apart.
_AGAIN = 200
_COMPUTATION = (
    SpanKind.FORWARD,
    SpanKind.BACKWARD,
    SpanKind.INPUT_GRADIENT,
    SpanKind.WEIGHT_GRADIENT,
)
"""Kinds of marks that measure the speed of a device."""
# Steps before and after a change whose median seconds are logged; three exclude an outlier.
_AROUND = 3

Event = dict[str, Any]
"""A line of ``decisions.jsonl``."""


class Adapter:
    """An object that every rank calls after each step; ``brief`` and ``tell`` are used on rank
    0."""

    def __init__(
        self, trainer: Trainer, brief: Brief, tell: Callable[[Event], None] = lambda event: None
    ) -> None:
        self.trainer, self.brief, self.tell = trainer, brief, tell
        self.keeps_marks = True
        """True if marks are kept for a timeline; otherwise they are dropped once they have been
        read."""
        self.advisor = Advisor(brief) if trainer.rank == 0 else None
        self.believed = {link.name: link.bandwidth.at(0) for link in brief.cluster.links}
        self.speeds = {device.name: device.speed.at(0) for device in brief.cluster.devices}
        self.seen: dict[str, float] = {}
        """Bandwidths of links (bytes/s) and relative speeds of devices that the last step showed;
        on rank 0."""
        self.is_fresh = True
        """True if the next step must not be used as a measurement."""
        self.last_move: Moved | None = None
        self.waiting: Decision | None = None
        """A decision that has not been announced yet; on rank 0."""
        self.seconds: list[float] = []
        self.open: tuple[Event, int] | None = None
        """A change whose outcome is not logged yet, and the number of steps done before it."""
        trainer.open_state_group()
        self._compare_clocks()

    def _compare_clocks(self) -> None:
        self.offset = clock_offsets(self.trainer.device)[self.trainer.rank].seconds
        self.compared = self.trainer.steps

    def after_step(self, seconds: float, steps_left: int) -> None:
        """Exchange measurements and apply a decision, if there is one; every rank calls this after
        the same step."""
        if self.trainer.steps - self.compared >= _AGAIN:
            self._compare_clocks()
        self.seconds.append(seconds)
        news = self._news() if self.advisor is not None and steps_left else b""
        gathered = self._exchange(len(news))
        if self.advisor is not None:
            self._report_outcome()
            if not self.is_fresh:
                self.advisor.tell(self._observation(gathered, seconds, steps_left))
        self.is_fresh = False
        length = int(gathered[0][0][1])
        if length:
            self._apply(self._broadcast(news, length))

    def close(self) -> None:
        if self.advisor is not None:
            self.advisor.close()

    def _news(self) -> bytes:
        """Return the newest decision as JSON, empty if there is none (3)."""
        assert self.advisor is not None
        for advice in self.advisor.answers():
            self._believe(advice.world)
            if advice.decision is not None:
                self.waiting = advice.decision
        if self.waiting is None:
            return b""
        decision, self.waiting = self.waiting, None
        text = {"decision": described(decision, self.brief), "plan": dumps_plan(decision.plan)}
        return json.dumps(text).encode()

    def _believe(self, world: World) -> None:
        self.believed |= dict(world.bandwidths)
        self.speeds |= dict(world.speeds)

    def _exchange(self, length: int) -> list[Any]:
        """Exchange rows with all ranks and return the rows of every rank (1)."""
        trainer = self.trainer
        seats = [seat for stage in seats_of(trainer.plan, trainer.roster) for seat in stage]
        stages = [sum(seat.rank == rank for seat in seats) for rank in range(len(trainer.roster))]
        most = 1 + max(stages) * (4 * trainer.plan.num_micro_batches + 2)
        rows = [(_NEWS, length, 0, 0, 0, 0), *self._rows()]
        where = trainer.device if dist.get_backend() == "nccl" else torch.device("cpu")
        own = torch.zeros(most, _COLUMNS, dtype=torch.float64)
        own[: len(rows)] = torch.tensor(rows, dtype=torch.float64)
        gathered = [
            torch.empty(most, _COLUMNS, dtype=torch.float64, device=where) for _ in trainer.roster
        ]
        with in_contact("while ranks exchanged measurements"):
            dist.all_gather(gathered, own.to(where))
        return [rows_of_rank.tolist() for rows_of_rank in gathered]

    def _rows(self) -> Iterator[tuple[float, ...]]:
        last, marks = self.trainer.steps - 1, self.trainer.recorder.marks
        works: dict[int, dict[str, list[ObservedWork]]] = defaultdict(lambda: defaultdict(list))
        for mark in reversed(marks):
            if mark.step != last:
                break
            if mark.stage is None:
                continue
            start, end = mark.start - self.offset, mark.end - self.offset
            if mark.what == ContactKind.SENDING:
                yield _SENT, mark.stage, mark.micro_batch or 0, mark.gradient, start, end
            elif mark.what == ContactKind.WAITING:
                yield _WAITED, mark.stage, mark.micro_batch or 0, mark.gradient, start, end
            elif mark.what in _COMPUTATION:
                own = mark.end - mark.start - mark.together
                works[mark.stage][mark.what].append(ObservedWork(own, mark.together))
        for stage, kinds in works.items():  # the last micro-batches come first
            later = {kind: own[: -(-len(own) // 2)] for kind, own in kinds.items()}
            yield _WORKED, stage, *work_of(later), *work_of(kinds)
        for stage, size in self.trainer.executor.bytes_handed_on().items():
            yield _SIZE, stage, 0, 0, size, 0
        if not self.keeps_marks:
            marks.clear()

    def _observation(self, gathered: Sequence[Any], seconds: float, steps_left: int) -> Observation:
        """Build an observation for the controller from the rows of all ranks (2)."""
        trainer, brief = self.trainer, self.brief
        worked = {
            (int(row[1]), trainer.roster[rank]): row[2:]
            for rank, rows in enumerate(gathered)
            for row in rows
            if row[0] == _WORKED
        }
        later, whole = (
            speeds_seen(
                {key: ObservedWork(*row[at : at + 2]) for key, row in worked.items()},
                trainer.plan,
                brief.chain,
                brief.cluster,
                brief.model,
            )
            for at in (0, 2)
        )
        messages = sorted(
            messages_in(gathered, trainer.plan, trainer.roster), key=lambda message: message.arrived
        )
        moved = None if self.last_move is None else self.last_move.seconds
        self.last_move = None
        bandwidths = bandwidths_seen(messages, brief.cluster, self.believed)
        self.seen = bandwidths | whole
        return Observation(
            step=trainer.steps - 1,
            plan=trainer.plan,
            seconds=seconds,
            bandwidths=bandwidths,
            speeds=whole,
            steps_left=steps_left,
            last=later
            | bandwidths_seen(messages[len(messages) // 2 :], brief.cluster, self.believed),
            moved=moved,
        )

    def _broadcast(self, text: bytes, length: int) -> Any:
        where = self.trainer.device if dist.get_backend() == "nccl" else torch.device("cpu")
        data = torch.frombuffer(bytearray(text or bytes(length)), dtype=torch.uint8).to(where)
        with in_contact("while a decision was broadcast"):
            dist.broadcast(data, 0)
        return json.loads(bytes(data.cpu().numpy()))

    def _apply(self, announced: Mapping[str, Any]) -> None:
        plan = loads_plan(announced["plan"])
        try:
            moved = change_to(self.trainer, plan)
        except InputError as error:  # raised before any change, and equally on all ranks
            if self.trainer.rank == 0:
                self.tell({"event": "refused", **announced["decision"], "why": str(error)})
            return
        self.is_fresh, self.last_move = moved is not None, moved
        if self.trainer.rank == 0:
            event = {
                "event": "decision",
                **announced["decision"],
                "applied_before": self.trainer.steps,
            }
            if moved is not None:
                event |= {"moved_bytes": moved.total, "moved_seconds": moved.seconds}
            self.tell(event)
            self.open = (event, len(self.seconds))

    def _report_outcome(self) -> None:
        """Log the median seconds of the steps after a change, beside those of the steps before it,
        once enough steps have been done."""
        if self.open is None:
            return
        event, done = self.open
        after = self.seconds[done + ("moved_bytes" in event) :]
        if len(after) == _AROUND:
            self.open = None
            before = statistics.median(self.seconds[max(0, done - _AROUND) : done])
            outcome = {"measured_before": before, "measured_after": statistics.median(after)}
            self.tell({"event": "outcome", "step": event["step"], "what": event["what"], **outcome})


def messages_in(
    gathered: Sequence[Any], plan: Plan, roster: Sequence[str]
) -> Iterator[ObservedTransfer]:
    """Yield the messages of a step, from the rows of their senders and receivers."""
    seats = seats_of(plan, roster)
    sizes = {int(row[1]): row[4] for rows in gathered for row in rows if row[0] == _SIZE}
    sent = {
        (rank, *map(int, row[1:4])): row[4]
        for rank, rows in enumerate(gathered)
        for row in rows
        if row[0] == _SENT
    }
    for rank, rows in enumerate(gathered):
        for row in rows:
            if row[0] != _WAITED:
                continue
            stage, micro_batch, gradient = map(int, row[1:4])
            source = stage + (1 if gradient else -1)
            seat = next(seat for seat in seats[stage] if seat.rank == rank)
            for link in links_between(seat, seats[source], sending=False):
                start = sent.get((link.peer, source, micro_batch, gradient))
                if start is not None and link.peer != rank:
                    size = sizes.get(min(source, stage), 0.0) * (link.end - link.begin)
                    yield ObservedTransfer(
                        roster[link.peer], roster[rank], size, start, row[4], max(start, row[5])
                    )


def change_to(trainer: Trainer, plan: Plan) -> Moved | None:
    """Continue with another plan in the cheapest way: another schedule, other shares, or a
    migration, whose bytes and seconds are returned."""
    before = trainer.plan
    if not is_same_division(before, plan):
        return trainer.move(plan)
    for index, (old, new) in enumerate(zip(before.stages, plan.stages, strict=True)):
        if old != new:
            trainer.set_shares(index, [replica.samples for replica in new.replicas])
    if plan.schedule != before.schedule:
        trainer.set_schedule(plan.schedule)
    return None


def described(decision: Decision, brief: Brief) -> Event:
    """Return a decision and the numbers behind it as an entry of the log."""
    own = {link.name: link.bandwidth.at(0) for link in brief.cluster.links}
    return {
        "step": decision.step,
        "what": str(decision.what),
        "schedule": schedule_to_dict(decision.plan.schedule),
        "stages": [
            {
                "layers": [stage.first, stage.end],
                "samples": {r.devices[0]: r.samples for r in stage.replicas},
            }
            for stage in decision.plan.stages
        ],
        "predicted_before": decision.before,
        "predicted_after": decision.after,
        "predicted_moving": decision.moving,
        "why": decision.why,
        "bandwidths": {
            name: rate
            for name, rate in decision.world.bandwidths
            if abs(rate - own[name]) > 0.05 * own[name]
        },
        "speeds": {name: speed for name, speed in decision.world.speeds if abs(speed - 1) > 0.05},
    }
