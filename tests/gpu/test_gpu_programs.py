"""Captured programs over NCCL, on three ranks, have the losses of one process on the CPU."""

from __future__ import annotations

import pytest
from gpu.gpu_ranks import need_ranks
from runtime.rank_pool import RankPool
from runtime.test_programs import check

PROGRAMS = (
    "dropout",
    "lstm",
    "transformer_of_torch",
    "spectral_norm",
    "shuffled_pairs",
    "classes_with_weights",
    "images_with_instance_norm",
)


@pytest.mark.parametrize("way", ["stages", "group"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_over_nccl(nccl: RankPool, name: str, way: str) -> None:
    need_ranks(3)
    check(nccl, name, way)
