"""The judge of the benchmarks, written anew from Sailor's formulas, against figures that were
published or measured."""

from __future__ import annotations

from typing import Any

import pytest
from support.measured_data import SAILOR, needs_sailor

from benchmarks.sailor_clusters import BETWEEN, FLOOR, INSIDE, SIZES, sailor_cluster
from benchmarks.sailor_judge import Judge

pytestmark = needs_sailor
SPLITS = {
    (4, 12): (4, [(9, "V100-16", 2), (4, "V100-16", 1), (13, "A100-40", 1)]),
    (8, 8): (8, [(7, "V100-16", 1), (19, "A100-40", 1)]),
    (8, 24): (8, [(9, "V100-16", 2), (4, "V100-16", 1), (13, "A100-40", 1)]),
    (16, 16): (16, [(7, "V100-16", 1), (19, "A100-40", 1)]),
    (32, 96): (16, [(9, "V100-16", 4), (4, "V100-16", 2), (13, "A100-40", 2)]),
}
"""Plain uneven splits of the layers, two samples per replica: replicas, and layers, kind and width
of each stage."""


def form(replicas: int, stages: list[tuple[int, str, int]]) -> dict[str, Any]:
    layers, at = [], 0
    for count, _, _ in stages:
        layers.append(list(range(at, at + count)))
        at += count
    pipeline = {
        "layers_per_stage": layers,
        "tmp_per_stage": [
            [[[[kind, width, "us-central1-a"]], width]] * replicas for _, kind, width in stages
        ],
        "dp": [replicas] * len(stages),
    }
    return {"mbs": 2, "pipeline_list": [pipeline]}


@pytest.mark.parametrize("size", SPLITS, ids=str)
def test_uneven_splits_reach_what_sailors_simulator_gave_them(size: tuple[int, int]) -> None:
    verdict = Judge(SAILOR).verdict(form(*SPLITS[size]))
    assert verdict.fits
    assert verdict.iterations_per_second == pytest.approx(FLOOR[SIZES.index(size)], abs=5e-5)


def test_the_clusters_are_those_of_the_published_bandwidths() -> None:
    judge = Judge(SAILOR)
    zone = judge.network["us-central1-a"]
    for ours, theirs in (("A100-40GB", "A100-40"), ("V100-16GB", "V100-16")):
        between = zone[theirs]["4"]["us-central1-a"][theirs]["4"][-1]
        assert BETWEEN[ours] == pytest.approx(between, rel=1e-3)
        assert INSIDE[ours] > 10 * BETWEEN[ours]
    cluster = sailor_cluster(8, 24)
    assert len(cluster.devices) == 32
    assert len(cluster.nodes) == 8


def test_too_much_does_not_fit() -> None:
    assert not Judge(SAILOR).verdict(form(4, [(26, "V100-16", 1)])).fits
