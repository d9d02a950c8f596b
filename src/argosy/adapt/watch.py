"""What changed? Estimates of bandwidths and speeds from what a job measures of itself anyway.

A ``Tracker`` follows one level through noisy samples:

    (1)  level  = median of the last samples since the last change
    (2)  change = the last ``CONFIRM`` samples lie beyond the tolerance on the same side of the level

One odd sample never moves it (not nervous), and a change is believed after two steps (not blind). A level of 0
(a link that is down, a device that is lost) is believed at once: nothing else looks like it.
A link that nothing crosses any more, because it was slow, would be believed slow for ever: what was not seen for
ten steps is believed to be as the cluster file says again, and the next time only after twice as many.
What is believed comes in steps of 2 % and stays where it is while the level is within 5 % of it, so that worlds recur
and what was predicted in them is remembered.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace

TOLERANCE = 0.15
GRAIN = 0.02
STAYS = 0.05
CONFIRM = 2
_WINDOW = 9


@dataclass
class Tracker:
    """(1) and (2) for one quantity."""

    level: float
    shown: float | None = None
    """What is believed; None: nothing yet."""
    unseen: int = 0
    """Steps without a sample."""
    forget: int = 10
    """Steps without one after which the level is given up."""
    recent: list[float] = field(default_factory=list)
    suspects: list[float] = field(default_factory=list)

    def observe(self, value: float) -> bool:
        """Take a sample; whether a change was found."""
        if value == 0 and self.level > 0:
            return self._jump([0.0])
        if self.level > 0 and abs(value / self.level - 1) <= TOLERANCE:
            self.suspects.clear()
            self.recent = [*self.recent, value][-_WINDOW:]
            self.level = statistics.median(self.recent)
            return False
        if self.suspects and (self.suspects[-1] > self.level) != (value > self.level):
            self.suspects.clear()
        self.suspects.append(value)
        return len(self.suspects) >= CONFIRM and self._jump(self.suspects)

    @property
    def belief(self) -> float:
        """The level in steps of ``GRAIN``, kept while it is near enough."""
        if not self.shown or abs(self.level / self.shown - 1) > STAYS:
            self.shown = in_grains(self.level)
        return self.shown

    def miss(self, nominal: float) -> bool:
        """A step without a sample; whether the level was given up for the nominal one."""
        self.unseen += 1
        if self.unseen < self.forget or self.level == 0 or abs(self.level / nominal - 1) <= TOLERANCE:
            return False
        self.unseen, self.forget = 0, 2 * self.forget
        self.recent, self.suspects, self.level = [], [], nominal
        return True

    def _jump(self, samples: list[float]) -> bool:
        self.recent, self.suspects = [*samples], []
        self.level = statistics.median(samples)
        return True


@dataclass(frozen=True, kw_only=True)
class World:
    """What a job believes of its cluster: only what differs from the cluster file need be there."""

    bandwidths: tuple[tuple[str, float], ...] = ()
    """Bytes/s by link."""
    speeds: tuple[tuple[str, float], ...] = ()
    """By device, relative to full speed; 0 = lost."""


def in_world(cluster: Cluster, world: World) -> Cluster:
    """The cluster as it is believed to be, for ever."""
    rates, speeds = dict(world.bandwidths), dict(world.speeds)
    links = tuple(
        replace(
            link,
            bandwidth=Trace.constant(rates.get(link.name, link.bandwidth.at(0))),
            latency=Trace.constant(link.latency.at(0)),
        )
        for link in cluster.links
    )
    devices = tuple(
        replace(device, speed=Trace.constant(speeds.get(device.name, device.speed.at(0)))) for device in cluster.devices
    )
    return replace(cluster, links=links, devices=devices)


class Watch:
    """Trackers for every link and device that something was measured of."""

    def __init__(self, cluster: Cluster) -> None:
        self.links = {link.name: Tracker(link.bandwidth.at(0)) for link in cluster.links}
        self.devices = {device.name: Tracker(device.speed.at(0)) for device in cluster.devices}
        self.nominal = {name: tracker.level for name, tracker in (*self.links.items(), *self.devices.items())}

    def observe(self, bandwidths: Mapping[str, float], speeds: Mapping[str, float]) -> tuple[str, ...]:
        """Take what a step measured; the names of what has changed."""
        changed = [*_observed(self.links, bandwidths), *_observed(self.devices, speeds)]
        for name, tracker in (*self.links.items(), *self.devices.items()):
            if name in bandwidths or name in speeds:
                tracker.unseen = 0
            elif self.nominal[name] > 0 and tracker.miss(self.nominal[name]):
                changed.append(name)
        return tuple(changed)

    @property
    def is_calm(self) -> bool:
        """Whether nothing that was measured last is in doubt."""
        return not any(tracker.suspects for tracker in (*self.links.values(), *self.devices.values()))

    @property
    def world(self) -> World:
        return World(
            bandwidths=tuple(sorted((name, tracker.belief) for name, tracker in self.links.items())),
            speeds=tuple(sorted((name, tracker.belief) for name, tracker in self.devices.items())),
        )


def seen_world(bandwidths: Mapping[str, float], speeds: Mapping[str, float]) -> World:
    """Levels in steps of ``GRAIN``."""
    return World(
        bandwidths=tuple(sorted((name, in_grains(level)) for name, level in bandwidths.items())),
        speeds=tuple(sorted((name, in_grains(level)) for name, level in speeds.items())),
    )


def are_alike(one: World, other: World, grain: float) -> bool:
    """Whether no level differs by more than a factor of 1 + ``grain``: then the same plans are good.

    >>> slow, slower = (World(speeds=(("a", level),)) for level in (0.5, 0.45))
    >>> are_alike(slow, slower, 0.25), are_alike(slow, slower, 0.05), are_alike(slow, World(speeds=(("a", 0.0),)), 0.25)
    (True, False, False)
    """
    return all(
        mine <= theirs * (1 + grain) and theirs <= mine * (1 + grain)
        for levels, others in ((one.bandwidths, other.bandwidths), (one.speeds, other.speeds))
        for (_, mine), (_, theirs) in zip(levels, others, strict=True)
    )


def in_grains(level: float, grain: float = GRAIN) -> float:
    """The nearest power of 1 + ``grain``; 0 and 1 stay.

    >>> in_grains(0.0), in_grains(1.0), round(in_grains(3.1e9) / 3.1e9, 1)
    (0.0, 1.0, 1.0)
    """
    return math.exp(round(math.log(level) / math.log1p(grain)) * math.log1p(grain)) if level > 0 else 0.0


def _observed(trackers: Mapping[str, Tracker], samples: Mapping[str, float]) -> Iterable[str]:
    return [name for name, value in samples.items() if name in trackers and trackers[name].observe(value)]


def reason(news: Sequence[str]) -> str:
    """Why something is decided: what has changed, three by name."""
    more = f" and {len(news) - 3} more" if len(news) > 3 else ""
    return f"{', '.join(news[:3])}{more} changed" if news else "as believed now"
