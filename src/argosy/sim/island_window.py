"""Some steps of islands as one timeline: what every device computes, and what islands exchange
meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from argosy.cluster.topology import Cluster
from argosy.plan.islands import IslandPlan
from argosy.timeline import LinkUse, Span, Timeline

_AROUND = 2
"""Steps before an exchange, and after its result is used, that are shown."""
_MOST_STEPS = 24
"""Of a window around an exchange."""


@dataclass(kw_only=True)
class IslandWindow:
    """Collects the spans of steps ``first`` to ``end`` - 1 while islands are played."""

    first: int
    end: int
    """One past the last step."""
    spans: list[Span] = field(default_factory=list)
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, float] = field(default_factory=dict)
    """By step, when the last island had done it."""

    @classmethod
    def around_exchange(cls, plan: IslandPlan) -> IslandWindow:
        """The steps around the first exchange, up to the use of its result if that is soon."""
        first = max(0, plan.period - _AROUND)
        before_next = max(2 * plan.period - 1, plan.period + 1)
        return cls(
            first=first,
            end=min(plan.period + plan.overlap + _AROUND, first + _MOST_STEPS, before_next),
        )

    def num_recorded(self, done: int, count: int) -> int:
        """How many of ``count`` steps after ``done`` ones must be recorded; 0 if none is in the
        window."""
        return max(0, min(self.end - done, count)) if done + count > self.first else 0

    def add_steps(self, played: Timeline, begin: float, done: int, first_stage: int) -> None:
        """Take over steps of an island, played from ``begin`` on after ``done`` others."""
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
        """Whether an exchange after so many steps is in the window."""
        return self.first < step <= self.end

    def add_exchange(self, played: Timeline, begin: float, step: int) -> None:
        """Take over an exchange that began after so many steps."""
        moved = (_moved(span, begin) for span in played.spans if span.kind.is_communication)
        self.spans += [span._replace(iteration=step - 1, waited_for=None) for span in moved]

    @property
    def start(self) -> float:
        """When the first span begins; seconds since islands began."""
        return min((span.start for span in self.spans), default=0.0)

    def timeline(self, plan: IslandPlan, cluster: Cluster) -> Timeline:
        """What was collected; its time 0 is ``start``."""
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
        """What links carried from the first start to the last end."""
        carried: dict[str, float] = defaultdict(float)
        for span in self.spans:
            for name in span.via:
                carried[name] += span.bytes
        start, end = self.start, max((span.end for span in self.spans), default=0.0)
        for link in cluster.links:
            if carried[link.name]:
                could = link.bandwidth.mean(start, end) * (end - start)
                share = carried[link.name] / could if could else 0.0
                yield LinkUse(link=link.name, bytes=carried[link.name], utilisation=share)


def _moved(span: Span, seconds: float) -> Span:
    return span._replace(start=span.start + seconds, end=span.end + seconds)
