"""Build schedules as pure functions of the number of stages S and micro-batches M.

One family covers four of the eight kinds. Stage s first runs d_s forwards (its *depth*: that many
micro-batches are in flight), then alternates g backwards with g forwards until the forwards run
out, then drains:

    (1)  gpipe        d_s = M                        g = M
    (2)  1f1b         d_s = min(M, S - s)            g = 1
    (3)  eager-1f1b   d_s = min(M, S - s + extra)    g = 1
         with extra = S - s - 1 unless the depth is given
    (4)  kfkb         d_s = min(M, k (S - s))        g = k     the last group may be smaller

So k = 1 is 1f1b and k = M is gpipe. Backwards are always in micro-batch order. Outside the family:

    (5)  interleaved  each worker hosts several stages (chunks) and takes micro-batches in groups of
         the worker count
    (6)  zero-bubble  ZB-H1: the backward is split in two, and the weight gradients fill the drain

Two more kinds are in ``vshape``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argosy.errors import bad_input
from argosy.schedule.action import Action, ActionKind, Schedule, ScheduleKind
from argosy.schedule.vshape import dualpipe_v, zero_bubble_v

# The kinds of the family (1) to (4), whose actions follow from depths and a group size.
FAMILY = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.EAGER, ScheduleKind.KFKB)
# Short names of kinds of actions.
FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """A description of the schedule that a plan contains; ``build_schedule`` turns it into
    actions."""

    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    k: int = 1
    """Group size; used by kfkb only."""
    depth: tuple[int, ...] | None = None
    """Warm-up forwards per stage, in place of the kind's default; only for kinds of the family (1)
    to (4)."""
    chunks: int = 1
    """Stages per worker; used by interleaved only."""

    @property
    def stages_per_worker(self) -> int:
        if self.kind.is_v:
            return 2
        return self.chunks if self.kind is ScheduleKind.INTERLEAVED else 1

    @property
    def placement(self) -> tuple[int, bool]:
        """Return a key that determines which worker hosts which stage; a run switches only between
        schedules with equal keys."""
        return self.stages_per_worker, self.kind.is_v

    def __repr__(self) -> str:
        extras = [f"k={self.k}"] if self.kind is ScheduleKind.KFKB else []
        extras += [f"{self.chunks} chunks"] if self.kind is ScheduleKind.INTERLEAVED else []
        extras += [f"depth {'/'.join(map(str, self.depth))}"] if self.depth else []
        return f"{self.kind} ({', '.join(extras)})" if extras else str(self.kind)


def build_schedule(spec: ScheduleSpec, num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the schedule that a spec describes, with the actions of every worker."""
    if num_stages < 1:
        raise bad_input("at least 1 stage", num_stages, "num_stages")
    if num_micro_batches < 1:
        raise bad_input("at least 1 micro-batch", num_micro_batches, "num_micro_batches")
    match spec.kind:
        case ScheduleKind.INTERLEAVED:
            return interleaved(num_stages, num_micro_batches, spec.chunks)
        case ScheduleKind.ZERO_BUBBLE:
            return zero_bubble(num_stages, num_micro_batches)
        case ScheduleKind.ZERO_BUBBLE_V:
            return zero_bubble_v(num_stages, num_micro_batches)
        case ScheduleKind.DUALPIPE_V:
            return dualpipe_v(num_stages, num_micro_batches)
    depth = depth_of(spec, num_stages, num_micro_batches)
    return family(spec.kind, depth, group_size(spec, num_micro_batches), num_micro_batches)


def group_size(spec: ScheduleSpec, num_micro_batches: int) -> int:
    """Return g of (1) to (4): the number of consecutive backwards."""
    if spec.kind is ScheduleKind.GPIPE:
        return num_micro_batches
    return spec.k if spec.kind is ScheduleKind.KFKB else 1


def usual_depth(spec: ScheduleSpec, from_end: int, num_micro_batches: int) -> int:
    """Return d of (1) to (4) for the stage at position ``from_end`` (1 for the last stage).

    Kinds outside the family get the depth of 1f1b, which is right for zero-bubble schedules.
    """
    ahead = (
        2 * from_end - 1
        if spec.kind is ScheduleKind.EAGER
        else group_size(spec, num_micro_batches) * from_end
    )
    return min(num_micro_batches, ahead)


def depth_of(spec: ScheduleSpec, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return the warm-up forwards per stage: those of the spec if it states them, else the
    default."""
    return spec.depth or default_depth(spec, num_stages, num_micro_batches)


def default_depth(spec: ScheduleSpec, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return the warm-up forwards per stage by (1) to (4).

    >>> default_depth(ScheduleSpec(kind=ScheduleKind.KFKB, k=2), 3, 16)
    (6, 4, 2)
    """
    if spec.k < 1:
        raise bad_input("k of at least 1", spec.k, "schedule.k")
    return tuple(usual_depth(spec, left, num_micro_batches) for left in range(num_stages, 0, -1))


def family(
    kind: ScheduleKind, depth: Sequence[int], group: int, num_micro_batches: int
) -> Schedule:
    """Build a schedule by (1) to (4), for any depth per stage and any group size.

    >>> print(family(ScheduleKind.KFKB, (4, 2), 2, 5).text())
    0F0 0F1 0F2 0F3 0B0 0B1 0F4 0B2 0B3 0B4
    1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3 1F4 1B4
    """
    if group < 1:
        raise bad_input("k of at least 1", group, "schedule.k")
    for stage, ahead in enumerate(depth):
        if not 1 <= ahead <= num_micro_batches:
            expected = f"a depth between 1 and the {num_micro_batches} micro-batches"
            raise bad_input(expected, ahead, f"schedule.depth[{stage}]")
    rows = tuple(
        _family_row(stage, ahead, group, num_micro_batches) for stage, ahead in enumerate(depth)
    )
    return Schedule(kind, len(rows), num_micro_batches, rows)


def _family_row(stage: int, depth: int, group: int, num_micro_batches: int) -> tuple[Action, ...]:
    forwards = [Action(stage, FORWARD, index) for index in range(num_micro_batches)]
    backwards = [Action(stage, BACKWARD, index) for index in range(num_micro_batches)]
    row, next_forward, next_backward = forwards[:depth], depth, 0
    while next_forward < num_micro_batches:
        row += backwards[next_backward : next_backward + group]
        row += forwards[next_forward : next_forward + group]
        next_forward, next_backward = next_forward + group, next_backward + group
    return tuple(row + backwards[next_backward:])


def interleaved(num_stages: int, num_micro_batches: int, chunks: int) -> Schedule:
    """Build an interleaved schedule (5); ``num_stages`` counts all chunks.

    Micro-batches go in groups of the worker count W through chunk 0, then the same group through
    chunk 1, and so on. Worker w runs 2 (W - w - 1) + (chunks - 1) W forwards ahead.

    >>> print(interleaved(4, 2, 2).text())
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    if chunks < 1 or num_stages % chunks:
        raise bad_input(
            f"a number of chunks that divides the {num_stages} stages", chunks, "schedule.chunks"
        )
    workers = num_stages // chunks
    if num_micro_batches % workers:
        expected = f"a multiple of the {workers} workers for an interleaved schedule"
        below = num_micro_batches - num_micro_batches % workers
        near = [str(count) for count in (below, below + workers) if count]
        nearest = f"the nearest are {' and '.join(near)}"
        raise bad_input(expected, num_micro_batches, "num_micro_batches", suggestion=nearest)
    rows = []
    for worker in range(workers):
        order = [
            (chunk, group * workers + index)
            for group in range(num_micro_batches // workers)
            for chunk in range(chunks)
            for index in range(workers)
        ]
        forwards = [Action(chunk * workers + worker, FORWARD, index) for chunk, index in order]
        backwards = [
            Action((chunks - 1 - chunk) * workers + worker, BACKWARD, index)
            for chunk, index in order
        ]
        ahead = min(2 * (workers - worker - 1) + (chunks - 1) * workers, len(order))
        row = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            row += [forward, backward]
        rows.append(tuple(row + backwards[len(order) - ahead :]))
    return Schedule(ScheduleKind.INTERLEAVED, num_stages, num_micro_batches, tuple(rows))


def zero_bubble(num_stages: int, num_micro_batches: int) -> Schedule:
    """Build a ZB-H1 schedule (6).

    Stage s delays its weight gradients by s micro-batches. So each stage has at most S
    micro-batches in flight, the most that any stage has under 1f1b, and the delayed weight
    gradients fill the time in which 1f1b drains.

    >>> print(zero_bubble(2, 3).text())
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    rows = []
    for stage in range(num_stages):
        row = [
            Action(stage, FORWARD, index)
            for index in range(min(num_stages - stage, num_micro_batches))
        ]
        for index in range(num_micro_batches):
            row.append(Action(stage, ActionKind.INPUT_GRADIENT, index))
            if index >= stage:
                row.append(Action(stage, ActionKind.WEIGHT_GRADIENT, index - stage))
            if index + num_stages - stage < num_micro_batches:
                row.append(Action(stage, FORWARD, index + num_stages - stage))
        late = range(max(0, num_micro_batches - stage), num_micro_batches)
        rows.append((*row, *(Action(stage, ActionKind.WEIGHT_GRADIENT, index) for index in late)))
    return Schedule(ScheduleKind.ZERO_BUBBLE, num_stages, num_micro_batches, tuple(rows))
