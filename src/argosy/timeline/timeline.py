"""The timeline: spans (where, from when to when, what), and what they add up to.

The simulator and the runtime return the same type, so predicted against measured is a subtraction.
With T the time from the first start to the last end and D the devices in use:

    (1)  utilisation of a device = time it computes / T
    (2)  bubble fraction         = 1 - mean utilisation over D
    (3)  critical path           = from the last span to end, always to the span that it waited for
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
    """What a device or the network is busy with."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input-gradient"
    WEIGHT_GRADIENT = "weight-gradient"
    UPDATE = "update"
    TRANSFER = "transfer"
    COLLECTIVE = "collective"
    COPY = "copy"
    """Between a device and the memory or drive of its node."""

    @property
    def is_communication(self) -> bool:
        return self in (SpanKind.TRANSFER, SpanKind.COLLECTIVE, SpanKind.COPY)


class Span(NamedTuple):
    """One thing on one device, or between devices."""

    where: str
    """A device, or ``a0.0>v0.1`` for what crosses the network between two."""
    kind: SpanKind
    start: float
    """Seconds."""
    end: float
    stage: int | None = None
    micro_batch: int | None = None
    iteration: int = 0
    bytes: float = 0.0
    """Moved by a transfer or one flow of a collective."""
    via: tuple[str, ...] = ()
    """The links that these bytes crossed."""
    waited_for: int | None = None
    """Index of the span whose end let this one start."""
    together: float = 0.0
    """Of a measured computation: seconds of it spent exchanging tensors with other devices of the
    stage, waiting for them included."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def label(self) -> str:
        """``forward 3`` for micro-batch 3."""
        return str(self.kind) if self.micro_batch is None else f"{self.kind} {self.micro_batch}"

    def __repr__(self) -> str:
        return f"{self.label} on {self.where}, {self.start:.6g}..{self.end:.6g} s"


class ContactKind(StrEnum):
    """What a device's process does about messages."""

    WAITING = "waiting"
    """For one that it needs next; it does nothing else."""
    SENDING = "sending"
    """Handing one over; it leaves while the device computes on."""
    RECEIVING = "receiving"
    """From offering room for one until it is known to be there; mostly beside computation."""


class Contact(NamedTuple):
    """A measured device and a message."""

    where: str
    kind: ContactKind
    start: float
    """Seconds."""
    end: float
    stage: int
    micro_batch: int
    gradient: bool = False
    """Whether the message is one, on its way back."""
    iteration: int = 0


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """What a link carried from the first start to the last end."""

    link: str
    bytes: float
    utilisation: float
    """Bytes over what the link could have carried in that time."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One or more iterations of a plan."""

    clock: str
    """``simulated`` or ``measured``."""
    devices: tuple[str, ...]
    """The devices in use."""
    spans: tuple[Span, ...] = field(repr=False)
    iteration_ends: tuple[float, ...]
    """When each finished iteration was done on every device, seconds."""
    busy: tuple[float, ...]
    """Seconds each device computed, over all iterations, also those whose spans were not kept."""
    links: tuple[LinkUse, ...] = ()
    memory: tuple[tuple[str, tuple[tuple[float, float], ...]], ...] = ()
    """Per device, (seconds, bytes held from then on)."""
    contacts: tuple[Contact, ...] = field(default=(), repr=False)
    """Of a measured timeline: what the devices' processes did about messages."""
    stalled: str | None = None
    """Why it stopped before the last iteration, if it did."""
    repeated: int = 0
    """Iterations that were not played one by one, because they repeat others."""

    @cached_property
    def end(self) -> float:
        """Seconds from 0 to the last end that is known."""
        last_span = max((span.end for span in self.spans if math.isfinite(span.end)), default=0.0)
        return max([last_span, *self.iteration_ends])

    @cached_property
    def iteration_seconds(self) -> tuple[float, ...]:
        """How long each iteration took, from the end of the one before."""
        starts = (0.0, *self.iteration_ends)
        return tuple(end - start for start, end in zip(starts, self.iteration_ends, strict=False))

    @property
    def usual_seconds(self) -> float | None:
        """Of an iteration, the median; of measured ones without the first, which also prepares
        everything, where there are others. None where none was finished."""
        times = self.iteration_seconds
        settled = times[1:] or times if self.clock == "measured" else times
        return statistics.median(settled) if settled else None

    def utilisation(self) -> dict[str, float]:
        """(1) for every device."""
        return {
            device: seconds / self.end if self.end else 0.0
            for device, seconds in zip(self.devices, self.busy, strict=True)
        }

    @property
    def bubble_fraction(self) -> float:
        """(2)."""
        shares = self.utilisation().values()
        return 1 - sum(shares) / len(shares) if shares else 0.0

    def waiting(self) -> dict[str, float]:
        """Seconds that each device's process waited for messages; measured timelines know."""
        seconds = dict.fromkeys(self.devices, 0.0)
        for contact in self.contacts:
            if contact.kind is ContactKind.WAITING:
                seconds[contact.where] += contact.end - contact.start
        return seconds

    def peak_memory(self) -> dict[str, float]:
        """Most bytes each device held."""
        return {
            device: max((held for _, held in steps), default=0.0) for device, steps in self.memory
        }

    def critical_path(self) -> tuple[Span, ...]:
        """(3), first to last; empty without spans."""
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
        """Seconds of the critical path that each stage computes or takes part in collectives."""
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
        what = f"{counted(count, 'iteration')}{mean} on {counted(len(self.devices), 'device')}"
        text = f"Timeline ({self.clock}): {what}"
        return f"{text}, stalled: {self.stalled}" if self.stalled else text
