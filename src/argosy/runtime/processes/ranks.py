"""Map the devices of a plan to ranks, and find the samples that ranks exchange. Needs no torch.

Ranks count the devices that a plan uses: nodes in the order in which the plan first names them, the
devices of a node by their number. torchrun numbers processes in the same order if node i is started
with node rank i. A run keeps its first numbering, its *roster*, under all plans that follow; a rank
whose device a plan does not use is idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from argosy.plan.plan import Plan, Replica, Stage
from argosy.schedule.action import worker_of as hosting_worker

Channel = tuple[int, int, bool]
"""Sending rank, receiving rank, and whether the channel carries gradients."""


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """A host with the devices of it that a plan uses."""

    name: str
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank's place in a stage, given by its replica and the samples of every micro-batch that it
    computes."""

    stage: int
    replica: int
    rank: int
    begin: int
    end: int
    member: int = 0
    """Its index among the ranks of its replica."""
    width: int = 1
    """The number of ranks of its replica."""

    @property
    def samples(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class ExpertSeat:
    """A place that a rank has among the devices that hold all experts of a stage together."""

    place: int
    """The index of its holder, a tensor-parallel group or a device, in the group of holders."""
    member: int
    """Its index in the holder, by rank."""
    ratios: tuple[float, ...]
    """The shares of the holder's devices in its experts."""


@dataclass(frozen=True, kw_only=True)
class PeerLink:
    """A peer in a neighbouring stage that shares some of the caller's own samples."""

    peer: int
    begin: int
    end: int
    is_first: bool
    """True if the receiver gets its first samples from this sender."""
    turn: int = 0
    """Several ranks of a wider replica return gradients of the same samples, each a part of the
    sum; this index counts them."""


def nodes_of(plan: Plan) -> tuple[NodeRanks, ...]:
    """Return the hosts in use, by node rank.

    A device is named after its node and its number in it: ``v1.2``.
    """
    numbers: dict[str, set[int]] = {}
    for device in plan.devices:
        node, _, number = device.rpartition(".")
        numbers.setdefault(node, set()).add(int(number))
    return tuple(
        NodeRanks(name=node, devices=tuple(f"{node}.{number}" for number in sorted(used)))
        for node, used in numbers.items()
    )


def devices_by_rank(plan: Plan) -> tuple[str, ...]:
    return tuple(device for node in nodes_of(plan) for device in node.devices)


def seats_of(plan: Plan, roster: Sequence[str] | None = None) -> tuple[tuple[Seat, ...], ...]:
    """Return, per stage, the seats of its replicas, whose devices have the same samples.
    ``roster`` lists devices by rank and is the plan's own unless given."""
    stages = []
    for index, stage in enumerate(plan.stages):
        ends = accumulate(replica.samples for replica in stage.replicas)
        replicas = zip(stage.replicas, ends, replica_ranks(plan, index, roster), strict=True)
        stages.append(
            tuple(
                Seat(
                    stage=index,
                    replica=at,
                    rank=rank,
                    begin=end - replica.samples,
                    end=end,
                    member=member,
                    width=len(ranks),
                )
                for at, (replica, end, ranks) in enumerate(replicas)
                for member, rank in enumerate(ranks)
            )
        )
    return tuple(stages)


def _rank_by_device(plan: Plan, roster: Sequence[str] | None) -> dict[str, int]:
    """Return the rank of each device."""
    return {device: rank for rank, device in enumerate(roster or devices_by_rank(plan))}


def replica_ranks(
    plan: Plan, stage: int, roster: Sequence[str] | None = None
) -> list[tuple[int, ...]]:
    """Return the ranks of each replica of a stage, in ascending order."""
    rank = _rank_by_device(plan, roster)
    return [
        tuple(sorted(rank[device] for device in replica.devices))
        for replica in plan.stages[stage].replicas
    ]


def parts_of(
    plan: Plan, stage: Stage, replica: Replica, roster: Sequence[str] | None = None
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Return the tensor-parallel group of each part of a replica's sequence: its ranks in ascending
    order, with each rank's share of the replica's work. Parts are in the order of their first
    ranks."""
    rank = _rank_by_device(plan, roster)
    members = [(rank[device], share) for device, share in replica.members]
    width = replica.width // stage.context
    rows = (tuple(sorted(members[at : at + width])) for at in range(0, len(members), width))
    return tuple(sorted(rows))


def grid_ranks(
    plan: Plan, stage: int, roster: Sequence[str] | None = None
) -> list[tuple[int, ...]]:
    """Return the ranks of each row and each column of a stage whose parts of a sequence have
    several devices: of each part, and of the devices with the same place in all parts."""
    own = plan.stages[stage]
    groups: list[tuple[int, ...]] = []
    for replica in own.replicas if own.context > 1 and not own.parts_are_alone else ():
        rows = [tuple(rank for rank, _ in part) for part in parts_of(plan, own, replica, roster)]
        groups += [*rows, *zip(*rows, strict=True)]
    return groups


def holders_of(
    plan: Plan, stage: int, roster: Sequence[str] | None = None
) -> list[tuple[tuple[int, float], ...]]:
    """Return the tensor-parallel groups that hold a stage's weights, as ``parts_of``: those of all
    parts of all replicas."""
    own = plan.stages[stage]
    return [part for replica in own.replicas for part in parts_of(plan, own, replica, roster)]


def expert_seats(
    plan: Plan, stage: int, roster: Sequence[str] | None = None
) -> dict[int, ExpertSeat]:
    """Return the place of each rank among the devices that share the experts of a stage."""
    seats = {}
    for holder, members in enumerate(holders_of(plan, stage, roster)):
        total = math.fsum(share for _, share in members)
        ratios = tuple(share / total for _, share in members)
        for member, (rank, _) in enumerate(members):
            place = holder % plan.stages[stage].expert
            seats[rank] = ExpertSeat(place=place, member=member, ratios=ratios)
    return seats


def expert_ranks(
    plan: Plan, stage: int, roster: Sequence[str] | None = None
) -> list[tuple[int, ...]]:
    """Return the ranks that send each other tokens: those with the same place in the holders of a
    group that shares the experts of a stage."""
    expert = plan.stages[stage].expert
    if expert == 1:
        return []
    holders = [tuple(rank for rank, _ in part) for part in holders_of(plan, stage, roster)]
    groups = (holders[at : at + expert] for at in range(0, len(holders), expert))
    return [tuple(sorted(column)) for group in groups for column in zip(*group, strict=True)]


def links_between(seat: Seat, others: tuple[Seat, ...], *, sending: bool) -> tuple[PeerLink, ...]:
    """Return the peers among ``others``, seats of a neighbouring stage, that hold some of a seat's
    samples, in the order of samples.

    Every rank of the later stage's replica has one peer in the earlier one's; ranks of a wider
    later replica take turns.
    """
    links = []
    for peer_seat in others:
        earlier, later = (seat, peer_seat) if seat.stage < peer_seat.stage else (peer_seat, seat)
        begin, end = max(seat.begin, peer_seat.begin), min(seat.end, peer_seat.end)
        turn, member = divmod(later.member, earlier.width)
        if begin < end and member == earlier.member:
            receiver = peer_seat if sending else seat
            first = begin == receiver.begin
            links.append(
                PeerLink(
                    peer=peer_seat.rank,
                    begin=begin - seat.begin,
                    end=end - seat.begin,
                    is_first=first,
                    turn=turn,
                )
            )
    return tuple(links)


def channels_of(plan: Plan, roster: Sequence[str] | None = None) -> tuple[Channel, ...]:
    """Return the channels between ranks of neighbouring stages that a plan uses."""
    seats, channels = seats_of(plan, roster), set()
    for index in range(len(seats) - 1):
        if worker_of(plan, index) == worker_of(plan, index + 1):
            continue
        for seat in seats[index]:
            for link in links_between(seat, seats[index + 1], sending=True):
                channels |= {(seat.rank, link.peer, False), (link.peer, seat.rank, True)}
    return tuple(sorted(channels))


def worker_of(plan: Plan, stage: int) -> int:
    """Return the row of the schedule that a stage is in."""
    num_workers = len(plan.stages) // plan.schedule.stages_per_worker
    return hosting_worker(plan.schedule.kind, stage, num_workers)
