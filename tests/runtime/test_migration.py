"""Plans follow one another while a job runs: its losses are those of one process, and only what
must move moves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime.migration_cases import (
    Journey,
    alone,
    begin_and_move,
    broken,
    bytes_that_were_missing,
    group,
    hurried,
    plan_of,
    predicted_bytes,
    spread,
    travel,
    worst,
)
from runtime.rank_pool import RankError, RankPool

from argosy.cost.regions import Region, outside, shared_regions, volume
from argosy.runtime.state.moves import HeldPiece, RegionMove, moves_between, waves
from argosy.schedule import ScheduleKind, ScheduleSpec

KFKB = ScheduleSpec(kind=ScheduleKind.KFKB, k=2)
EAGER = ScheduleSpec(kind=ScheduleKind.EAGER)
INTERLEAVED = ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2)

TWO_BY_TWO = spread((3, {0: 3, 1: 1}, 3), (3, {2: 2, 3: 2}, 0))
LAYERS_MOVED = spread((2, {0: 3, 1: 1}, 3), (4, {2: 2, 3: 2}, 0))
THREE = spread((2, {1: 4}, 0), (2, {0: 2, 3: 2}, 1), (2, {2: 4}, 0), schedule=KFKB)
WIDE = spread((6, {0: 1, 1: 1, 2: 1, 3: 1}, 2))
WITH_IDLE = spread((4, {2: 3}, 0), (2, {0: 2, 1: 1}, 3))
ONE_RANK = spread((6, {3: 6}, 0))
WOVEN = spread((2, {0: 2}, 0), (1, {1: 2}, 0), (2, {0: 2}, 0), (1, {1: 2}, 0), schedule=INTERLEAVED)
SEVEN = spread((4, {0: 3, 1: 1}, 1), (3, {2: 2, 3: 2}, 3))
SEVEN_MOVED = spread((2, {3: 4}, 0), (5, {0: 1, 2: 3}, 3))
SEVEN_WIDE = spread((7, {0: 2, 1: 2}, 3))
SEVEN_APART = spread((3, {1: 4}, 0), (2, {2: 2, 3: 2}, 1), (2, {0: 4}, 0))
HEAD = spread((3, {0: 2, 1: 2}, 1), (2, {2: 4}, 0), (1, {3: 4}, 0))
HEAD_MOVED = spread((3, {0: 2, 1: 2}, 1), (2, {3: 4}, 0), (1, {2: 4}, 0))
HEAD_WITH_EMBEDDING = spread((5, {3: 4}, 0), (1, {0: 2, 1: 2}, 2))

EVEN_GROUPS = spread(
    (3, [group(0, 1, samples=4)], 0), (3, [group(2, 3, samples=4, ratios=(0.7, 0.3))], 0)
)
UNEQUAL_GROUPS = spread((6, [group(0, 2, samples=2, ratios=(0.3, 0.7)), group(1, 3, samples=2)], 3))
OTHER_WIDTHS = spread(
    (2, {3: 4}, 0), (4, [group(0, 1, 2, samples=4, ratios=(0.5, 0.3, 0.2))], 0), schedule=KFKB
)
PARTS = spread(
    (3, [group(0, 1, samples=4, ratios=(0.7, 0.3))], 0, {"context": 2}), (3, {2: 3, 3: 1}, 1)
)
PARTS_BESIDE_GROUP = spread(
    (2, [group(0, 3, samples=4)], 3),
    (4, [group(1, 2, samples=4, ratios=(0.4, 0.6))], 0, {"context": 2}),
)
MORE_PARTS = spread((6, [group(3, 1, 0, samples=4, ratios=(0.5, 0.3, 0.2))], 2, {"context": 3}))
PARTS_ON_GROUPS = spread(
    (6, [group(0, 1, 2, 3, samples=4, ratios=(0.3, 0.2, 0.3, 0.2))], 1, {"context": 2})
)
SHARED_EXPERTS = spread((2, {0: 4}, 0), (4, {1: 1, 2: 1, 3: 2}, 0, {"expert": 3}))
UNEVEN_EXPERTS = spread((6, {2: 2, 0: 2}, 1, {"expert": 2, "experts": (5, 1)}))
EXPERTS_TWICE = spread((6, {0: 1, 1: 1, 2: 1, 3: 1}, 3, {"expert": 2}))
EXPERTS_ON_GROUPS = spread(
    (
        6,
        [group(0, 1, samples=2, ratios=(0.7, 0.3)), group(2, 3, samples=2, ratios=(0.7, 0.3))],
        3,
        {"expert": 2},
    )
)
EXPERTS_BESIDE_GROUP = spread(
    (3, [group(0, 3, samples=4)], 0), (3, {1: 1, 2: 3}, 2, {"expert": 2, "experts": (2, 4)})
)
EXPERTS_OF_PARTS = spread(
    (2, {0: 4}, 0),
    (4, [group(1, 2, samples=4, ratios=(0.6, 0.4))], 1, {"context": 2, "expert": 2}),
)

JOURNEYS = {
    "through every kind of plan": Journey(
        first=TWO_BY_TWO,
        changes=(
            None,
            LAYERS_MOVED,
            KFKB,
            THREE,
            (1, (3, 1)),
            WIDE,
            WITH_IDLE,
            EAGER,
            ONE_RANK,
            WOVEN,
            TWO_BY_TWO,
        ),
    ),
    "tied across stages": Journey(
        model="t5",
        tied=True,
        first=SEVEN,
        changes=(None, SEVEN_MOVED, (1, (2, 2)), SEVEN, SEVEN_WIDE, SEVEN_APART),
    ),
    "a head that shares its table": Journey(
        tied=True,
        first=HEAD,
        changes=(None, HEAD_MOVED, HEAD_WITH_EMBEDDING, WIDE, TWO_BY_TWO, HEAD),
    ),
    "through tensor-parallel groups": Journey(
        tied=True,
        first=TWO_BY_TWO,
        changes=(None, EVEN_GROUPS, None, UNEQUAL_GROUPS, OTHER_WIDTHS, TWO_BY_TWO),
    ),
    "through parts of a sequence": Journey(
        model="llama",
        tied=True,
        first=TWO_BY_TWO,
        changes=(
            None,
            PARTS,
            PARTS_BESIDE_GROUP,
            None,
            PARTS_ON_GROUPS,
            MORE_PARTS,
            LAYERS_MOVED,
        ),
    ),
    "through shared experts": Journey(
        model="mixture",
        first=SHARED_EXPERTS,
        changes=(None, UNEVEN_EXPERTS, EXPERTS_TWICE, WITH_IDLE, None, SHARED_EXPERTS),
    ),
    "through experts of groups and parts": Journey(
        model="mixture",
        first=EXPERTS_ON_GROUPS,
        changes=(None, UNEVEN_EXPERTS, EXPERTS_OF_PARTS, EXPERTS_BESIDE_GROUP, EXPERTS_ON_GROUPS),
    ),
    "before the first step": Journey(first=WITH_IDLE, changes=(TWO_BY_TWO, None)),
    "built without values": Journey(
        first=WITH_IDLE, changes=(None, WIDE, TWO_BY_TWO, None), recorded=True
    ),
    "buffers that change": Journey(
        model="counting",
        first=spread((2, {0: 4}, 0), (4, {2: 4}, 0)),
        changes=(None, spread((4, {1: 4}, 0), (2, {0: 4}, 0)), None),
    ),
}


@pytest.mark.parametrize("name", JOURNEYS)
def test_losses_and_weights_are_those_of_one_process_and_only_what_must_move_moves(
    ranks: RankPool, name: str
) -> None:
    journey = JOURNEYS[name]
    results = ranks(4, travel, journey)
    assert worst([outcome for _, _, outcome, _ in results], alone(journey)) < 1e-7
    assert {steps for *_, steps in results} == {len(journey.changes)}
    for steps in zip(*(moves for _, moves, _, _ in results), strict=True):
        for before, after, moved in steps:
            assert moved.received == moved.predicted
            if name != "buffers that change":  # the oracle sees weights and state
                assert moved.received == bytes_that_were_missing(before, after)
        assert sum(moved.sent for *_, moved in steps) == steps[0][2].total > 0


@pytest.mark.parametrize(
    "name", ["through every kind of plan", "tied across stages", "a head that shares its table"]
)
def test_the_cost_model_prices_the_bytes_that_the_runtime_moves(ranks: RankPool, name: str) -> None:
    """To 1 %: the cost model divides a layer, ZeRO the rows of each weight, which may be odd."""
    journey = JOURNEYS[name]
    results = ranks(4, travel, journey)
    received = [[moved.received for *_, moved in moves] for _, moves, _, _ in results]
    for found, predicted in zip(zip(*received, strict=True), predicted_bytes(journey), strict=True):
        assert list(found) == pytest.approx(predicted, rel=0.01)


LATE = Journey(first=TWO_BY_TWO, changes=(LAYERS_MOVED, THREE, WIDE, WITH_IDLE))


def test_state_that_comes_late_delays_updates_and_whatever_reads_it(
    ranks: RankPool, tmp_path: Path
) -> None:
    """A loss is computed before the state is there; a further move and a checkpoint wait for it."""
    results = ranks(4, hurried, LATE, str(tmp_path))
    # micro-batches have four samples in the first three steps, and three in the last
    steps = replace(LATE, changes=(None, LAYERS_MOVED, WIDE, WITH_IDLE))
    wanted = alone(steps).losses
    for losses, under_way, continued in results:
        assert losses == pytest.approx(wanted, abs=1e-9)
        assert continued == pytest.approx(wanted[-1:], abs=1e-9)
        assert all(under_way)
    assert any(under_way for _, under_way, _ in results)


def test_state_that_cannot_come_ends_the_step(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="no route"):
        ranks(4, broken, LATE)


def test_a_plan_that_is_not_for_this_job_is_refused_by_name(ranks: RankPool) -> None:
    other = replace(plan_of(TWO_BY_TWO, "gpt"), global_batch=16)
    with pytest.raises(RankError, match=r"plan\.global_batch: found 16, expected 12"):
        ranks(4, begin_and_move, Journey(first=TWO_BY_TWO, changes=()), other)


SHAPE = (6, 4)
CELLS = list(itertools.product(*map(range, SHAPE)))
intervals = [
    st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted).map(tuple) for size in SHAPE
]


def apart(found: list[Region]) -> list[Region]:
    """The same elements, each in one region."""
    return [part for at, region in enumerate(found) for part in outside([region], found[:at])]


regions: st.SearchStrategy[Any] = st.lists(st.tuples(*intervals), max_size=3).map(apart)
EVERYTHING = [tuple((0, size) for size in SHAPE)]


def cells(found: Sequence[Region]) -> list[tuple[int, ...]]:
    """Elements, once for each region that has them."""
    return [
        cell
        for region in found
        for cell in itertools.product(*(range(*interval) for interval in region))
    ]


@given(regions, regions)
def test_what_is_outside_is_in_one_and_not_in_the_other(
    wanted: list[Region], held: list[Region]
) -> None:
    assert set(cells(outside(wanted, held))) == set(cells(wanted)) - set(cells(held))
    assert volume(wanted) == len(set(cells(wanted)))


@given(st.lists(regions, max_size=4))
def test_every_element_is_summed_by_all_that_hold_it(held: list[list[Region]]) -> None:
    found = shared_regions(dict(enumerate(held)))
    assert sorted(cells([region for region, _ in found])) == sorted(
        {cell for own in held for cell in cells(own)}
    )
    for region, ranks in found:
        for cell in cells([region]):
            assert ranks == tuple(rank for rank, own in enumerate(held) if cell in cells(own))


@st.composite
def pieces(draw: st.DrawFn) -> HeldPiece:
    """Something that somebody holds, each element once or more often."""
    before = {rank: draw(regions) for rank in range(3)} | {3: EVERYTHING}
    after = {rank: draw(regions) for rank in draw(st.sets(st.integers(0, 3)))}
    return HeldPiece(
        name=draw(st.sampled_from("abc")), what="value", item_bytes=8, before=before, after=after
    )


def node_of(rank: int) -> int:
    """Return the first rank of a rank's node; nodes have two ranks."""
    return rank - rank % 2


def direct(moves: Sequence[RegionMove], piece: HeldPiece, target: int) -> set[tuple[int, ...]]:
    """Return the elements that a rank receives from ranks that held them before."""
    return {
        cell
        for move in moves
        if move.piece is piece and move.target == target and not move.is_passed_on
        for cell in cells([move.region])
    }


@given(st.lists(pieces(), max_size=4))
def test_every_missing_element_comes_once_from_somebody_who_has_it(some: list[HeldPiece]) -> None:
    moves = moves_between(some, ["n0.0", "n0.1", "n1.0", "n1.1"])
    for piece in some:
        for target, wanted in piece.after.items():
            mine = [move for move in moves if move.piece is piece and move.target == target]
            arrived = cells([move.region for move in mine])
            assert sorted(arrived) == sorted(set(cells(wanted)) - set(cells(piece.before[target])))
            for move in mine:
                given = set(cells(piece.before[move.source]))
                if move.is_passed_on:
                    assert node_of(move.source) == node_of(target)
                    given = direct(moves, piece, move.source)
                assert set(cells([move.region])) <= given
        for node in {node_of(target) for target in piece.after}:
            held = {cell for rank in (node, node + 1) for cell in cells(piece.before[rank])}
            crossing = [
                cell
                for move in moves
                if move.piece is piece and node_of(move.target) == node != node_of(move.source)
                for cell in cells([move.region])
            ]
            assert len(crossing) == len(set(crossing))
            assert not set(crossing) & held
    portions = list(waves(some, moves, most=100))
    assert sorted(map(id, (piece for found, _ in portions for piece in found))) == sorted(
        map(id, some)
    )
    assert sum(len(under_way) for _, under_way in portions) == len(moves)
