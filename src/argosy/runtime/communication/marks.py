"""What a rank did and when, written down as it happens.

A mark costs two readings of a clock and an append. On a GPU, where work is only queued, computation
is marked by events on its stream, which are read after the step. Times are seconds of the rank's
own clock; ``measured`` aligns the ranks.

Ranks of a stage may exchange tensors while they compute: parts between members of a tensor-parallel
group, weights and gradients between replicas (ZeRO 2 and 3). Who is done first waits there for who
is not, so these seconds are summed up beside the mark of the computation: what is left of it is the
rank's own. On a GPU they are events on the same stream, which waits for a collective where its
result is used: there the two are told apart as on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
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
STEP = "step"
"""The mark of a whole step; all others are kinds of spans or of contacts."""

_CONTACTS = frozenset(ContactKind)
_COMPUTATION = frozenset(kind for kind in SpanKind if not kind.is_communication)


class Mark(NamedTuple):
    """One thing on this rank."""

    what: str
    """A kind of span or of contact, or ``STEP``."""
    stage: int | None
    micro_batch: int | None
    gradient: bool
    """Whether what is waited for or sent is one."""
    step: int
    start: float
    end: float
    together: float = 0.0
    """Seconds of it that were spent with other ranks of the stage, waiting for them included."""


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        recorder = self.recorder
        recorder.exchanges = None
        recorder.raw.append(
            (*self.key, recorder.step, self.begin, self.now(), self.exchanges or ())
        )


class _Exchanging:
    """A context inside a computation whose seconds are told apart from it."""

    __slots__ = ("begin", "exchanges", "now")

    def __init__(self, exchanges: list[tuple[Any, Any]], now: Any) -> None:
        self.exchanges = exchanges
        self.now = now

    def __enter__(self) -> None:
        self.begin = self.now()

    def __exit__(self, *error: object) -> None:
        self.exchanges.append((self.begin, self.now()))


class _Nothing:
    """A context in which nothing is written down."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


_NOTHING = _Nothing()

Exchanging = Callable[[], _Exchanging | _Nothing]
"""What a context is had from for every exchange with other ranks of a stage."""


def untold() -> _Nothing:
    """Exchanges that nobody asks about."""
    return _NOTHING


class Recorder:
    """The marks of one rank, of as many steps as are kept."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.enabled = True
        self.step = 0
        self.raw: list[Any] = []
        self.marks: list[Mark] = []
        self.exchanges: list[tuple[Any, Any]] | None = None
        """When those of the computation under way began and ended; None: nothing is computed."""
        self.contacts_on_device = False
        """Whether messages are waited for on the device's stream, as those of NCCL are, and not by
        the host."""
        self.now: Any = time.perf_counter if device.type == "cpu" else self._event

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _marking(
        self, what: str, stage: int | None, micro_batch: int | None, gradient: bool
    ) -> _Marking | _Nothing:
        if not self.enabled:
            return _NOTHING
        on_host = what in _CONTACTS and not self.contacts_on_device
        return _Marking(
            self, (what, stage, micro_batch, gradient), time.perf_counter if on_host else self.now
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
        """A message is here that room was offered for at ``posted``."""
        if self.enabled:
            gradient = action.kind is not ActionKind.FORWARD
            what = (ContactKind.RECEIVING, action.stage, action.micro_batch, gradient, self.step)
            now = self.now if self.contacts_on_device else time.perf_counter
            self.raw.append((*what, posted, now(), ()))

    def exchanging(self) -> _Exchanging | _Nothing:
        """Around what ranks of a stage do with each other, wherever that is; it counts inside a
        computation."""
        return _NOTHING if self.exchanges is None else _Exchanging(self.exchanges, self.now)

    def reducing(self) -> _Marking | _Nothing:
        return self._marking(SpanKind.COLLECTIVE, None, None, True)

    def updating(self) -> _Marking | _Nothing:
        return self._marking(SpanKind.UPDATE, None, None, False)

    def end_step(self, start: float) -> None:
        """After a step: turn events into times of the host's clock, and keep the step itself."""
        end = time.perf_counter()
        if self.enabled:
            clock: Any = float if self.device.type == "cpu" else self._event_clock()
            for *key, begin, finish, exchanges in self.raw:
                together = sum(clock(last) - clock(first) for first, last in exchanges)
                self.marks.append(Mark._make((*key, clock(begin), clock(finish), together)))
            self.marks.append(Mark(STEP, None, None, False, self.step, start, end))
        self.raw.clear()

    def _event_clock(self) -> Any:
        """Seconds of the host's clock at which an event of the device happened."""
        now = self._event()
        now.synchronize()
        host = time.perf_counter()
        return lambda read: read if isinstance(read, float) else host - read.elapsed_time(now) / 1e3
