"""The ranks that the runtime's tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from runtime.rank_pool import RankPool
from runtime.rank_pool import rank_pool as open_rank_pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    with open_rank_pool() as pool:
        yield pool


@pytest.fixture(autouse=True)
def own_interfaces() -> Iterator[None]:
    """What a run that meets inside a test's own process sets, no other process of later tests
    inherits."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
