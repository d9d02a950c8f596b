"""Estimate bandwidths and speeds from a job's own measurements, and detect when one of them
changes.

Every link and device has a level, which a ``Tracker`` follows through noisy samples. With x the
logarithm of a sample, m that of the level, and s the standard deviation of the noise:

    (1)  level   m += (x - m, at most s either way) / samples since the last change, counted up to
                 ``MEMORY``
    (2)  noise   s = median of |x - x of the sample before| over the last ``MEMORY`` / 0.954,
                 at least ``NOISE``
    (3)  up      = max(0, up + min(threshold / 2, CHANGE (x - m - CHANGE / 2) / s^2)),
                 and down with m - x for x - m
    (4)  change  when up or down reaches the threshold; the new level is the mean since that sum
                 was last 0

(3) is a CUSUM test: a sum of log-likelihood ratios of "the level has changed by a factor of
e^CHANGE" against "it has not". With Gaussian noise the probability that a sum reaches the threshold
within n samples of an unchanged level is at most n e^-threshold (Lorden 1971). So for q levels with
two sums each:

    (5)  threshold = log(2 q RUN_LENGTH); the probability of any false alarm within n steps is at
         most n / RUN_LENGTH
    (6)  delay     = 1 + threshold / min(threshold / 2, CHANGE (d - CHANGE / 2) / s^2) samples at
         most on average, for a change of the logarithm by d > CHANGE / 2

The later half of a step tells first that the present differs from the believed level. It has fewer
measurements than the whole step, so its noise has a second part:

    (7)  noise of later halves = sqrt(s^2 + (median of |x of the half - x of the step| / 0.674)^2)

If s is above ``NOISE`` and has to be estimated, false alarms are up to three times as frequent.
Changes so small that (6) exceeds ``MEMORY`` are followed by (1) instead. A single sample counts at
most half of the threshold: one outlier is never a change, two in a row may be. A level of 0 (a link
that is down, a device that is lost) is believed at once, because nothing else looks like it.

A link that nothing crosses any more, because it was slow, would be believed slow permanently: a
level without samples for ten steps returns to that of the cluster file, and the next time only
after twice as many. Beliefs come in steps of ``GRAIN`` and stay while the level is within CHANGE /
2 of them, so that worlds recur and predictions made for them can be reused.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace

# Average number of steps between two false alarms, over all links and devices of a cluster (5).
RUN_LENGTH = 10_000
# Natural logarithm of the smallest factor between two levels that the test is designed for: about
# 10 %.
CHANGE = 0.1
# Least standard deviation of the logarithm of a sample; used until samples allow an estimate.
NOISE = 0.05
# Number of samples over which noise and level are estimated.
MEMORY = 30
# Relative distance between two neighbouring values of a belief.
GRAIN = 0.02


@dataclass
class Evidence:
    """A sum of (3) that keeps the samples since it was last 0."""

    total: float = 0.0
    logarithms: list[float] = field(default_factory=list)

    def add(self, ratio: float, logarithm: float) -> None:
        """Add the log-likelihood ratio of one sample."""
        self.total = max(0.0, self.total + ratio)
        self.logarithms = [*self.logarithms, logarithm] if self.total else []


@dataclass
class Tracker:
    """A tracker that follows the level of one link or device (1) and tests whether it has changed
    (4)."""

    level: float
    threshold: float = math.log(2 * RUN_LENGTH)
    shown: float | None = None
    """The belief; None before the first one."""
    unseen: int = 0
    """Steps without a sample."""
    forget: int = 10
    """Number of steps without a sample after which the level is dropped."""
    count: int = 1
    """Number of samples since the last change; the initial level counts as one."""
    last: float | None = None
    """The logarithm of the last sample."""
    differences: list[float] = field(default_factory=list)
    halves: list[float] = field(default_factory=list)
    """Distances between the logarithms of a step's sample and of its later half's."""
    up: Evidence = field(default_factory=Evidence)
    down: Evidence = field(default_factory=Evidence)

    @property
    def noise(self) -> float:
        """Return the standard deviation of the logarithm of a sample (2)."""
        if not self.differences:
            return NOISE
        return max(NOISE, statistics.median(self.differences) / 0.954)

    def observe(self, value: float) -> int:
        """Process a sample; return for how many samples the level has been different, or 0 if it
        has not changed."""
        if value == 0:
            return self._restart([-math.inf]) if self.level > 0 else 0
        logarithm = math.log(value)
        up, down = self._ratios(logarithm, self.noise)
        self._follow(logarithm)
        if self.last is not None:
            self.differences = [*self.differences, abs(logarithm - self.last)][-MEMORY:]
        self.last = logarithm
        self.up.add(up, logarithm)
        self.down.add(down, logarithm)
        for evidence in (self.up, self.down):
            if evidence.total >= self.threshold:
                return self._restart(evidence.logarithms)
        return 0

    def is_at_odds_with(self, later: float) -> bool:
        """Return whether a second sample like this one, of a step's later half, would be a change
        (7)."""
        if later == 0 or self.level == 0:
            return later != self.level
        noise = math.hypot(self.noise, statistics.median(self.halves or [0.0]) / 0.674)
        return max(self._ratios(math.log(later), noise)) >= self.threshold / 2

    def compare_halves(self, later: float, whole: float) -> None:
        """Process the samples of a step and of its later half, which differ by noise (7)."""
        if later and whole:
            self.halves = [*self.halves, abs(math.log(later / whole))][-MEMORY:]

    @property
    def belief(self) -> float:
        """Return the level in steps of ``GRAIN``; the last one is kept while it is near enough."""
        if not self.shown or not self.level or abs(math.log(self.level / self.shown)) > CHANGE / 2:
            self.shown = in_grains(self.level)
        return self.shown

    def miss(self, nominal: float) -> bool:
        """Count a step without a sample; return whether the level was replaced by the nominal
        one."""
        self.unseen += 1
        if (
            self.unseen < self.forget
            or self.level == 0
            or abs(math.log(self.level / nominal)) <= CHANGE
        ):
            return False
        self.unseen, self.forget = 0, 2 * self.forget
        self._restart([math.log(nominal)])
        return True

    def _ratios(self, logarithm: float, noise: float) -> tuple[float, float]:
        """Return the log-likelihood ratios of one sample for a higher and for a lower level (3)."""
        above = logarithm - math.log(self.level) if self.level else math.inf
        scale = CHANGE / noise**2
        up, down = (scale * (distance - CHANGE / 2) for distance in (above, -above))
        return min(self.threshold / 2, up), min(self.threshold / 2, down)

    def _follow(self, logarithm: float) -> None:
        """Move the level towards a sample that is no change (1)."""
        if self.level:
            self.count = min(self.count + 1, MEMORY)
            distance = logarithm - math.log(self.level)
            self.level *= math.exp(max(-self.noise, min(self.noise, distance)) / self.count)

    def _restart(self, logarithms: Sequence[float]) -> int:
        """Set the level to the mean of the samples since the change."""
        self.level, self.count = math.exp(statistics.fmean(logarithms)), len(logarithms)
        self.up, self.down = Evidence(), Evidence()
        return len(logarithms)


@dataclass(frozen=True, kw_only=True)
class World:
    """A belief that a job has about its cluster; levels equal to those of the cluster file may be
    omitted."""

    bandwidths: tuple[tuple[str, float], ...] = ()
    """Bytes/s by link."""
    speeds: tuple[tuple[str, float], ...] = ()
    """Speed by device, relative to full speed; 0 = lost."""


def in_world(cluster: Cluster, world: World) -> Cluster:
    """Return the cluster as it is believed to be, without further changes."""
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
        replace(device, speed=Trace.constant(speeds.get(device.name, device.speed.at(0))))
        for device in cluster.devices
    )
    return replace(cluster, links=links, devices=devices)


class ClusterWatch:
    """A set of trackers that covers all links and devices of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        links = {link.name: link.bandwidth.at(0) for link in cluster.links}
        devices = {device.name: device.speed.at(0) for device in cluster.devices}
        self.nominal = links | devices
        threshold = math.log(2 * len(self.nominal) * RUN_LENGTH)
        self.links = {name: Tracker(level, threshold) for name, level in links.items()}
        self.devices = {name: Tracker(level, threshold) for name, level in devices.items()}
        self.world = self.latest = self.sampled = self._world({})
        """The believed world; the world with those samples of the latest step that contradict it;
        and the world with all of these samples."""

    def observe(
        self,
        bandwidths: Mapping[str, float],
        speeds: Mapping[str, float],
        last: Mapping[str, float] | None = None,
    ) -> dict[str, int]:
        """Process the samples of a step, and those of its later half alone; return the changed
        levels with the number of steps since each changed."""
        samples = {**bandwidths, **speeds}
        changed, contradicting, newest = {}, {}, {}
        for name, tracker in (*self.links.items(), *self.devices.items()):
            if name not in samples:
                if self.nominal[name] > 0 and tracker.miss(self.nominal[name]):
                    changed[name] = 0
                continue
            tracker.unseen = 0
            since = tracker.observe(samples[name])
            if since:
                changed[name] = since
            sample = (last or {}).get(name, samples[name])
            newest[name] = in_grains(sample)
            if tracker.is_at_odds_with(sample):
                contradicting[name] = newest[name]
            tracker.compare_halves(sample, samples[name])
        self.world, self.latest, self.sampled = (
            self._world(levels) for levels in ({}, contradicting, newest)
        )
        return changed

    def _world(self, levels: Mapping[str, float]) -> World:
        """Return the believed world with some levels replaced."""
        links = {name: levels.get(name, tracker.belief) for name, tracker in self.links.items()}
        devices = {name: levels.get(name, tracker.belief) for name, tracker in self.devices.items()}
        return World(bandwidths=tuple(sorted(links.items())), speeds=tuple(sorted(devices.items())))


def are_alike(first: World, second: World, grain: float) -> bool:
    """Return whether no level differs by more than a factor of 1 + ``grain``.

    Then the same plans are good in both worlds.

    >>> slow, slower, gone = (World(speeds=(("a", level),)) for level in (0.5, 0.45, 0.0))
    >>> are_alike(slow, slower, 0.25), are_alike(slow, slower, 0.05), are_alike(slow, gone, 0.25)
    (True, False, False)
    """
    return all(
        level <= other_level * (1 + grain) and other_level <= level * (1 + grain)
        for levels, others in ((first.bandwidths, second.bandwidths), (first.speeds, second.speeds))
        for (_, level), (_, other_level) in zip(levels, others, strict=True)
    )


def in_grains(level: float, grain: float = GRAIN) -> float:
    """Return the nearest power of 1 + ``grain``; 0 and 1 are returned unchanged.

    >>> in_grains(0.0), in_grains(1.0), round(in_grains(3.1e9) / 3.1e9, 1)
    (0.0, 1.0, 1.0)
    """
    return (
        math.exp(round(math.log(level) / math.log1p(grain)) * math.log1p(grain))
        if level > 0
        else 0.0
    )


def reason(news: Sequence[str]) -> str:
    """Return the reason of a decision: the changed levels, at most three by name."""
    more = f" and {len(news) - 3} more" if len(news) > 3 else ""
    return f"{', '.join(news[:3])}{more} changed" if news else "as believed now"
