"""What it costs to go from one plan to another: bytes of state that change hands, over the links as they are then.

A device holds an interval of each layer's weights and one of its optimizer state: its part of a tensor-parallel group,
of that its part among the stage's holders where ZeRO shares it out (state from level 1 on, weights at level 3).

    (1)  a device receives what it holds under the new plan and did not under the old one
    (2)  from a device that held it: of several, of its own node, then from whoever sends the fewest bytes yet; where
         none of them can be reached, from whoever can, as copies and checkpoints are there for
    (3)  seconds = the longest that any link takes for the bytes that cross it, and ``PAUSE`` for the switch itself

Gradients do not move: plans change between steps. Experts count as if every holder had all of them, and of weights that
layers share only those that the first of them holds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from argosy.cluster.topology import Cluster
from argosy.cost.memory import optimizer_bytes
from argosy.plan.plan import Plan, Stage
from argosy.workload.chain import Chain

PAUSE = 0.5
"""Seconds that a switch takes beside its bytes: groups are formed anew."""

Number = TypeVar("Number", int, float)
Interval = tuple[float, float]
"""Begin and end, as parts of a layer."""
_ROUNDING = 1e-9


class _Kept(NamedTuple):
    """What a device keeps of a layer."""

    weights: Interval
    state: Interval


_Held = dict[int, dict[str, _Kept]]
"""By layer and device."""


@dataclass(frozen=True, kw_only=True)
class Migration:
    """(1) and (2)."""

    transfers: tuple[tuple[str, str, float], ...]
    """Source, target, bytes; at most one for each pair."""

    @cached_property
    def received(self) -> dict[str, float]:
        """Bytes by device."""
        amounts: dict[str, float] = defaultdict(float)
        for _, target, size in self.transfers:
            amounts[target] += size
        return dict(amounts)

    @property
    def bytes(self) -> float:
        return sum(self.received.values())

    def seconds(self, cluster: Cluster, time: float = 0.0) -> float:
        """(3), at the bandwidths of a moment; infinity while a link that is needed is down, 0 where nothing moves."""
        crossing: dict[int, float] = defaultdict(float)
        for source, target, size in self.transfers:
            for link in cluster.fastest(source, target, size, time).links:
                crossing[link] += size
        rates = {link: cluster.links[link].bandwidth.at(time) for link in crossing}
        times = [size / rates[link] if rates[link] else math.inf for link, size in crossing.items()]
        return max(times) + PAUSE if times else 0.0


def migration(old: Plan, new: Plan, chain: Chain, cluster: Cluster, time: float = 0.0) -> Migration:
    """What has to move when one plan follows another at a moment."""
    before, sources = _held(old), _Sources(old, cluster, time)
    widths = (chain.dtype.bytes, optimizer_bytes(chain))
    for layer, kept in _held(new).items():
        had = before.get(layer, {})
        for device, wanted in kept.items():
            own = had.get(device, _Kept((0.0, 0.0), (0.0, 0.0)))
            for kind, width in enumerate(widths):
                holders = {name: one[kind] for name, one in had.items()}
                for begin, end in missing(wanted[kind], own[kind]):
                    sources.deliver(device, (begin, end), holders, width * chain.layers[layer].parameters)
    transfers = [(*pair, size) for pair, size in sources.sent.items() if size > 0]
    return Migration(transfers=tuple(sorted(transfers)))


class _Sources:
    """(2)."""

    def __init__(self, plan: Plan, cluster: Cluster, time: float) -> None:
        self.cluster, self.time, self.devices = cluster, time, plan.devices
        self.sent: dict[tuple[str, str], float] = defaultdict(float)
        self.totals: dict[str, float] = defaultdict(float)

    def deliver(self, target: str, wanted: Interval, holders: Mapping[str, Interval], whole: float) -> None:
        """``whole``: bytes of the interval from 0 to 1."""
        begin, end = wanted
        while end - begin > _ROUNDING:
            there = [name for name, (first, last) in holders.items() if first <= begin + _ROUNDING < last]
            source = self._of(there, target)
            last = min(end, holders[source][1]) if source in there else end
            if source is not None:
                self.sent[source, target] += (last - begin) * whole
                self.totals[source] += (last - begin) * whole
            begin = last

    def _of(self, holders: list[str], target: str) -> str | None:
        """None: the plan had no other device."""
        others = [name for name in self.devices if name != target]
        node = self.cluster.node_of
        for names in (holders, others):
            found = [name for name in names if self._reaches(name, target)]
            if found:
                return min(found, key=lambda one: (node[one][0].name != node[target][0].name, self.totals[one], one))
        return next(iter((*holders, *others)), None)

    def _reaches(self, source: str, target: str) -> bool:
        return self.cluster.bandwidth_at(self.cluster.fastest(source, target, 1e6, self.time), self.time) > 0


def _held(plan: Plan) -> _Held:
    held: _Held = defaultdict(dict)
    for stage in plan.stages:
        for device, kept in _kept(stage):
            for layer in range(stage.first, stage.end):
                held[layer][device] = kept
    return held


def _kept(stage: Stage) -> Iterator[tuple[str, _Kept]]:
    """What each device of a stage keeps of each of its layers."""
    shares = {
        device: share * stage.context
        for replica in stage.replicas
        for device, share in zip(replica.devices, replica.shares, strict=True)
    }
    for index, holder in enumerate(stage.holders):
        begin = 0.0
        for device in holder:
            width = shares[device]
            part = width / stage.num_holders
            whole = (begin, begin + width)
            own = (begin + index * part, begin + (index + 1) * part)
            yield device, _Kept(own if stage.zero >= 3 else whole, own if stage.zero else whole)
            begin += width


def missing(wanted: tuple[Number, Number], held: tuple[Number, Number]) -> list[tuple[Number, Number]]:
    """What of an interval lies outside of another.

    >>> missing((0, 10), (3, 5)), missing((2, 4), (0, 9)), missing((0, 4), (0, 0))
    ([(0, 3), (5, 10)], [], [(0, 4)])
    """
    first, last = max(wanted[0], held[0]), min(wanted[1], held[1])
    if first >= last:
        return [wanted] if wanted[0] < wanted[1] else []
    return [(begin, end) for begin, end in ((wanted[0], first), (last, wanted[1])) if begin < end]
