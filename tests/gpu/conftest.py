"""GPU tests (``make test-gpu``) use the NCCL that torch loads: a GPU for each rank or, if NCCL can,
one for all."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from runtime.rank_pool import RankPool, rank_pool


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path.parent.name == "gpu" and not torch.cuda.is_available():
        pytest.skip(
            "no GPU that torch can use" if item.config.getoption("--gpu") else "needs --gpu"
        )


@pytest.fixture(scope="session")
def nccl() -> Iterator[RankPool]:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    with rank_pool("nccl") as pool:
        yield pool


@pytest.fixture(scope="session")
def gloo() -> Iterator[RankPool]:
    with rank_pool("gloo") as pool:
        yield pool
