"""Build schedules in which the pipeline turns round: worker w of W hosts stages w and 2 W - 1 - w.

The last worker hands a micro-batch to itself, and the first has both ends of the model. Chunk 0 is
the way down, chunk 1 the way back up. Per worker, with F, B, I and W the actions of a chunk, each
on its chunk's next micro-batch:

    (1)  zero-bubble-v (ZB-V, Qi et al. 2024), with N = max(M, 2 W - 1)
         F0 x (2 (W - w) - 1), (F1 F0) x w, (F1 I1 W1) x (W - w)            filling
         (F0 I0 W0 F1 I1 W1) x (N - W)                                      steady
         (I0 I1) x w, (I0 W0) x (W - w), then the rest of W1 and of W0      draining
    (2)  dualpipe-v (DualPipeV, DeepSeek 2025), of at least 2 W micro-batches; a W without a
         number is the oldest weight gradient that waits
         F0 x 2 (W - w - 1), (F0 F1) x (w + 1), (I1 W F1) x (W - w - 1)     filling
         (F0 B1 F1 B0) x (M - 2 W + w + 1), (B1 F1 B0) x (W - w - 1)        steady
         (B1 B0) x (w + 1), whose second half is I, without its W           draining
         (W I0) x (W - w - 1), W x (w + 1)

(1) is built for N micro-batches, and those beyond M are then removed. Forwards and backwards of (2)
that may overlap run one after the other here, because a stage has one stream of computation.
"""

from __future__ import annotations

from collections import Counter, deque

from argosy.errors import bad_input
from argosy.schedule.action import Action, ActionKind, Schedule, ScheduleKind

# Short names of kinds of actions.
FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT


class _Row:
    """A list of the actions of one worker that is built action by action."""

    def __init__(self, worker: int, num_workers: int) -> None:
        self.stages = (worker, 2 * num_workers - 1 - worker)
        self.actions: list[Action] = []
        self.waiting: deque[Action] = deque()
        """Weight gradients whose input gradients are in the row already."""
        self.done: Counter[tuple[int, str]] = Counter()

    def forward(self, chunk: int) -> None:
        self._add(chunk, FORWARD, "forward")

    def backward(self, chunk: int) -> None:
        self._add(chunk, BACKWARD, "backward")

    def input_gradient(self, chunk: int) -> None:
        self._add(chunk, INPUT, "backward")
        self.waiting.append(Action(self.stages[chunk], WEIGHT, self.actions[-1].micro_batch))

    def weight_gradient(self, chunk: int | None = None) -> None:
        """Add the oldest weight gradient that waits, of one chunk or of both."""
        oldest = next(
            action for action in self.waiting if chunk is None or action.stage == self.stages[chunk]
        )
        self.waiting.remove(oldest)
        self.actions.append(oldest)

    def _add(self, chunk: int, kind: ActionKind, counted: str) -> None:
        self.actions.append(Action(self.stages[chunk], kind, self.done[chunk, counted]))
        self.done[chunk, counted] += 1


def zero_bubble_v(num_stages: int, num_micro_batches: int) -> Schedule:
    """Build a zero-bubble-v schedule (1).

    >>> print(zero_bubble_v(4, 3).text())
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    workers = _workers(num_stages, ScheduleKind.ZERO_BUBBLE_V)
    count = max(num_micro_batches, 2 * workers - 1)
    rows = tuple(
        tuple(
            action
            for action in _zero_bubble_row(worker, workers, count)
            if action.micro_batch < num_micro_batches
        )
        for worker in range(workers)
    )
    return Schedule(ScheduleKind.ZERO_BUBBLE_V, num_stages, num_micro_batches, rows)


def _zero_bubble_row(worker: int, workers: int, count: int) -> list[Action]:
    row, left = _Row(worker, workers), workers - worker
    for _ in range(2 * left - 1):
        row.forward(0)
    for _ in range(worker):
        row.forward(1)
        row.forward(0)
    for _ in range(left):
        row.forward(1)
        row.input_gradient(1)
        row.weight_gradient()
    for _ in range(count - workers):
        if row.done[0, "forward"] < count:
            row.forward(0)
        row.input_gradient(0)
        row.weight_gradient()
        row.forward(1)
        row.input_gradient(1)
        row.weight_gradient()
    for _ in range(worker):
        row.input_gradient(0)
        row.input_gradient(1)
    for _ in range(left):
        row.input_gradient(0)
        row.weight_gradient(0)
    for action in sorted(
        row.waiting, reverse=True, key=lambda action: (action.stage, -action.micro_batch)
    ):
        row.actions.append(action)
    return row.actions


def dualpipe_v(num_stages: int, num_micro_batches: int) -> Schedule:
    """Build a dualpipe-v schedule (2).

    >>> print(dualpipe_v(4, 4).text())
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """
    workers = _workers(num_stages, ScheduleKind.DUALPIPE_V)
    if num_micro_batches < num_stages:
        expected = (
            f"at least {num_stages} micro-batches, as many as stages, for {ScheduleKind.DUALPIPE_V}"
        )
        raise bad_input(expected, num_micro_batches, "num_micro_batches")
    rows = tuple(
        tuple(_dualpipe_row(worker, workers, num_micro_batches)) for worker in range(workers)
    )
    return Schedule(ScheduleKind.DUALPIPE_V, num_stages, num_micro_batches, rows)


def _dualpipe_row(worker: int, workers: int, count: int) -> list[Action]:
    row, behind = _Row(worker, workers), workers - worker - 1
    for _ in range(2 * behind):
        row.forward(0)
    for _ in range(worker + 1):
        row.forward(0)
        row.forward(1)
    for _ in range(behind):
        row.input_gradient(1)
        row.weight_gradient()
        row.forward(1)
    for _ in range(count - 2 * workers + worker + 1):
        row.forward(0)
        row.backward(1)
        row.forward(1)
        row.backward(0)
    for _ in range(behind):
        row.backward(1)
        row.forward(1)
        row.backward(0)
    for number in range(2 * (worker + 1)):  # chunks 1 and 0 in turns; the second half is split
        run = row.backward if number <= worker else row.input_gradient
        run(1 - number % 2)
    for _ in range(behind):
        row.weight_gradient()
        row.input_gradient(0)
    for _ in range(worker + 1):
        row.weight_gradient()
    return row.actions


def _workers(num_stages: int, kind: ScheduleKind) -> int:
    if num_stages % 2:
        raise bad_input(
            f"an even number of stages, two for each worker of {kind}", num_stages, "num_stages"
        )
    return num_stages // 2
