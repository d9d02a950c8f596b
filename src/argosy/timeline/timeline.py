"""Define the timeline: spans (where, from when to when, what), and the figures they add up to.

The simulator and the runtime return the same type, so a prediction and a measurement can be
subtracted. With T the time from the first start to the last end and D the devices in use:

    (1)  utilisation of a device = time it computes / T
    (2)  bubble fraction         = 1 - mean utilisation over D
    (3)  critical path           = from the span that ends last, always to the span it waited for
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from argosy.units import TIME, counted


class SpanKind(StrEnum):
    """A kind of work that a device or the network is busy with."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input-gradient"
    WEIGHT_GRADIENT = "weight-gradient"
    UPDATE = "update"
    TRANSFER = "transfer"
    COLLECTIVE = "collective"
    COPY = "copy"
    """Copies between a device and the memory or drive of its node."""

    @property
    def is_communication(self) -> bool:
        return self in (SpanKind.TRANSFER, SpanKind.COLLECTIVE, SpanKind.COPY)


class Span(NamedTuple):
    """A stretch of time that a device, or a pair of devices, spent on one piece of work."""

    where: str
    """A device, or ``a0.0>v0.1`` for a transfer between two."""
    kind: SpanKind
    start: float
    """Seconds."""
    end: float
    """Seconds."""
    stage: int | None = None
    micro_batch: int | None = None
    iteration: int = 0
    bytes: float = 0.0
    """Bytes moved by a transfer or by one flow of a collective."""
    via: tuple[str, ...] = ()
    """Links that these bytes crossed."""
    waited_for: int | None = None
    """Index of the span whose end let this one start."""
    together: float = 0.0
    """Seconds of a measured computation that went into exchanging tensors with other devices of the
    stage, including waiting for them."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def label(self) -> str:
        """Return the kind and the micro-batch, such as ``forward 3``."""
        return str(self.kind) if self.micro_batch is None else f"{self.kind} {self.micro_batch}"

    def __repr__(self) -> str:
        return f"{self.label} on {self.where}, {self.start:.6g}..{self.end:.6g} s"


class ContactKind(StrEnum):
    """A kind of activity that a device's process carries out for messages."""

    WAITING = "waiting"
    """Waits for a message that it needs next, and does nothing else."""
    SENDING = "sending"
    """Hands a message over; the message leaves while the device computes on."""
    RECEIVING = "receiving"
    """Has posted a receive that is not known to be complete; mostly beside computation."""


class Contact(NamedTuple):
    """A stretch of time that a process of a measured run spent on one message."""

    where: str
    kind: ContactKind
    start: float
    """Seconds."""
    end: float
    """Seconds."""
    stage: int
    micro_batch: int
    gradient: bool = False
    """Whether the message is a gradient on its way back."""
    iteration: int = 0


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """A record of the bytes that a link carried from the first start to the last end."""

    link: str
    bytes: float
    utilisation: float
    """Bytes carried over the bytes that the link could have carried in that time."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A record that covers one or more iterations of a plan."""

    clock: str
    """``simulated`` or ``measured``."""
    devices: tuple[str, ...]
    """Names of the devices in use."""
    spans: tuple[Span, ...] = field(repr=False)
    iteration_ends: tuple[float, ...]
    """Seconds at which each finished iteration was done on every device."""
    busy: tuple[float, ...]
    """Seconds that each device computed, over all iterations, including those whose spans were not
    kept."""
    links: tuple[LinkUse, ...] = ()
    memory: tuple[tuple[str, tuple[tuple[float, float], ...]], ...] = ()
    """Per device, pairs of seconds and the bytes held from then on."""
    contacts: tuple[Contact, ...] = field(default=(), repr=False)
    """Time that the devices' processes spent on messages; only in measured timelines."""
    stalled: str | None = None
    """Reason why the timeline stops before the last iteration; None if it does not."""
    repeated: int = 0
    """Number of iterations that were not simulated one by one, because they repeat others."""

    @cached_property
    def end(self) -> float:
        """Return the seconds from 0 to the last known end."""
        last_span = max((span.end for span in self.spans if math.isfinite(span.end)), default=0.0)
        return max([last_span, *self.iteration_ends])

    @cached_property
    def iteration_seconds(self) -> tuple[float, ...]:
        """Return the seconds of each iteration, from the end of the one before."""
        starts = (0.0, *self.iteration_ends)
        return tuple(end - start for start, end in zip(starts, self.iteration_ends, strict=False))

    @property
    def usual_seconds(self) -> float | None:
        """Return the median seconds of an iteration; None if none was finished.

        A measured timeline does not count its first iteration, which includes set-up, unless it is
        the only one.
        """
        times = self.iteration_seconds
        settled = times[1:] or times if self.clock == "measured" else times
        return statistics.median(settled) if settled else None

    def utilisation(self) -> dict[str, float]:
        """Return the utilisation (1) of every device."""
        return {
            device: seconds / self.end if self.end else 0.0
            for device, seconds in zip(self.devices, self.busy, strict=True)
        }

    @property
    def bubble_fraction(self) -> float:
        """Return the bubble fraction (2)."""
        shares = self.utilisation().values()
        return 1 - sum(shares) / len(shares) if shares else 0.0

    def waiting(self) -> dict[str, float]:
        """Return the seconds that each device's process waited for messages; 0 in simulated
        timelines."""
        seconds = dict.fromkeys(self.devices, 0.0)
        for contact in self.contacts:
            if contact.kind is ContactKind.WAITING:
                seconds[contact.where] += contact.end - contact.start
        return seconds

    def peak_memory(self) -> dict[str, float]:
        """Return the largest number of bytes that each device held."""
        return {
            device: max((held for _, held in steps), default=0.0) for device, steps in self.memory
        }

    def critical_path(self) -> tuple[Span, ...]:
        """Return the spans of the critical path (3), first to last; empty without spans."""
        finished = [index for index, span in enumerate(self.spans) if math.isfinite(span.end)]
        if not finished:
            return ()
        at: int | None = max(finished, key=lambda index: (self.spans[index].end, -index))
        path = []
        while at is not None:
            path.append(self.spans[at])
            at = self.spans[at].waited_for
        return tuple(reversed(path))

    def critical_seconds(self) -> dict[int, float]:
        """Return the seconds of the critical path that each stage computes or takes part in
        collectives."""
        seconds: dict[int, float] = {}
        clock = 0.0
        for span in self.critical_path():
            if span.stage is not None and span.kind not in (SpanKind.TRANSFER, SpanKind.COPY):
                more = span.end - max(span.start, min(clock, span.end))
                seconds[span.stage] = seconds.get(span.stage, 0.0) + more
            clock = span.end
        return seconds

    def __repr__(self) -> str:
        count = len(self.iteration_ends)
        mean = f" of {TIME.format(self.iteration_ends[-1] / count)}" if count else ""
        summary = f"{counted(count, 'iteration')}{mean} on {counted(len(self.devices), 'device')}"
        text = f"Timeline ({self.clock}): {summary}"
        return f"{text}, stalled: {self.stalled}" if self.stalled else text
