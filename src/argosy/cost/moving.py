"""What it costs to go from one plan to another: bytes of state that change hands, over the links as
they are then.

A device holds an interval of each layer's weights and one of its optimizer state: its part of a
tensor-parallel group, of that its part among the stage's holders where ZeRO shares it out (state
from level 1 on, weights at level 3). Weights that several layers use, such as a table of tokens,
are held once by every device that has one of these layers, and as the runtime keeps them: whole on
every device where they are in several stages, and whole, whatever ZeRO says, under ZeRO 2 and 3 in
several layers of one.

    (1)  a device receives what it holds under the new plan and did not under the old one
    (2)  from a device that held it: of several, of its own node, then from whoever sends the fewest
         bytes yet; where none of them can be reached, from whoever can, as copies and checkpoints
         are there for
    (3)  seconds = the longest that any link takes for the bytes that cross it, and ``PAUSE`` for
         the switch itself

Gradients do not move: plans change between steps. Experts count as if every holder had all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from argosy.cluster.topology import Cluster
from argosy.cost.memory import optimizer_bytes
from argosy.cost.regions import Interval, deliveries
from argosy.plan.plan import Plan, Stage
from argosy.workload.chain import Chain, Frozen

PAUSE = 0.5
"""Seconds that a switch takes beside its bytes: groups are formed anew."""

_ROUNDING = 1e-9


class _Kept(NamedTuple):
    """What a device keeps of some weights, as parts of a layer."""

    weights: Interval
    state: Interval


_ALL = _Kept((0.0, 1.0), (0.0, 1.0))


class _Weights(NamedTuple):
    """Weights that the same layers use."""

    size: int
    layers: frozenset[int]
    frozen_bytes: float = 0.0
    """What they take if they are frozen: they have no optimizer state, and ZeRO leaves them
    whole."""


_Held = dict[_Weights, dict[str, _Kept]]
"""By device."""


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
        """(3), at the bandwidths of a moment; infinity while a link that is needed is down, 0 where
        nothing moves."""
        crossing: dict[int, float] = defaultdict(float)
        for source, target, size in self.transfers:
            for link in cluster.fastest(source, target, size, time).links:
                crossing[link] += size
        rates = {link: cluster.links[link].bandwidth.at(time) for link in crossing}
        times = [size / rates[link] if rates[link] else math.inf for link, size in crossing.items()]
        return max(times) + PAUSE if times else 0.0


def migration(old: Plan, new: Plan, chain: Chain, cluster: Cluster, time: float = 0.0) -> Migration:
    """What has to move when one plan follows another at a moment."""
    weights = tuple(_weights(chain))
    before, sources = _held(old, weights), _Sources(old, cluster, time)
    widths = (chain.dtype.bytes, optimizer_bytes(chain))
    for some, kept in _held(new, weights).items():
        holders = [
            {name: had[kind] for name, had in before[some].items()} for kind in range(len(widths))
        ]
        for device, wanted in kept.items():
            if some.frozen_bytes:
                sources.deliver(device, wanted[0], holders[0], some.frozen_bytes)
                continue
            for kind, width in enumerate(widths):
                sources.deliver(device, wanted[kind], holders[kind], width * some.size)
    transfers = [(*pair, size) for pair, size in sources.sent.items() if size > 0]
    return Migration(transfers=tuple(sorted(transfers)))


class _Sources:
    """(2)."""

    def __init__(self, plan: Plan, cluster: Cluster, time: float) -> None:
        self.cluster, self.time, self.devices = cluster, time, plan.devices
        self.sent: dict[tuple[str, str], float] = defaultdict(float)
        self.totals: dict[str, float] = defaultdict(float)

    def deliver(
        self, target: str, wanted: Interval, holders: Mapping[str, Interval], whole: float
    ) -> None:
        """``whole``: bytes of the interval from 0 to 1."""
        regions = {name: [(held,)] for name, held in holders.items()}
        for source, ((begin, end),) in deliveries(
            target, [(wanted,)], regions, self._of, rounding=_ROUNDING
        ):
            if source is not None:
                self.sent[source, target] += (end - begin) * whole
                self.totals[source] += (end - begin) * whole

    def _of(self, holders: list[str], target: str) -> str | None:
        """None: the plan had no other device."""
        others = [name for name in self.devices if name != target]
        node = self.cluster.node_of
        for names in (holders, others):
            found = [name for name in names if self._reaches(name, target)]
            if found:
                return min(
                    found,
                    key=lambda one: (
                        node[one][0].name != node[target][0].name,
                        self.totals[one],
                        one,
                    ),
                )
        return next(iter((*holders, *others)), None)

    def _reaches(self, source: str, target: str) -> bool:
        return (
            self.cluster.bandwidth_at(
                self.cluster.fastest(source, target, 1e6, self.time), self.time
            )
            > 0
        )


def _weights(chain: Chain) -> Iterator[_Weights]:
    """Every weight once. Layers that are tied to one layer share the same weights of it, the
    smaller shares in the larger ones."""
    ties: dict[int, dict[int, int]] = defaultdict(dict)
    for index, layer in enumerate(chain.layers):
        if layer.tied_to is not None and layer.tied_to != index:
            ties[layer.tied_to][index] = layer.tied_parameters
    for index, layer in enumerate(chain.layers):
        shared = 0
        for size in sorted(set(ties[index].values())):
            users = (user for user, tied in ties[index].items() if tied >= size)
            yield _Weights(size - shared, frozenset((index, *users)))
            shared = size
        yield _Weights(max(0, layer.parameters - shared), frozenset((index,)))
        if layer.frozen is not None:
            yield from _frozen_weights(chain, index, layer.frozen)


def _frozen_weights(chain: Chain, index: int, frozen: Frozen) -> Iterator[_Weights]:
    """Frozen weights of one layer; those that others share with it are theirs too."""
    users = [
        (user, layer.frozen.tied_bytes)
        for user, layer in enumerate(chain.layers)
        if layer.tied_to == index and layer.frozen is not None and layer.frozen.tied_bytes
    ]
    shared = min(max((size for _, size in users), default=0.0), frozen.bytes)
    if shared:
        yield _Weights(frozen.parameters, frozenset((index, *(user for user, _ in users))), shared)
    if frozen.bytes > shared:
        yield _Weights(frozen.parameters, frozenset((index,)), frozen.bytes - shared)


def _held(plan: Plan, weights: Sequence[_Weights]) -> _Held:
    kept = [
        {whole: dict(_kept(stage, whole=whole)) for whole in (False, True)} for stage in plan.stages
    ]
    home = [index for index, stage in enumerate(plan.stages) for _ in range(stage.first, stage.end)]
    held: _Held = {}
    for some in weights:
        stages = sorted({home[layer] for layer in some.layers})
        if len(stages) > 1:
            devices = (device for stage in stages for device in plan.stages[stage].devices)
            held[some] = dict.fromkeys(devices, _ALL)
        else:
            is_shared = bool(some.frozen_bytes) or plan.zero_of(stages, len(some.layers)) == 0
            held[some] = kept[stages[0]][is_shared]
    return held


def _kept(stage: Stage, *, whole: bool) -> Iterator[tuple[str, _Kept]]:
    """What each device of a stage keeps of each of its layers; ``whole``: of weights that ZeRO does
    not share out."""
    zero = 0 if whole else stage.zero
    shares = {
        device: stage.tensor_share(share)
        for replica in stage.replicas
        for device, share in zip(replica.devices, replica.shares, strict=True)
    }
    for index, holder in enumerate(stage.holders):
        begin = 0.0
        for device in holder:
            width = shares[device]
            part = width / stage.num_holders
            all_of_it = (begin, begin + width)
            own = (begin + index * part, begin + (index + 1) * part)
            yield device, _Kept(own if zero >= 3 else all_of_it, own if zero else all_of_it)
            begin += width
