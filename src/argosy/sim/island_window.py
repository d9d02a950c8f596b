"""Record some steps of islands as one timeline: the computation of devices and the exchanges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from argosy.cluster.topology import Cluster
from argosy.plan.islands import IslandPlan
from argosy.timeline import LinkUse, Span, Timeline

# Steps that are shown before an exchange, and again after its result is used.
_AROUND = 2
# The largest number of steps of a window around an exchange.
_MOST_STEPS = 24


@dataclass(kw_only=True)
class IslandWindow:
    """A recorder that collects the spans of steps ``first`` to ``end`` - 1 while islands are
    simulated."""

    first: int
    end: int
    """One past the last step."""
    spans: list[Span] = field(default_factory=list)
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, float] = field(default_factory=dict)
    """By step, the time in seconds at which the last island has finished it."""

    @classmethod
    def around_exchange(cls, plan: IslandPlan) -> IslandWindow:
        """Build the window around the first exchange, up to the use of its result if that is
        soon."""
        first = max(0, plan.period - _AROUND)
        before_next = max(2 * plan.period - 1, plan.period + 1)
        return cls(
            first=first,
            end=min(plan.period + plan.overlap + _AROUND, first + _MOST_STEPS, before_next),
        )

    def num_recorded(self, done: int, count: int) -> int:
        """Return how many of the ``count`` steps that follow ``done`` steps must be recorded."""
        return max(0, min(self.end - done, count)) if done + count > self.first else 0

    def add_steps(self, played: Timeline, begin: float, done: int, first_stage: int) -> None:
        """Add steps of an island that begin at ``begin`` seconds, after ``done`` other steps."""
        place: dict[int, int] = {}
        for at, span in enumerate(played.spans):
            step = done + span.iteration
            if self.first <= step < self.end:
                place[at] = len(self.spans)
                cause = None if span.waited_for is None else place.get(span.waited_for)
                stage = None if span.stage is None else span.stage + first_stage
                self.spans.append(
                    _moved(span, begin)._replace(iteration=step, waited_for=cause, stage=stage)
                )
        for step, end in enumerate(played.iteration_ends, start=done):
            if self.first <= step < self.end:
                self.ends[step] = max(self.ends.get(step, 0.0), begin + end)
        for device, held in played.memory:
            self.memory[device] += [(begin + when, amount) for when, amount in held]

    def has_exchange(self, step: int) -> bool:
        """Return whether the exchange after ``step`` steps is in the window."""
        return self.first < step <= self.end

    def add_exchange(self, played: Timeline, begin: float, step: int) -> None:
        """Add an exchange that began at ``begin`` seconds, after ``step`` steps."""
        moved = (_moved(span, begin) for span in played.spans if span.kind.is_communication)
        self.spans += [span._replace(iteration=step - 1, waited_for=None) for span in moved]

    @property
    def start(self) -> float:
        """Return when the first span begins, in seconds since the islands began."""
        return min((span.start for span in self.spans), default=0.0)

    def timeline(self, plan: IslandPlan, cluster: Cluster) -> Timeline:
        """Return what was collected as a timeline whose time 0 is ``start``."""
        start = self.start
        spans = tuple(_moved(span, -start) for span in self.spans)
        devices = tuple(name for island in plan.islands for name in island.devices)
        busy: dict[str, float] = defaultdict(float)
        for span in spans:
            if not span.kind.is_communication:
                busy[span.where] += span.seconds
        memory = tuple(
            (name, tuple((when - start, held) for when, held in self.memory[name] if when >= start))
            for name in devices
            if name in self.memory
        )
        return Timeline(
            clock="simulated",
            devices=devices,
            spans=spans,
            iteration_ends=tuple(self.ends[step] - start for step in sorted(self.ends)),
            busy=tuple(busy[name] for name in devices),
            links=tuple(self._links(cluster)),
            memory=memory,
        )

    def _links(self, cluster: Cluster) -> Iterator[LinkUse]:
        """Yield the use of every link that carried bytes, from the first start to the last end."""
        carried: dict[str, float] = defaultdict(float)
        for span in self.spans:
            for name in span.via:
                carried[name] += span.bytes
        start, end = self.start, max((span.end for span in self.spans), default=0.0)
        for link in cluster.links:
            if carried[link.name]:
                capacity = link.bandwidth.mean(start, end) * (end - start)
                share = carried[link.name] / capacity if capacity else 0.0
                yield LinkUse(link=link.name, bytes=carried[link.name], utilisation=share)


def _moved(span: Span, seconds: float) -> Span:
    """Return a span that is shifted by a number of seconds."""
    return span._replace(start=span.start + seconds, end=span.end + seconds)
