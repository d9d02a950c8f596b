"""Define the words of a schedule: an ``Action`` of one stage on one micro-batch, and a ``Schedule``
as rows of actions.

The text form of an action is stage, kind, micro-batch, and parses back: ``2F0`` is stage 2's
forward of micro-batch 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from argosy.errors import Mismatch
from argosy.units import counted


class ActionKind(StrEnum):
    """A kind of work that a stage does: first the computations, then the communication that
    ``with_communication`` inserts."""

    FORWARD = "F"
    BACKWARD = "B"
    """Computes the gradients of inputs and weights in one action."""
    INPUT_GRADIENT = "I"
    """Computes the half of a backward that the previous stage waits for."""
    WEIGHT_GRADIENT = "W"
    """Computes the other half, which nothing waits for until the optimizer runs."""
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"

    @property
    def is_computation(self) -> bool:
        return self in COMPUTATIONS

    @property
    def is_gradient(self) -> bool:
        """Return whether the action produces the gradient that the previous stage waits for."""
        return self in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)

    @property
    def frees_activations(self) -> bool:
        """Return whether the action ends the use of the micro-batch's activations."""
        return self in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)


# Kinds that compute; all others communicate.
COMPUTATIONS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT,
)
# Text form of an action: stage, kind, micro-batch.
_TEXT = re.compile(r"(\d+)([A-Z]+)(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """A piece of work that a stage does with one micro-batch."""

    stage: int
    kind: ActionKind
    micro_batch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that a text such as ``2F0`` names.

        >>> Action.parse("2F0"), Action.parse("11RB3")
        (2F0, 11RB3)
        """
        match = _TEXT.fullmatch(text)
        if match is None or match[2] not in list(ActionKind):
            kinds = ", ".join(ActionKind)
            raise Mismatch(text, f'an action such as "2F0": stage, one of {kinds}, micro-batch')
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    __str__ = __repr__


class ScheduleKind(StrEnum):
    """A kind of schedule, which has its name in commands and plan files."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    EAGER = "eager-1f1b"
    KFKB = "kfkb"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"
    ZERO_BUBBLE_V = "zero-bubble-v"
    DUALPIPE_V = "dualpipe-v"

    @property
    def is_family(self) -> bool:
        """Return whether the kind is a special case of the rule ``generate.family``, which a depth
        per stage and a group size determine."""
        return self in (
            ScheduleKind.GPIPE,
            ScheduleKind.ONE_F_ONE_B,
            ScheduleKind.EAGER,
            ScheduleKind.KFKB,
        )

    @property
    def is_v(self) -> bool:
        """Return whether the pipeline turns round: each worker hosts one stage on the way down and
        one on the way back."""
        return self in (ScheduleKind.ZERO_BUBBLE_V, ScheduleKind.DUALPIPE_V)

    @property
    def is_chunked(self) -> bool:
        """Return whether a worker hosts several stages."""
        return self is ScheduleKind.INTERLEAVED or self.is_v

    @property
    def is_split(self) -> bool:
        """Return whether backwards are split into input and weight gradients."""
        return self is ScheduleKind.ZERO_BUBBLE or self.is_v


def worker_of(kind: ScheduleKind, stage: int, num_workers: int) -> int:
    """Return the worker that hosts a stage.

    >>> [worker_of(ScheduleKind.INTERLEAVED, stage, 2) for stage in range(4)]
    [0, 1, 0, 1]
    >>> [worker_of(ScheduleKind.ZERO_BUBBLE_V, stage, 2) for stage in range(4)]
    [0, 1, 1, 0]
    """
    return min(stage, 2 * num_workers - 1 - stage) if kind.is_v else stage % num_workers


@dataclass(frozen=True)
class Schedule:
    """A schedule, which holds the order of actions of each worker. A worker is a group of devices
    that hosts one stage, or several under some schedules (``worker_of``)."""

    kind: ScheduleKind
    num_stages: int
    num_micro_batches: int
    rows: tuple[tuple[Action, ...], ...]

    @property
    def num_workers(self) -> int:
        return len(self.rows)

    def worker_of(self, stage: int) -> int:
        return worker_of(self.kind, stage, self.num_workers)

    def __repr__(self) -> str:
        batches = counted(self.num_micro_batches, "micro-batch", "micro-batches")
        return f"{self.kind}: {counted(self.num_stages, 'stage')}, {batches}"

    def text(self) -> str:
        """Return one line per worker, with actions separated by spaces; ``parse_rows`` reads it
        back.

        >>> print(Schedule(ScheduleKind.GPIPE, 1, 1, ((Action(0, ActionKind.FORWARD, 0),),)).text())
        0F0
        """
        return "\n".join(" ".join(map(str, row)) for row in self.rows)


def parse_rows(text: str) -> tuple[tuple[Action, ...], ...]:
    """Return the rows of the text form of a schedule."""
    return tuple(
        tuple(Action.parse(word) for word in line.split())
        for line in text.splitlines()
        if line.strip()
    )
