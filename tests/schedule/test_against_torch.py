"""Schedules that torch.distributed.pipelining knows, too: the same actions in the same order, and
its dry run of ours.

torch makes its lists from stages on ranks; here its classes are given the few numbers that their
lists depend on.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from argosy.schedule import ActionKind, Schedule, ScheduleKind, ScheduleSpec, build_schedule

SIZES = [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3), (3, 8), (4, 4), (4, 9), (6, 12), (8, 16)]
LETTERS = {
    ActionKind.FORWARD: theirs.F,
    ActionKind.BACKWARD: theirs.FULL_BACKWARD,
    ActionKind.INPUT_GRADIENT: theirs.BACKWARD_INPUT,
    ActionKind.WEIGHT_GRADIENT: theirs.BACKWARD_WEIGHT,
}
Rows = dict[int, list[tuple[int, Any, int]]]


def rows_of(schedule: Schedule) -> Rows:
    return {
        worker: [(one.stage, LETTERS[one.kind], one.micro_batch) for one in row]
        for worker, row in enumerate(schedule.rows)
    }


def made_by(kind: type, num_stages: int, num_micro_batches: int, chunks: int = 1) -> Rows:
    """torch's own lists, without the steps in which a rank waits and the sums of gradients at the
    end."""
    schedule: Any = object.__new__(kind)
    schedule._num_stages, schedule._n_microbatches = num_stages, num_micro_batches
    schedule.num_stages = num_stages
    schedule.pp_group_size, schedule.n_local_stages = num_stages // chunks, chunks
    schedule.number_of_rounds = max(1, num_micro_batches // schedule.pp_group_size)
    schedule.microbatches_per_round = num_micro_batches // schedule.number_of_rounds
    if hasattr(schedule, "_calculate_single_rank_operations"):
        orders = {
            rank: schedule._calculate_single_rank_operations(rank)
            for rank in range(schedule.pp_group_size)
        }
    else:
        orders = schedule._get_pipeline_order()
    computed = set(LETTERS.values())
    return {
        rank: [
            (one.stage_index, one.computation_type, one.microbatch_index)
            for together in order
            if together is not None
            for one in together.sub_actions or (together,)
            if one.computation_type in computed
        ]
        for rank, order in orders.items()
    }


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_gpipe_is_torchs(stages: int, count: int) -> None:
    ours = build_schedule(ScheduleSpec(kind=ScheduleKind.GPIPE), stages, count)
    assert rows_of(ours) == made_by(theirs.ScheduleGPipe, stages, count)


@pytest.mark.parametrize(("stages", "count"), [size for size in SIZES if size[0] <= size[1]])
def test_1f1b_is_torchs(stages: int, count: int) -> None:
    """torch counts the forwards of its last rank from 1 in this list, which it only shows; it runs
    them from 0."""
    ours = rows_of(build_schedule(ScheduleSpec(), stages, count))
    known = made_by(theirs.Schedule1F1B, stages, count)
    last = known[stages - 1]
    known[stages - 1] = [(stage, kind, index - (kind is theirs.F)) for stage, kind, index in last]
    assert ours == known


@pytest.mark.parametrize(
    ("workers", "rounds", "chunks"), [(2, 1, 2), (2, 3, 2), (3, 2, 2), (4, 2, 3), (4, 4, 2)]
)
def test_interleaved_is_torchs(workers: int, rounds: int, chunks: int) -> None:
    spec = ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=chunks)
    ours = build_schedule(spec, workers * chunks, workers * rounds)
    assert rows_of(ours) == made_by(
        theirs.ScheduleInterleaved1F1B, workers * chunks, workers * rounds, chunks
    )


@pytest.mark.parametrize(("stages", "rounds"), [(1, 4), (2, 1), (2, 3), (3, 2), (4, 3), (8, 2)])
def test_zero_bubble_is_torchs(stages: int, rounds: int) -> None:
    ours = build_schedule(ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE), stages, stages * rounds)
    assert rows_of(ours) == made_by(theirs.ScheduleInterleavedZeroBubble, stages, stages * rounds)


@pytest.mark.parametrize(
    ("workers", "count"), [(1, 1), (1, 3), (2, 1), (2, 3), (2, 4), (3, 11), (4, 5), (4, 12)]
)
def test_zero_bubble_v_is_torchs(workers: int, count: int) -> None:
    ours = build_schedule(ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE_V), 2 * workers, count)
    assert rows_of(ours) == made_by(theirs.ScheduleZBVZeroBubble, 2 * workers, count, 2)


@pytest.mark.parametrize(
    ("workers", "count"), [(1, 2), (1, 5), (2, 4), (2, 7), (3, 6), (3, 9), (4, 8), (5, 16)]
)
def test_dualpipe_v_is_torchs(workers: int, count: int) -> None:
    """A forward and a backward that torch may overlap are one after the other here."""
    ours = build_schedule(ScheduleSpec(kind=ScheduleKind.DUALPIPE_V), 2 * workers, count)
    assert rows_of(ours) == made_by(theirs.ScheduleDualPipeV, 2 * workers, count, 2)


SPECS = [
    ScheduleSpec(kind=ScheduleKind.GPIPE),
    ScheduleSpec(),
    ScheduleSpec(kind=ScheduleKind.EAGER),
    ScheduleSpec(kind=ScheduleKind.KFKB, k=2),
    ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2),
    ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE),
    ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE_V),
    ScheduleSpec(kind=ScheduleKind.DUALPIPE_V),
]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize(("stages", "count"), [(2, 2), (4, 4), (4, 8), (6, 6)])
def test_torchs_dry_run_ends(spec: ScheduleSpec, stages: int, count: int) -> None:
    """With the messages that torch puts in: none is missing, none waits for ever, and all actions
    are done."""
    schedule = build_schedule(spec, stages, count)
    orders = {
        rank: [theirs._Action(*action) for action in row] for rank, row in rows_of(schedule).items()
    }
    told = theirs._add_send_recv(orders, schedule.worker_of, stages)
    played = theirs._simulate_comms_compute(told, schedule.worker_of, stages)
    done = [
        one
        for row in played.values()
        for one in row
        if one is not None and one.computation_type in LETTERS.values()
    ]
    assert len(done) == sum(len(row) for row in schedule.rows)
