"""Two islands on hosts of a lab: all are started at once, meet over the shaped link and
exchange."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.choose.islands import IslandOptions, find_island_plan
from argosy.lab.system import why_not
from argosy.planner import Settings
from argosy.runtime.processes.run_folder import read_lines
from benchmarks.lab.emulated import Job
from benchmarks.lab.islands import SAMPLES, lab_cluster, measure
from benchmarks.lab.run import known_of

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no lab here: {REASON}")


def test_islands_exchange_over_the_link_between_hosts(tmp_path: Path) -> None:
    job = Job(num_layers=4, forward_seconds=1e-3, values=64, weights=5_000)
    cluster = lab_cluster()
    known = known_of(job, cluster, SAMPLES, tmp_path)
    options = IslandOptions(count=2, sync_every=2)
    plan = find_island_plan(
        known.chain,
        cluster,
        global_batch=SAMPLES,
        options=options,
        settings=Settings(runnable=True),
        model=known.model,
    )
    assert measure(plan, cluster, 5, tmp_path / "measured", job) > 0
    lines = read_lines(tmp_path / "measured" / "run" / "island-1" / "exchanges.jsonl")
    shares = [island.global_batch for island in plan.islands]
    seen = [(line["step"], line["islands"], line["samples"]) for line in lines]
    assert seen == [
        (step, [0, 1], [count * share for share in shares])
        for step, count in ((2, 2), (4, 2), (5, 1))
    ]
