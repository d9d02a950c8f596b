"""Test why a device was left out by adding it to the plan and simulating the result.

One device of each kind that a plan leaves out is tried in every way that changes nothing else: as a
further replica of each stage, and as a stage of its own between any two with some of their layers.

    (1)  best use  = the way of least iteration time that fits in memory
    (2)  cause     = the change that would improve (1) most: on each link to the device 100 times
                     the bandwidth of the widest of them more, or a device 100 times as fast;
                     memory, if a way that would pay does not fit

The search omitted the device because no plan with it was better (``solve.finalists.reasons`` states
that in one line); this test is made afterwards, by ``argosy explain``.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from argosy.cluster.device import Device
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.memory import USABLE
from argosy.cost.planned import planned_memory
from argosy.errors import ArgosyError
from argosy.explain.whatif import with_faster_devices, with_replica, with_wider_edges
from argosy.plan.check import check_plan
from argosy.plan.plan import Plan, Replica, Stage
from argosy.sim.simulate import iteration_seconds
from argosy.units import RATE, SIZE
from argosy.workload.chain import Chain

# The factor by which (2) improves a link or a device.
_MORE = 100.0
# A relative gain below this counts as none.
LEAST_GAIN = 5e-4
# Slower plans than this many times are described by the factor, others in percent.
_TIMES = 10.0
# The reason that is given if no use of a device passes the checker.
_OUT_OF_REACH = "there is no route to it, or no sample for it"


class Cause(StrEnum):
    """The reason why a plan does not use a device."""

    LOST = "lost"
    DTYPE = "dtype"
    MEMORY = "memory"
    LINK = "link"
    SPEED = "speed"
    NONE = "none"
    """Using the device would pay; the search did not try it."""
    UNUSABLE = "unusable"
    """No way to use the device passes the checker, because there is no route or no sample for it;
    or no way is tried, because the plan is interleaved."""


@dataclass(frozen=True, kw_only=True)
class LeftOutTest:
    """The result of adding a left-out device to the plan."""

    devices: tuple[str, ...]
    """All devices of its kind that the plan leaves out."""
    tried: str | None
    """The best use of the first of them (1); None if there is none."""
    gain: float
    """The relative gain of (1); negative if it slows the plan down."""
    missing: float
    """The bytes that are missing, if the cause is memory."""
    cause: Cause
    sentence: str


@dataclass(frozen=True)
class _Way:
    """A plan that uses the device, with its time and the memory that is missing."""

    what: str
    plan: Plan
    seconds: float
    missing: float


class LeftOutQuestions:
    """A plan on its cluster that is simulated with and without its left-out devices."""

    def __init__(self, plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> None:
        self.plan = plan
        self.chain = chain
        self.cluster = cluster
        self.model = model
        self.seconds = self._play(plan, cluster)

    def answers(self) -> Iterator[LeftOutTest]:
        """Yield one test for each kind of left-out device."""
        kinds: dict[tuple[str, float], list[Device]] = defaultdict(list)
        for left in self.plan.left_out:
            device = self.cluster.device(left.device)
            kinds[device.kind.name, device.efficiency].append(device)
        for devices in kinds.values():
            yield self._answer(devices)

    def _answer(self, devices: list[Device]) -> LeftOutTest:
        """Test the first of equal left-out devices."""
        device, names = devices[0], tuple(device.name for device in devices)
        if device.speed.at(0) == 0 or not self.model.can_run(self.chain, device):
            lost = device.speed.at(0) == 0
            sentence = (
                f"{device.name} is lost at time 0"
                if lost
                else f"{device.name} has no {self.chain.dtype}, because it is a {device.kind.name}"
            )
            cause = Cause.LOST if lost else Cause.DTYPE
            return LeftOutTest(
                devices=names, tried=None, gain=0.0, missing=0.0, cause=cause, sentence=sentence
            )
        ways = sorted(self._ways(device), key=lambda way: (way.seconds, way.what))
        fitting = [way for way in ways if not way.missing]
        best = fitting[0] if fitting else ways[0] if ways else None
        if best is None:
            has_chunks = self.plan.schedule.kind.is_chunked
            several = "the workers of the plan's schedule have several stages"
            why = several if has_chunks else _OUT_OF_REACH
            sentence = f"no stage can take {device.name}: {why}"
            return LeftOutTest(
                devices=names,
                tried=None,
                gain=0.0,
                missing=0.0,
                cause=Cause.UNUSABLE,
                sentence=sentence,
            )
        cause, why = self._cause(device, best, ways)
        chosen = next((way for way in ways if way.missing), best) if cause is Cause.MEMORY else best
        gain = self._gain(chosen.seconds)
        return LeftOutTest(
            devices=names,
            tried=chosen.what,
            gain=gain,
            missing=chosen.missing,
            cause=cause,
            sentence=f"with {device.name} as {chosen.what} the plan would be {_faster(gain)}{why}",
        )

    def _gain(self, seconds: float) -> float:
        """Return the relative gain of an iteration time over the plan's."""
        return self.seconds / seconds - 1

    def _cause(self, device: Device, best: _Way, ways: list[_Way]) -> tuple[Cause, str]:
        """Return the cause and a phrase that explains it (2)."""
        if not best.missing and self._gain(best.seconds) > LEAST_GAIN:
            return Cause.NONE, "; the search did not look there (try --level 2)"
        if ways[0].missing and self._gain(ways[0].seconds) > LEAST_GAIN:
            return Cause.MEMORY, f", but lacks {SIZE.short(ways[0].missing)} of memory"
        edges = {
            self.cluster.links[link].edge
            for used in self.plan.devices
            for source, target in ((device.name, used), (used, device.name))
            for route in self.cluster.routes(source, target)
            for link in route.links
        }
        links = [link for link in self.cluster.links if link.edge in edges]
        more = _MORE * max((link.bandwidth.at(0) for link in links), default=0.0)
        wider = self._gain(self._play(best.plan, with_wider_edges(self.cluster, edges, more)))
        faster = self._gain(
            self._play(best.plan, with_faster_devices(self.cluster, [device.name], _MORE))
        )
        if links and wider > faster:
            narrowest = min(links, key=lambda link: (link.bandwidth.at(0), link.edge)).edge
            rate = RATE.short(more)
            why = f"held back by the links to it, of which {narrowest} is the narrowest"
            result = f"with {rate} more on each, the plan would be {_faster(wider)}"
            return Cause.LINK, f"; it is {why}: {result}"
        result = f"with {_MORE:.0f} times that, the plan would be {_faster(faster)}"
        why = f"held back by its speed: {result}"
        return Cause.SPEED, f"; it is {why}"

    def _ways(self, device: Device) -> Iterator[_Way]:
        """Simulate every way to use a device that passes the checker."""
        for description, plan in self._plans(device.name):
            with contextlib.suppress(ArgosyError):  # no route there, or too few samples
                check_plan(plan, self.chain, self.cluster)
                seconds = self._play(plan, self.cluster)
                needs = planned_memory(plan, self.chain).items()
                room = {name: USABLE * self.cluster.device(name).kind.memory for name, _ in needs}
                missing = max(held - room[name] for name, held in needs)
                if seconds < math.inf:
                    yield _Way(description, plan, seconds, max(0.0, missing))

    def _plans(self, name: str) -> Iterator[tuple[str, Plan]]:
        """Yield the plans that use a device, each with a phrase that describes its use."""
        if self.plan.schedule.kind.is_chunked:
            return
        for index in range(len(self.plan.stages)):
            wider = with_replica(self.plan, index, (name,), self.chain, self.cluster, self.model)
            if wider is not None:
                yield f"a further replica of stage {index}", wider
        for index, stage in enumerate(self.plan.stages):
            for number in _powers(stage.end - stage.first - 1):
                for is_before in (True, False):
                    where = "before" if is_before else "after"
                    description = f"a stage {where} stage {index}, with {number} of its layers,"
                    yield description, self._with_stage(name, index, number, is_before)

    def _with_stage(self, name: str, index: int, number: int, is_before: bool) -> Plan:
        """Return the plan with a stage of one device that takes the first or last layers of
        another."""
        stage = self.plan.stages[index]
        alone = (Replica(devices=(name,), samples=self.plan.micro_batch_size),)
        cut = stage.first + number if is_before else stage.end - number
        own = Stage(
            first=stage.first if is_before else cut,
            end=cut if is_before else stage.end,
            replicas=alone,
            recompute=stage.recompute,
            offload=stage.offload,
        )
        rest = replace(stage, first=cut) if is_before else replace(stage, end=cut)
        pair = (own, rest) if is_before else (rest, own)
        stages = (*self.plan.stages[:index], *pair, *self.plan.stages[index + 1 :])
        collectives = tuple(
            replace(choice, stage=choice.stage + (choice.stage >= index + (not is_before)))
            for choice in self.plan.collectives
        )
        schedule = replace(self.plan.schedule, depth=None)
        return replace(
            self.plan,
            stages=stages,
            collectives=collectives,
            schedule=schedule,
            policy=(),
            left_out=(),
        )

    def _play(self, plan: Plan, cluster: Cluster) -> float:
        """Return the seconds of an iteration of a folded plan."""
        return iteration_seconds(plan, self.chain, cluster, self.model, whole=False)


def _powers(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... up to ``most``."""
    number = 1
    while number <= most:
        yield number
        number *= 2


def _faster(gain: float) -> str:
    """Return a relative gain as text.

    >>> _faster(0.02), _faster(-0.5), _faster(-0.98), _faster(0.0)
    ('2 % faster', '100 % slower', '50 times as slow', 'as fast')
    """
    if abs(gain) < LEAST_GAIN:
        return "as fast"
    if gain > 0:
        return f"{100 * gain:.3g} % faster"
    times = 1 / (1 + gain)
    if times > _TIMES:
        return f"{times:,.0f} times as slow"
    return f"{100 * (times - 1):.3g} % slower"
