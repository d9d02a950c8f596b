"""Price the move from one plan to another: the bytes of state that devices send, over the links at
that time.

A device holds an interval of each layer's weights and one of its optimizer state: its part of a
tensor-parallel group, and of that its part among the stage's holders if ZeRO divides it (state from
level 1 on, weights at level 3). Weights that several layers use, such as a table of tokens, are
held once by every device that has one of these layers, as the runtime keeps them: whole on every
device if the layers are in several stages, and whole under ZeRO 2 and 3 too if several layers of
one stage use them.

    (1)  a device receives what it holds under the new plan and did not hold under the old one
    (2)  the source is a device of the same node that held it, or else one of the same node that
         receives it too and passes it on, or else any device that held it; of several, the one that
         has sent the fewest bytes so far; if all of them are lost or cannot be reached, any
         reachable device, which reads a copy or a checkpoint
    (3)  seconds of some transfers = the longest that any link takes for the bytes that cross it,
         and the same for those that are passed on, after the others
    (4)  seconds = (3) of weights and (3) of optimizer state, ``PAUSE`` for the switch itself, and
         ``FORMING`` if devices must communicate that have not done so before

Weights come first. Optimizer state may travel while the next step computes, which needs it only for
its update; then less of it counts (``adapt.predictor``). The optimizer's copy of 16-bit weights in
fp32 is sent as the weights: 16-bit ones are made from it. So a move sends 4 + 8 bytes per weight
under AdamW, as the runtime does, which holds weights in fp32 and multiplies in 16 bits.

So what several devices of a node receive crosses the network once. Of them, the one that has
received the fewest bytes so far receives it from the other node.

Experts that holders divide are an interval of their own, of which each holder has its part.
Gradients do not move: plans change between steps.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

from argosy.cluster.topology import Cluster
from argosy.cost.memory import master_bytes, optimizer_bytes
from argosy.cost.regions import Interval, Region, outside, tiered_deliveries, volume
from argosy.plan.plan import Plan, Stage
from argosy.workload.chain import Chain, Frozen

# Seconds that a switch takes beside its bytes, because stages and optimizer are made again.
PAUSE = 0.1
# Seconds in which new process groups are formed; groups that exist are kept.
FORMING = 0.4

# The tier of sources that receive a part themselves, in the same move.
_PASSED_ON = 1
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
    is_experts: bool = False
    """Whether the weights are those of a layer's experts."""


DeviceGroup = frozenset[str] | tuple[str, str]
"""Devices that sum or gather together, or a pair that sends activations and gradients."""
Transfer = tuple[str, str, float]
"""Source, target, bytes."""
_Offers = Mapping[str, Sequence[Region]]
"""Parts of a layer that each device can send."""
_Held = dict[_Weights, dict[str, _Kept]]
"""Intervals that each device keeps of each set of weights."""


class Transfers(NamedTuple):
    """Transfers that go together, at most one for each pair of devices."""

    direct: tuple[Transfer, ...] = ()
    passed_on: tuple[Transfer, ...] = ()
    """Bytes that their source receives by ``direct``."""

    def seconds(self, cluster: Cluster, time: float = 0.0) -> float:
        """Return the seconds (3) from a time on: infinity if a needed link stays down."""
        return sum(_seconds(phase, cluster, time) for phase in self)


@dataclass(frozen=True, kw_only=True)
class Migration:
    """A set of transfers that a move needs, by (1) and (2)."""

    weights: Transfers
    state: Transfers
    """Transfers of optimizer state."""
    new_groups: frozenset[DeviceGroup] = frozenset()
    """Sets of devices that communicate under the new plan and did not under the old one."""
    is_free: bool = False
    """True if the plans differ at most in their schedule and shares, which running stages can
    change."""

    @cached_property
    def received(self) -> dict[str, float]:
        """Return the bytes that each device receives."""
        amounts: dict[str, float] = defaultdict(float)
        for _, target, size in itertools.chain(*self.weights, *self.state):
            amounts[target] += size
        return dict(amounts)

    @property
    def bytes(self) -> float:
        return sum(self.received.values())

    def seconds(
        self, cluster: Cluster, time: float = 0.0, known: Set[DeviceGroup] = frozenset()
    ) -> float:
        """Return the seconds (4) if nothing travels behind a step, 0 if stages stay as they are.
        ``known`` are groups that earlier plans have formed."""
        if self.is_free:
            return 0.0
        return self.seconds_before_step(cluster, time, known) + self.state.seconds(cluster, time)

    def seconds_before_step(
        self, cluster: Cluster, time: float = 0.0, known: Set[DeviceGroup] = frozenset()
    ) -> float:
        """Return the seconds (4) without those of optimizer state."""
        if self.is_free:
            return 0.0
        pause = PAUSE if self.new_groups <= known else PAUSE + FORMING
        return self.weights.seconds(cluster, time) + pause


def _seconds(transfers: Sequence[Transfer], cluster: Cluster, time: float) -> float:
    """Return the longest that any link takes for the bytes that cross it from a time on."""
    crossing: dict[int, float] = defaultdict(float)
    for source, target, size in transfers:
        for link in cluster.fastest(source, target, size, time).links:
            crossing[link] += size
    times = (
        cluster.links[link].bandwidth.advance(time, size) - time for link, size in crossing.items()
    )
    return max(times, default=0.0)


def migration(old: Plan, new: Plan, chain: Chain, cluster: Cluster, time: float = 0.0) -> Migration:
    """Return the transfers that are needed when one plan follows another at a time."""
    weights = tuple(_weights(chain))
    before, sources = _held(old, weights), _Sources(old, cluster, time)
    master = master_bytes(chain)
    widths = (master or chain.dtype.bytes, optimizer_bytes(chain) - master)
    for group, kept in _held(new, weights).items():
        kinds = [(0, group.frozen_bytes)] if group.frozen_bytes else []
        kinds = kinds or [(kind, width * group.size) for kind, width in enumerate(widths)]
        for kind, whole in kinds:
            holders = {name: had[kind] for name, had in before[group].items()}
            wanted = {name: will_have[kind] for name, will_have in kept.items()}
            sources.deliver(wanted, holders, whole, sources.ledgers[kind])
    new_groups = process_groups(new, chain) - process_groups(old, chain)
    is_free = is_same_division(old, new)
    weights_sent, state_sent = (ledger.transfers() for ledger in sources.ledgers)
    return Migration(weights=weights_sent, state=state_sent, new_groups=new_groups, is_free=is_free)


def is_same_division(old: Plan, new: Plan) -> bool:
    """Return whether two plans differ at most in their schedule and in the samples of replicas."""
    return old.micro_batch_size == new.micro_batch_size and tuple(
        map(_without_shares, old.stages)
    ) == tuple(map(_without_shares, new.stages))


def _without_shares(stage: Stage) -> tuple[object, ...]:
    groups = tuple((replica.devices, replica.shares) for replica in stage.replicas)
    splits = (stage.context, stage.expert, stage.expert_shares)
    return stage.first, stage.end, stage.recompute, stage.zero, splits, groups


def process_groups(plan: Plan, chain: Chain) -> frozenset[DeviceGroup]:
    """Return the devices that communicate with each other under a plan: those that hold the same
    weights, tensor-parallel groups, and pairs of devices of neighbouring stages."""
    holders = {frozenset(kept) for kept in _held(plan, tuple(_weights(chain))).values()}
    tensor_parallel = {
        frozenset(replica.devices) for stage in plan.stages for replica in stage.replicas
    }
    neighbours = {
        pair
        for stage, following in pairwise(plan.stages)
        for pair in product(stage.devices, following.devices)
    }
    collective = {group for group in holders | tensor_parallel if len(group) > 1}
    return frozenset(collective | neighbours)


class _Ledger:
    """A sum of the bytes that are transferred, by source and target."""

    def __init__(self) -> None:
        self.direct: dict[tuple[str, str], float] = defaultdict(float)
        self.passed_on: dict[tuple[str, str], float] = defaultdict(float)

    def transfers(self) -> Transfers:
        phases = (
            tuple(sorted((*pair, size) for pair, size in sizes.items() if size > 0))
            for sizes in (self.direct, self.passed_on)
        )
        return Transfers(*phases)


class _Sources:
    """A chooser that finds the source of each transfer by (2)."""

    def __init__(self, plan: Plan, cluster: Cluster, time: float) -> None:
        self.cluster, self.time, self.devices = cluster, time, plan.devices
        self.ledgers = (_Ledger(), _Ledger())
        """Transfers of weights and of optimizer state."""
        self.sent: dict[str, float] = defaultdict(float)
        self.received: dict[str, float] = defaultdict(float)

    def deliver(
        self,
        wanted: Mapping[str, Interval],
        holders: Mapping[str, Interval],
        whole: float,
        ledger: _Ledger,
    ) -> None:
        """Add to a ledger the transfers by which devices receive the wanted intervals; ``whole`` is
        the bytes of the interval from 0 to 1."""
        held: _Offers = {name: [(interval,)] for name, interval in holders.items()}
        arrived: dict[str, list[Region]] = defaultdict(list)
        for target in sorted(wanted, key=lambda name: (self.received[name], name)):
            missing = outside([(wanted[target],)], held.get(target, ()))
            if not missing:
                continue
            for tier, source, region in tiered_deliveries(
                target,
                missing,
                self._tiers(target, held, arrived),
                lambda sources, _: min(sources, key=lambda name: (self.sent[name], name)),
                rounding=_ROUNDING,
            ):
                size = volume([region]) * whole
                phase = ledger.passed_on if tier == _PASSED_ON else ledger.direct
                phase[source, target] += size
                self.sent[source] += size
                self.received[target] += size
                if tier != _PASSED_ON:
                    arrived[target].append(region)

    def _tiers(self, target: str, held: _Offers, arrived: _Offers) -> list[_Offers]:
        """Return what devices can send to a target, in the order in which they are asked (2)."""
        anyone = {name: [((0.0, 1.0),)] for name in self.devices if name != target}
        reachable = {
            name for name in {*held, *arrived, *anyone} - {target} if self._reaches(name, target)
        }
        near = {name for name in reachable if self._node(name) == self._node(target)}
        choices = ((held, near), (arrived, near), (held, reachable), (anyone, reachable))
        tiers: list[_Offers] = [
            {name: regions for name, regions in offers.items() if name in names}
            for offers, names in choices
        ]
        return [*tiers, {name: regions for name, regions in held.items() if name != target}, anyone]

    def _node(self, device: str) -> str:
        return self.cluster.node_of[device][0].name

    def _reaches(self, source: str, target: str) -> bool:
        """Return whether a device is there and can send to another."""
        if self.cluster.device(source).speed.at(self.time) == 0:
            return False
        route = self.cluster.fastest(source, target, 1e6, self.time)
        return self.cluster.bandwidth_at(route, self.time) > 0


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
        experts = layer.expert_parameters
        yield _Weights(max(0, layer.parameters - shared - experts), frozenset((index,)))
        if experts:
            yield _Weights(experts, frozenset((index,)), is_experts=True)
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
    users_of_it = frozenset((index,))
    if frozen.bytes > shared + frozen.expert_bytes:
        outside_experts = frozen.bytes - shared - frozen.expert_bytes
        yield _Weights(frozen.parameters, users_of_it, outside_experts)
    if frozen.expert_bytes:
        yield _Weights(frozen.parameters, users_of_it, frozen.expert_bytes, is_experts=True)


def _held(plan: Plan, weights: Sequence[_Weights]) -> _Held:
    kept = [
        {
            (whole, experts): dict(_kept(stage, whole=whole, experts=experts))
            for whole in (False, True)
            for experts in (False, True)
        }
        for stage in plan.stages
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
            held[group] = kept[stages[0]][is_whole, group.is_experts]
    return held


def _kept(stage: Stage, *, whole: bool, experts: bool) -> Iterator[tuple[str, _Kept]]:
    """Yield what each device of a stage keeps of each of its layers; ``whole``: of weights that
    ZeRO does not divide; ``experts``: of the experts, which groups of holders divide."""
    zero = 0 if whole else stage.zero
    shares = {
        device: stage.tensor_share(share)
        for replica in stage.replicas
        for device, share in zip(replica.devices, replica.shares, strict=True)
    }
    parts = stage.expert_shares if experts else (1.0,)
    copies = stage.num_holders // len(parts)
    for index, holder in enumerate(stage.holders):
        copy, place = divmod(index, len(parts))
        begin = math.fsum(parts[:place])
        for device in holder:
            width = parts[place] * shares[device]
            part = width / copies
            all_of_it = (begin, begin + width)
            own = (begin + copy * part, begin + (copy + 1) * part)
            yield device, _Kept(own if zero >= 3 else all_of_it, own if zero else all_of_it)
            begin += width
