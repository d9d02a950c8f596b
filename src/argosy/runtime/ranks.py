"""Which process is which device of a plan, and which samples it exchanges with whom. Needs no torch.

Ranks count the devices that a plan uses: nodes in the order in which the plan first names them, the devices of a node
by their number. That is the order in which torchrun numbers processes when node i is started with node rank i. A run
keeps the numbers it began with, its *roster*, whatever plans follow; a rank whose device a plan leaves out is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from argosy.plan.plan import Plan
from argosy.schedule import ScheduleKind


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host, and the devices of it that a plan uses."""

    name: str
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank's place in a stage: a replica, and the samples of every micro-batch that it works on."""

    stage: int
    replica: int
    rank: int
    begin: int
    end: int

    @property
    def samples(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Link:
    """A peer in a neighbouring stage, and which of the caller's own samples it shares."""

    peer: int
    begin: int
    end: int
    is_first: bool
    """Whether the sender is the first one that the receiver hears from."""


def nodes_of(plan: Plan) -> tuple[Node, ...]:
    """The hosts in use, by node rank.

    A device is named after its node and its number in it: ``v1.2``.
    """
    numbers: dict[str, set[int]] = {}
    for device in plan.devices:
        node, _, number = device.rpartition(".")
        numbers.setdefault(node, set()).add(int(number))
    return tuple(
        Node(name=node, devices=tuple(f"{node}.{number}" for number in sorted(used))) for node, used in numbers.items()
    )


def devices_by_rank(plan: Plan) -> tuple[str, ...]:
    return tuple(device for node in nodes_of(plan) for device in node.devices)


def seats_of(plan: Plan, roster: Sequence[str] | None = None) -> tuple[tuple[Seat, ...], ...]:
    """Per stage, the seats of its replicas. A replica is one rank; the table of what runs says so before. ``roster``:
    devices by rank, the plan's own unless given."""
    rank = {device: index for index, device in enumerate(roster or devices_by_rank(plan))}
    stages = []
    for index, stage in enumerate(plan.stages):
        ends = list(accumulate(replica.samples for replica in stage.replicas))
        stages.append(
            tuple(
                Seat(stage=index, replica=at, rank=rank[replica.devices[0]], begin=end - replica.samples, end=end)
                for at, (replica, end) in enumerate(zip(stage.replicas, ends, strict=True))
            )
        )
    return tuple(stages)


def links_between(seat: Seat, others: tuple[Seat, ...], *, sending: bool) -> tuple[Link, ...]:
    """The peers among ``others`` that hold some of a seat's samples, in the order of samples."""
    links = []
    for other in others:
        begin, end = max(seat.begin, other.begin), min(seat.end, other.end)
        if begin < end:
            receiver = other if sending else seat
            first = begin == receiver.begin
            links.append(Link(peer=other.rank, begin=begin - seat.begin, end=end - seat.begin, is_first=first))
    return tuple(links)


def worker_of(plan: Plan, stage: int) -> int:
    """The row of the schedule that a stage is in: stages of an interleaved schedule come back to their worker."""
    chunks = plan.schedule.chunks if plan.schedule.kind is ScheduleKind.INTERLEAVED else 1
    return stage % (len(plan.stages) // chunks)
