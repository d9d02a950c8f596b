"""Whatever befalls an elastic run, it ends with the losses of one process, in time, and leaves
nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import draw, is_cut, play

SAMPLE = (68,)
SEEDS = range(74)


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_sample_of_misfortunes(seed: int, tmp_path: Path) -> None:
    play(draw(seed, cuts=is_cut(seed)), tmp_path, cuts=is_cut(seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed not in SAMPLE])
def test_all_misfortunes(seed: int, tmp_path: Path) -> None:
    play(draw(seed, cuts=is_cut(seed)), tmp_path, cuts=is_cut(seed))
