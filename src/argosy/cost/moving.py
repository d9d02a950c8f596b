"""Price the move from one plan to another: the bytes of state that devices send, over the links at
that time.

A device holds an interval of each layer's weights and one of its optimizer state: its part of a
tensor-parallel group, and of that its part among the stage's holders if ZeRO divides it (state from
level 1 on, weights at level 3). Weights that several layers use, such as a table of tokens, are
held once by every device that has one of these layers, as the runtime keeps them: whole on every
device if the layers are in several stages, and whole under ZeRO 2 and 3 too if several layers of
one stage use them.

    (1)  a device receives what it holds under the new plan and did not hold under the old one
    (2)  the source is a device that held it: first one of the same node, then the one that has sent
         the fewest bytes so far; if none of them can be reached, any reachable device, which reads
         a copy or a checkpoint
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

# Seconds that a switch takes beside its bytes, because process groups are formed again.
PAUSE = 0.5

# Parts of a layer below this length are rounding errors.
_ROUNDING = 1e-9


class _Kept(NamedTuple):
    """A pair of intervals that a device keeps of some weights and of their state, as parts of a
    layer."""

    weights: Interval
    state: Interval


# All of some weights and of their state.
_ALL = _Kept((0.0, 1.0), (0.0, 1.0))


class _Weights(NamedTuple):
    """A set of weights that the same layers use."""

    size: int
    layers: frozenset[int]
    frozen_bytes: float = 0.0
    """Bytes of the weights if they are frozen: they have no optimizer state, and ZeRO leaves them
    whole."""


_Held = dict[_Weights, dict[str, _Kept]]
"""Intervals that each device keeps of each set of weights."""


@dataclass(frozen=True, kw_only=True)
class Migration:
    """A set of transfers that a move needs, by (1) and (2)."""

    transfers: tuple[tuple[str, str, float], ...]
    """Source, target, bytes; at most one for each pair."""

    @cached_property
    def received(self) -> dict[str, float]:
        """Return the bytes that each device receives."""
        amounts: dict[str, float] = defaultdict(float)
        for _, target, size in self.transfers:
            amounts[target] += size
        return dict(amounts)

    @property
    def bytes(self) -> float:
        return sum(self.received.values())

    def seconds(self, cluster: Cluster, time: float = 0.0) -> float:
        """Return the seconds (3) at the bandwidths of a time: infinity if a needed link is down, 0
        if nothing moves."""
        crossing: dict[int, float] = defaultdict(float)
        for source, target, size in self.transfers:
            for link in cluster.fastest(source, target, size, time).links:
                crossing[link] += size
        rates = {link: cluster.links[link].bandwidth.at(time) for link in crossing}
        times = [size / rates[link] if rates[link] else math.inf for link, size in crossing.items()]
        return max(times) + PAUSE if times else 0.0


def migration(old: Plan, new: Plan, chain: Chain, cluster: Cluster, time: float = 0.0) -> Migration:
    """Return the transfers that are needed when one plan follows another at a time."""
    weights = tuple(_weights(chain))
    before, sources = _held(old, weights), _Sources(old, cluster, time)
    widths = (chain.dtype.bytes, optimizer_bytes(chain))
    for group, kept in _held(new, weights).items():
        holders = [
            {name: had[kind] for name, had in before[group].items()} for kind in range(len(widths))
        ]
        for device, wanted in kept.items():
            if group.frozen_bytes:
                sources.deliver(device, wanted[0], holders[0], group.frozen_bytes)
                continue
            for kind, width in enumerate(widths):
                sources.deliver(device, wanted[kind], holders[kind], width * group.size)
    transfers = [(*pair, size) for pair, size in sources.sent.items() if size > 0]
    return Migration(transfers=tuple(sorted(transfers)))


class _Sources:
    """A ledger that chooses the source of each transfer by (2) and adds up the bytes."""

    def __init__(self, plan: Plan, cluster: Cluster, time: float) -> None:
        self.cluster, self.time, self.devices = cluster, time, plan.devices
        self.sent: dict[tuple[str, str], float] = defaultdict(float)
        self.totals: dict[str, float] = defaultdict(float)

    def deliver(
        self, target: str, wanted: Interval, holders: Mapping[str, Interval], whole: float
    ) -> None:
        """Add the transfers by which ``target`` receives the wanted interval; ``whole`` is the
        bytes of the interval from 0 to 1."""
        regions = {name: [(held,)] for name, held in holders.items()}
        for source, ((begin, end),) in deliveries(
            target, [(wanted,)], regions, self._source_for, rounding=_ROUNDING
        ):
            if source is not None:
                self.sent[source, target] += (end - begin) * whole
                self.totals[source] += (end - begin) * whole

    def _source_for(self, holders: list[str], target: str) -> str | None:
        """Return the source for a target; None if the plan had no other device."""
        others = [name for name in self.devices if name != target]
        node = self.cluster.node_of
        for names in (holders, others):
            reachable = [name for name in names if self._reaches(name, target)]
            if reachable:
                return min(
                    reachable,
                    key=lambda source: (
                        node[source][0].name != node[target][0].name,
                        self.totals[source],
                        source,
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
    """Yield every weight once. Layers that are tied to one layer share weights of it; smaller
    shares are parts of the larger ones."""
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
    """Yield the frozen weights of one layer; those that other layers share with it are in one set
    with all users."""
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
    for group in weights:
        stages = sorted({home[layer] for layer in group.layers})
        if len(stages) > 1:
            devices = (device for stage in stages for device in plan.stages[stage].devices)
            held[group] = dict.fromkeys(devices, _ALL)
        else:
            is_whole = bool(group.frozen_bytes) or plan.zero_of(stages, len(group.layers)) == 0
            held[group] = kept[stages[0]][is_whole]
    return held


def _kept(stage: Stage, *, whole: bool) -> Iterator[tuple[str, _Kept]]:
    """Yield what each device of a stage keeps of each of its layers; ``whole``: of weights that
    ZeRO does not divide."""
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
