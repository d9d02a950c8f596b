"""Uneven collectives on real ranks give what one process would have computed, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime.collective_cases import converts, fills, gathers, refuses, scatters
from runtime.rank_pool import RankPool

from argosy.cost.group import GroupCollective
from argosy.runtime.communication.collectives import GatherBy, offsets, split_by
from argosy.space.operations.sharding import PARTIAL, REPLICATED, State, sharded

SIZES = [(1,), (7, 3), (5, 0), (0, 4, 6), (4, 3, 2, 1)]


@pytest.mark.parametrize("by", GatherBy)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_gather_concatenates_the_parts(
    ranks: RankPool, sizes: tuple[int, ...], by: GatherBy
) -> None:
    assert all(ranks(len(sizes), gathers, sizes, by))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_vectors_are_filled_at_the_same_time(ranks: RankPool, sizes: tuple[int, ...]) -> None:
    assert all(ranks(len(sizes), fills, sizes))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_scatter_gives_each_member_its_part_of_the_sum(
    ranks: RankPool, sizes: tuple[int, ...]
) -> None:
    assert all(ranks(len(sizes), scatters, sizes))


ROWS, COLUMNS, HALVES = sharded(0, 6), sharded(1, 10), sharded(1, 5, 2)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (GroupCollective.ALL_TO_ALL, ROWS, COLUMNS),
        (GroupCollective.ALL_TO_ALL, HALVES, ROWS),
        (GroupCollective.ALL_GATHER, COLUMNS, REPLICATED),
        (GroupCollective.ALL_REDUCE, PARTIAL, REPLICATED),
        (GroupCollective.REDUCE_SCATTER, PARTIAL, HALVES),
    ],
    ids=str,
)
def test_a_conversion_and_its_gradient_are_those_of_the_whole(
    ranks: RankPool, kind: GroupCollective, before: State, after: State
) -> None:
    assert ranks(2, converts, (0.7, 0.3), before, after, kind) == [[], []]


def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent(ranks: RankPool) -> None:
    assert all(
        "found a tensor of shape (5,), expected a vector of" in text
        for text in ranks(2, refuses, (2, 3), 5)
    )
    assert all(
        "one size for each of the 2 members" in text for text in ranks(2, refuses, (2, 3, 4), 2)
    )


@given(st.integers(0, 1000), st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_splitting_in_proportion_loses_nothing(count: int, weights: list[float]) -> None:
    sizes = split_by(count, weights)
    assert sum(sizes) == count
    assert all(
        abs(size - count * weight / sum(weights)) < 1
        for size, weight in zip(sizes, weights, strict=True)
    )
    assert offsets(sizes)[0] == 0
