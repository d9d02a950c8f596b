"""ZeRO that exchanges layer by layer: never slower than between actions, never faster than compute
or the links."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.calibrate.run import Degrees, even_plan
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.document import Document
from argosy.plan.plan import Plan
from argosy.sim.simulate import iteration_seconds
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

CHAIN = load_model("gpt2", sequence_length=1024)
FREE = "1000000 Gbit/s"


def nodes(bandwidth: str) -> Cluster:
    """Four nodes of one A100."""
    node = {
        "name": "n",
        "count": 4,
        "devices": {"kind": "A100-80GB", "count": 1},
        "nic": {"bandwidth": bandwidth},
    }
    return build_cluster(Document("test", {"name": "four", "nodes": [node]}, {}), folder=Path())


def seconds(bandwidth: str, *, zero: int, prefetch: bool, chain: Chain = CHAIN) -> float:
    cluster = nodes(bandwidth)
    plan: Plan = even_plan(
        Degrees(data=4, micro_batch=4, global_batch=48, zero=zero), chain, cluster
    )
    found = {
        whole: iteration_seconds(plan, chain, cluster, ComputeModel(prefetch=prefetch), whole=whole)
        for whole in (False, True)
    }
    assert found[False] == pytest.approx(found[True], rel=1e-6)
    return found[True]


def once_around(gigabits: float) -> float:
    """Seconds: three quarters of the weights leave each of four nodes."""
    return 0.75 * CHAIN.parameters * 2 / (gigabits * 1e9 / 8)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("gigabits", [5, 20, 100])
def test_prefetch_hides_what_it_can(zero: int, gigabits: int) -> None:
    compute = seconds(FREE, zero=zero, prefetch=True)
    plain, hidden = (seconds(f"{gigabits} Gbit/s", zero=zero, prefetch=on) for on in (False, True))
    links = 3 * {2: 1, 3: 3}[zero] * once_around(gigabits)
    assert max(compute, links) <= hidden * (1 + 1e-9)
    assert hidden <= plain * (1 + 1e-9)
    assert hidden <= compute + links + (zero == 2) * once_around(gigabits) + 0.01


def test_fast_links_hide_all_but_the_last_layer() -> None:
    """Of 14 layers the last scatter is exposed; between actions whole gathers and scatters are."""
    compute = seconds(FREE, zero=3, prefetch=True)
    plain, hidden = (seconds("400 Gbit/s", zero=3, prefetch=on) for on in (False, True))
    assert hidden == pytest.approx(compute + once_around(400) / 14, rel=0.02)
    assert plain > compute + 4 * once_around(400)
