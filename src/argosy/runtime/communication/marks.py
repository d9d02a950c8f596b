"""Record what a rank does and when.

A mark costs two readings of a clock and an append. On a GPU, which only queues work, computation is
marked by events on its stream, which are read after the step. Times are seconds of the rank's own
clock; ``measured`` aligns the ranks.

Ranks of a stage may exchange tensors while they compute: parts between members of a tensor-parallel
group, weights and gradients between replicas (ZeRO 2 and 3). The first to finish waits for the
others there, so these seconds are summed separately beside the mark of the computation; the rest of
the mark is the rank's own. On a GPU they are events on the same stream, which waits for a
collective before its result is used, so the two are separated as on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from argosy.schedule import Action, ActionKind
from argosy.timeline import ContactKind, SpanKind

SPAN_KIND = {
    ActionKind.FORWARD: SpanKind.FORWARD,
    ActionKind.BACKWARD: SpanKind.BACKWARD,
    ActionKind.INPUT_GRADIENT: SpanKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT: SpanKind.WEIGHT_GRADIENT,
}
"""The kind of span that an action is recorded as."""
STEP = "step"
"""The kind of the mark of a whole step; all others are kinds of spans or of contacts."""

_CONTACTS = frozenset(ContactKind)
_COMPUTATION = frozenset(kind for kind in SpanKind if not kind.is_communication)
"""Kinds of spans in which a rank computes."""


class Mark(NamedTuple):
    """A record of one thing that this rank did."""

    what: str
    """A kind of span or of contact, or ``STEP``."""
    stage: int | None
    micro_batch: int | None
    gradient: bool
    """True if the message that is sent or awaited carries a gradient."""
    step: int
    start: float
    end: float
    together: float = 0.0
    """Seconds of it that were spent exchanging with other ranks of the stage, including waiting."""


class _Marking:
    """A context that appends a mark when it is left."""

    __slots__ = ("begin", "exchanges", "key", "now", "recorder")

    def __init__(
        self, recorder: Recorder, key: tuple[str, int | None, int | None, bool], now: Any
    ) -> None:
        self.recorder = recorder
        self.key = key
        self.now = now
        self.exchanges: list[tuple[Any, Any]] | None = [] if key[0] in _COMPUTATION else None

    def __enter__(self) -> None:
        self.recorder.exchanges = self.exchanges
        self.begin = self.now()

    def __exit__(self, *error: object) -> None:
        recorder = self.recorder
        recorder.exchanges = None
        recorder.raw.append(
            (*self.key, recorder.step, self.begin, self.now(), self.exchanges or ())
        )


class _Exchanging:
    """A context inside a computation whose seconds are recorded separately."""

    __slots__ = ("begin", "exchanges", "now")

    def __init__(self, exchanges: list[tuple[Any, Any]], now: Any) -> None:
        self.exchanges = exchanges
        self.now = now

    def __enter__(self) -> None:
        self.begin = self.now()

    def __exit__(self, *error: object) -> None:
        self.exchanges.append((self.begin, self.now()))


class _Nothing:
    """A context that records nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


_NOTHING = _Nothing()

Exchanging = Callable[[], _Exchanging | _Nothing]
"""A function that returns a context for every exchange with other ranks of a stage."""


def untold() -> _Nothing:
    """Return a context that does not record an exchange."""
    return _NOTHING


class Recorder:
    """The marks that one rank records, for the steps that are kept."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.enabled = True
        self.step = 0
        self.raw: list[Any] = []
        self.marks: list[Mark] = []
        self.exchanges: list[tuple[Any, Any]] | None = None
        """Begin and end of the exchanges in the current computation; None outside of
        computations."""
        self.contacts_on_device = False
        """True if the device's stream waits for messages, as with NCCL, instead of the host."""
        self.now: Any = time.perf_counter if device.type == "cpu" else self._event

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _marking(
        self, name: str, stage: int | None, micro_batch: int | None, gradient: bool
    ) -> _Marking | _Nothing:
        if not self.enabled:
            return _NOTHING
        on_host = name in _CONTACTS and not self.contacts_on_device
        return _Marking(
            self, (name, stage, micro_batch, gradient), time.perf_counter if on_host else self.now
        )

    def computing(self, action: Action) -> _Marking | _Nothing:
        return self._marking(SPAN_KIND[action.kind], action.stage, action.micro_batch, False)

    def waiting(self, action: Action) -> _Marking | _Nothing:
        return self._marking(
            ContactKind.WAITING,
            action.stage,
            action.micro_batch,
            action.kind is not ActionKind.FORWARD,
        )

    def sending(self, stage: int, micro_batch: int, *, gradient: bool) -> _Marking | _Nothing:
        return self._marking(ContactKind.SENDING, stage, micro_batch, gradient)

    def received(self, action: Action, posted: float) -> None:
        """Record that a message has arrived for which a receive was posted at ``posted``."""
        if self.enabled:
            gradient = action.kind is not ActionKind.FORWARD
            contact = (ContactKind.RECEIVING, action.stage, action.micro_batch, gradient, self.step)
            now = self.now if self.contacts_on_device else time.perf_counter
            self.raw.append((*contact, posted, now(), ()))

    def exchanging(self) -> _Exchanging | _Nothing:
        """Return a context for an exchange between ranks of a stage; it is recorded only inside a
        computation."""
        return _NOTHING if self.exchanges is None else _Exchanging(self.exchanges, self.now)

    def reducing(self) -> _Marking | _Nothing:
        return self._marking(SpanKind.COLLECTIVE, None, None, True)

    def updating(self) -> _Marking | _Nothing:
        return self._marking(SpanKind.UPDATE, None, None, False)

    def end_step(self, start: float) -> None:
        """Turn the events of a step into times of the host's clock, and record the step itself."""
        end = time.perf_counter()
        if self.enabled:
            clock: Any = float if self.device.type == "cpu" else self._event_clock()
            for *key, begin, finish, exchanges in self.raw:
                together = sum(clock(last) - clock(first) for first, last in exchanges)
                self.marks.append(Mark._make((*key, clock(begin), clock(finish), together)))
            self.marks.append(Mark(STEP, None, None, False, self.step, start, end))
        self.raw.clear()

    def _event_clock(self) -> Any:
        """Return a function that converts an event of the device to seconds of the host's clock."""
        now = self._event()
        now.synchronize()
        host = time.perf_counter()
        return lambda read: read if isinstance(read, float) else host - read.elapsed_time(now) / 1e3
