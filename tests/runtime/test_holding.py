"""What ranks hold at the beginning: the same where they hold the same, whole or in rows, whatever
its dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime.holding_cases import (
    buffers_of_ranks_that_drew_apart,
    patience_of_groups,
    train_from_a_file,
    train_mixed,
)
from runtime.rank_pool import RankPool


def test_replicas_begin_with_the_same_buffers(ranks: RankPool) -> None:
    first, second, third = ranks(3, buffers_of_ranks_that_drew_apart)
    assert second[1] == third[1]
    assert first[0][0] == second[1][3], "a table that two stages have is one"


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_rows_of_several_dtypes_travel_together(ranks: RankPool, zero: int) -> None:
    whole, rows = (ranks(2, train_mixed, level) for level in (0, zero))
    for losses, _ in rows:
        assert losses == pytest.approx(whole[0][0], rel=1e-3)
    for name, values in whole[0][1].items():
        assert [*rows[0][1][name], *rows[1][1][name]] == pytest.approx(
            values, rel=1e-2, abs=1e-2
        ), name


@pytest.mark.parametrize("zero", [0, 3])
def test_weights_may_be_views_of_a_file(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    """ZeRO 3 frees and allocates the memory of each weight by itself."""
    for rank in range(2):
        (tmp_path / f"weights.{rank}").write_bytes(bytes(4 * (4 * 4 + 4)))
    from_file = ranks(2, train_from_a_file, zero, str(tmp_path / "weights"))
    assert from_file == ranks(2, train_from_a_file, zero, None)


def test_some_ranks_wait_as_long_as_all_do(ranks: RankPool) -> None:
    for every, some in ranks(2, patience_of_groups):
        assert every == some
