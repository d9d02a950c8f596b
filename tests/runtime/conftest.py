"""The ranks that the runtime's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool
from rank_pool import rank_pool as open_rank_pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    with open_rank_pool() as pool:
        yield pool
