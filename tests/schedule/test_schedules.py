"""Laws of schedules: what every generated one obeys, and how broken ones are refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import event, given, settings
from support.strategies import disturbed_schedules, full_mesh

from argosy.errors import InputError
from argosy.schedule import (
    ActionKind,
    Schedule,
    ScheduleKind,
    ScheduleSpec,
    build_schedule,
    check_schedule,
    in_flight,
    with_communication,
)
from argosy.schedule.action import parse_rows
from argosy.schedule.communicate import check_channels
from argosy.sim.engine.exact import simulate_exact
from argosy.timeline import Timeline
from benchmarks.bare_pipeline import StageCost, pipeline_graph
from benchmarks.unit_grid import grid, unit_times

KFKB, INTERLEAVED = ScheduleKind.KFKB, ScheduleKind.INTERLEAVED
SIZES = list(itertools.product(range(1, 7), range(1, 13)))


def specs(num_stages: int, num_micro_batches: int) -> Iterator[ScheduleSpec]:
    for kind in ScheduleKind:
        is_wide = kind is not ScheduleKind.DUALPIPE_V or num_micro_batches >= num_stages
        if kind not in (KFKB, INTERLEAVED) and (not kind.is_v or (num_stages % 2 == 0 and is_wide)):
            yield ScheduleSpec(kind=kind)
    for k in range(1, num_micro_batches + 2):
        yield ScheduleSpec(kind=KFKB, k=k)
    for chunks in range(1, num_stages + 1):
        if num_stages % chunks == 0 and num_micro_batches % (num_stages // chunks) == 0:
            yield ScheduleSpec(kind=INTERLEAVED, chunks=chunks)


def generated() -> Iterator[Schedule]:
    for num_stages, count in SIZES:
        for spec in specs(num_stages, count):
            yield build_schedule(spec, num_stages, count)


def simulated(schedule: Schedule) -> Timeline:
    cost = StageCost(forward=1, backward=2, output_bytes=0.5, activation_bytes=1)
    cluster = full_mesh(schedule.num_workers)
    names = [device.name for device in cluster.devices]
    return simulate_exact(pipeline_graph(schedule, [cost] * schedule.num_stages, names), cluster)


def rows(text: str, num_stages: int, num_micro_batches: int) -> Schedule:
    return Schedule(ScheduleKind.ONE_F_ONE_B, num_stages, num_micro_batches, parse_rows(text))


def refusal(schedule: Schedule, **options: tuple[int, ...]) -> list[str]:
    with pytest.raises(InputError) as caught:
        check_schedule(schedule, **options)
    return str(caught.value).split("\n")


def test_every_generated_schedule_passes_the_checker() -> None:
    for schedule in generated():
        check_schedule(schedule)


@pytest.mark.parametrize("lookahead", range(4))
def test_every_generated_schedule_keeps_the_order_of_its_channels(lookahead: int) -> None:
    for schedule in generated():
        communicating = with_communication(schedule, lookahead=lookahead)
        check_schedule(communicating)
        check_channels(communicating)


def test_communication_adds_one_send_and_one_receive_per_crossing_and_moves_no_computation() -> (
    None
):
    for schedule in generated():
        communicating = with_communication(schedule)
        computing = [tuple(a for a in row if a.kind.is_computation) for row in communicating.rows]
        assert tuple(computing) == schedule.rows
        crossings = sum(
            schedule.worker_of(stage) != schedule.worker_of(stage + 1)
            for stage in range(schedule.num_stages - 1)
        )
        added = [a for row in communicating.rows for a in row if not a.kind.is_computation]
        assert len(added) == len(set(added)) == 4 * crossings * schedule.num_micro_batches


@pytest.mark.parametrize("lookahead", range(3))
def test_a_receive_is_posted_that_many_computations_before_the_action_that_needs_it(
    lookahead: int,
) -> None:
    """Or at the beginning of the row."""
    for num_stages, count in [(2, 5), (4, 6), (3, 1)]:
        schedule = with_communication(
            build_schedule(ScheduleSpec(), num_stages, count), lookahead=lookahead
        )
        for row in schedule.rows:
            for at, action in enumerate(row):
                needs = {
                    ActionKind.RECEIVE_FORWARD: ActionKind.FORWARD,
                    ActionKind.RECEIVE_BACKWARD: ActionKind.BACKWARD,
                }
                if action.kind in needs:
                    later = [a for a in row[at:] if a.kind.is_computation]
                    ahead = next(
                        index
                        for index, a in enumerate(later)
                        if (a.kind, a.micro_batch) == (needs[action.kind], action.micro_batch)
                    )
                    before = sum(a.kind.is_computation for a in row[:at])
                    assert ahead == min(lookahead, before + ahead)


@pytest.mark.parametrize(("num_stages", "count"), SIZES)
def test_k_is_1f1b_at_1_and_gpipe_at_M(num_stages: int, count: int) -> None:
    one = build_schedule(ScheduleSpec(kind=KFKB, k=1), num_stages, count)
    many = build_schedule(ScheduleSpec(kind=KFKB, k=count), num_stages, count)
    assert (
        one.rows
        == build_schedule(ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B), num_stages, count).rows
    )
    assert (
        many.rows == build_schedule(ScheduleSpec(kind=ScheduleKind.GPIPE), num_stages, count).rows
    )


def test_interleaving_one_chunk_runs_every_micro_batch_once_per_worker() -> None:
    for workers, groups in [(1, 3), (2, 2), (4, 2)]:
        schedule = build_schedule(
            ScheduleSpec(kind=INTERLEAVED, chunks=1), workers, workers * groups
        )
        assert all(len(row) == 2 * workers * groups for row in schedule.rows)


def test_in_flight_is_the_depth_of_the_kind() -> None:
    """gpipe M; 1f1b S - s; eager 2 (S - s) - 1; kfkb k (S - s); zero-bubble S, each at most M."""
    for num_stages, count in SIZES:
        left = [num_stages - stage for stage in range(num_stages)]
        expected = {
            ScheduleKind.GPIPE: [count] * num_stages,
            ScheduleKind.ONE_F_ONE_B: left,
            ScheduleKind.EAGER: [2 * each - 1 for each in left],
        }
        for kind, depth in expected.items():
            schedule = build_schedule(ScheduleSpec(kind=kind), num_stages, count)
            assert in_flight(schedule) == tuple(min(count, each) for each in depth)
        for k in (2, 3):
            schedule = build_schedule(ScheduleSpec(kind=KFKB, k=k), num_stages, count)
            assert in_flight(schedule) == tuple(min(count, k * each) for each in left)
        zero_bubble = build_schedule(ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE), num_stages, count)
        assert max(in_flight(zero_bubble)) <= num_stages


@pytest.mark.parametrize(("num_stages", "count"), [(1, 3), (2, 6), (3, 3), (4, 9), (6, 12)])
def test_in_flight_is_the_simulated_peak(num_stages: int, count: int) -> None:
    for spec in specs(num_stages, count):
        if spec.kind.is_chunked:
            continue
        schedule = build_schedule(spec, num_stages, count)
        peak = simulated(schedule).peak_memory()
        assert tuple(peak[f"n{stage}.0"] for stage in range(num_stages)) == in_flight(schedule)


def test_an_interleaved_worker_runs_ahead_by_twice_its_distance_from_the_end_and_all_chunks_but_one() -> (
    None
):
    """And holds one chunk more, as its row says."""
    for workers, chunks, groups in [(1, 2, 3), (2, 2, 2), (3, 2, 2), (4, 2, 3)]:
        schedule = build_schedule(
            ScheduleSpec(kind=INTERLEAVED, chunks=chunks), workers * chunks, workers * groups
        )
        peak = simulated(schedule).peak_memory()
        for worker, row in enumerate(schedule.rows):
            held = max(
                itertools.accumulate(
                    1 if action.kind is ActionKind.FORWARD else -1 for action in row
                )
            )
            ahead = 2 * (workers - worker - 1) + (chunks - 1) * workers
            assert peak[f"n{worker}.0"] == held == min(ahead + 1, chunks * workers * groups)


@settings(max_examples=120, deadline=None)
@given(disturbed_schedules())
def test_what_the_checker_passes_never_deadlocks_and_what_it_refuses_does(
    schedule: Schedule,
) -> None:
    computations = sum(len(row) for row in schedule.rows)
    try:
        check_schedule(schedule)
    except InputError:
        event("refused")
        with pytest.raises(AssertionError, match="deadlocks"):
            simulated(schedule)
        return
    event("passed")
    timeline = simulated(schedule)
    assert timeline.stalled is None
    assert len(timeline.iteration_ends) == 1
    assert sum(not span.kind.is_communication for span in timeline.spans) == computations


@settings(max_examples=60, deadline=None)
@given(disturbed_schedules())
def test_channels_in_order_and_no_deadlock_mean_that_receives_can_be_matched(
    schedule: Schedule,
) -> None:
    """With receives posted just in time and sends that wait for nobody, the rows run to their
    end."""
    communicating = with_communication(schedule, lookahead=0)
    try:
        check_schedule(communicating)
        check_channels(communicating)
    except InputError:
        return
    sent: set[tuple[int, int, bool]] = set()
    position = [0] * len(communicating.rows)
    moved = True
    while moved:
        moved = False
        for worker, row in enumerate(communicating.rows):
            while position[worker] < len(row):
                action = row[position[worker]]
                forward = action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)
                if action.kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD):
                    sent.add((action.stage + (1 if forward else -1), action.micro_batch, forward))
                receives = action.kind in (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)
                if receives and (action.stage, action.micro_batch, forward) not in sent:
                    break
                position[worker] += 1
                moved = True
    assert position == [len(row) for row in communicating.rows]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "0F0\n1F0 1B0",
            ["stage 0 micro-batch 0: found 1 F, expected 1 F and 1 B, or 1 F, 1 I and 1 W"],
        ),
        (
            "0F0 0F0 0B0\n1F0 1B0",
            ["stage 0 micro-batch 0: found 2 F, 1 B, expected 1 F and 1 B, or 1 F, 1 I and 1 W"],
        ),
        (
            "0F0 0I0\n1F0 1I0 1W0",
            ["stage 0 micro-batch 0: found 1 F, 1 I, expected 1 F and 1 B, or 1 F, 1 I and 1 W"],
        ),
        (
            "0F0 0B0 1F0\n1B0",
            ["worker 0: found 1F0, expected only stages of worker 0"],
        ),
        (
            "0F0 0B0 2F0 2B0\n1F0 1B0",
            ["worker 0: found 2F0, expected only 2 stages and 1 micro-batches, counted from 0"],
        ),
        (
            "0F0 0B0 0F1 0B1\n1F0 1B0",
            ["worker 0: found 0F1, expected only 2 stages and 1 micro-batches, counted from 0"],
        ),
        (
            "0B0 0F0\n1F0 1B0",
            [
                "worker 0: found 0B0 blocked by 0F0, expected an order without deadlock",
                "worker 1: found 1F0 blocked by 0F0, expected an order without deadlock",
            ],
        ),
        (
            "0F0 0I0 0W0\n1W0 1F0 1I0",
            [
                "worker 0: found 0I0 blocked by 1B0, expected an order without deadlock",
                "worker 1: found 1W0 blocked by 1I0, expected an order without deadlock",
            ],
        ),
    ],
)
def test_a_broken_schedule_is_refused_by_name(text: str, problems: list[str]) -> None:
    assert refusal(rows(text, 2, 1)) == problems


def test_a_worker_that_does_nothing_is_refused() -> None:
    schedule = Schedule(ScheduleKind.GPIPE, 2, 1, (*parse_rows("0F0 0B0"), ()))
    expected = "1 F and 1 B, or 1 F, 1 I and 1 W"
    assert refusal(schedule) == [f"stage 1 micro-batch 0: found nothing, expected {expected}"]


def test_all_workers_of_a_deadlock_are_named_with_what_they_wait_for() -> None:
    schedule = rows("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", 2, 2)
    assert refusal(schedule) == [
        "worker 0: found 0B0 blocked by 1B0, expected an order without deadlock",
        "worker 1: found 1F1 blocked by 0F1, expected an order without deadlock",
    ]


def test_more_in_flight_than_allowed_is_refused_per_stage() -> None:
    schedule = build_schedule(ScheduleSpec(kind=KFKB, k=2), 3, 8)
    check_schedule(schedule, limit=(6, 4, 2))
    assert refusal(schedule, limit=(5, 4, 1)) == [
        "stage 0: found 6 micro-batches in flight, expected at most 5",
        "stage 2: found 2 micro-batches in flight, expected at most 1",
    ]


def test_channels_received_from_in_another_order_are_refused() -> None:
    schedule = rows(
        "0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1\n1RF1 1F1 1RF0 1F0 1B0 1SB0 1B1 1SB1", 2, 2
    )
    check_schedule(schedule)
    with pytest.raises(InputError) as caught:
        check_channels(schedule)
    assert str(caught.value) == (
        "activations from worker 0 to 1: found receives in the order [(1, 1), (1, 0)]..., "
        "expected the order of the sends [(1, 0), (1, 1)]..."
    )


@pytest.mark.parametrize(
    ("spec", "stages", "count", "message"),
    [
        (ScheduleSpec(), 0, 1, "num_stages: found 0, expected at least 1 stage"),
        (ScheduleSpec(), 1, 0, "num_micro_batches: found 0, expected at least 1 micro-batch"),
        (ScheduleSpec(kind=KFKB, k=0), 2, 4, "schedule.k: found 0, expected k of at least 1"),
        (
            ScheduleSpec(kind=ScheduleKind.EAGER, depth=(5, 1)),
            2,
            4,
            "schedule.depth[0]: found 5, expected a depth between 1 and the 4 micro-batches",
        ),
        (
            ScheduleSpec(kind=INTERLEAVED, chunks=2),
            5,
            4,
            "schedule.chunks: found 2, expected a number of chunks that divides the 5 stages",
        ),
        (
            ScheduleSpec(kind=INTERLEAVED, chunks=2),
            6,
            5,
            "num_micro_batches: found 5, expected a multiple of the 3 workers for an interleaved schedule; "
            "the nearest are 3 and 6",
        ),
        (
            ScheduleSpec(kind=INTERLEAVED, chunks=2),
            6,
            2,
            "num_micro_batches: found 2, expected a multiple of the 3 workers for an interleaved schedule; "
            "the nearest are 3",
        ),
        (
            ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE_V),
            3,
            4,
            "num_stages: found 3, expected an even number of stages, two for each worker of zero-bubble-v",
        ),
        (
            ScheduleSpec(kind=ScheduleKind.DUALPIPE_V),
            4,
            3,
            "num_micro_batches: found 3, expected at least 4 micro-batches, as many as stages, for dualpipe-v",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(
    spec: ScheduleSpec, stages: int, count: int, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        build_schedule(spec, stages, count)
    assert str(caught.value) == message


def test_the_grid_takes_the_time_of_the_simulation_without_transfers() -> None:
    for num_stages, count in [(1, 1), (2, 5), (4, 8)]:
        for spec in specs(num_stages, count):
            schedule = build_schedule(spec, num_stages, count)
            cluster = full_mesh(schedule.num_workers)
            names = [device.name for device in cluster.devices]
            costs = [StageCost(forward=1, backward=2)] * num_stages
            end = simulate_exact(pipeline_graph(schedule, costs, names), cluster).end
            assert max(end for _, end in unit_times(schedule).values()) == end


def test_a_grid_can_be_cut() -> None:
    lines = grid(build_schedule(ScheduleSpec(), 2, 3), width=4).split("\n")
    assert lines == ["0 | F0 F1 .  . ...", "1 | .  F0 B0 B0 ..."]
