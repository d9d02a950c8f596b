"""Ours against DAPPLE's and PipeDream's plans for DAPPLE's own models and clusters, in the exact
simulator."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.dapple import CLUSTERS, MODELS, PROFILES, played

pytestmark = pytest.mark.skipif(
    not PROFILES.is_dir(), reason=f"no {PROFILES.name} beside the repository"
)
QUICK = [("bert-48", "C"), ("vgg-19", "C")]
OTHERS = [case for case in itertools.product(MODELS, CLUSTERS) if case not in QUICK]


@pytest.mark.parametrize(
    ("model", "config"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)],
)
def test_ours_is_never_slower(model: str, config: str) -> None:
    found = played(model, config)
    assert found.ours <= found.dapple * (1 + 1e-9)
    assert found.ours <= found.pipedream * (1 + 1e-9)
