"""One plan on real processes over a real shaped link, with emulated compute: it takes about what
the simulator says."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.adapt.recorded import seen_in
from argosy.lab.system import why_not
from argosy.timeline.file import load_timeline
from benchmarks.lab.cases import Case, cluster_of, kfkb, plan_of
from benchmarks.lab.emulated import Job
from benchmarks.lab.run import known_of, play

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no lab here: {REASON}"),
    pytest.mark.flaky(reruns=4),  # it measures real time
]


def test_a_pipeline_over_a_slow_link_takes_what_was_predicted(tmp_path: Path) -> None:
    """Loose, because the machine may be busy: compute sleeps, but the processes still need a core
    now and then."""
    job = Job(num_layers=4, forward_seconds=6e-3, values=16_384, weights=1_000)
    cluster = cluster_of("lab", [(2.0, 50.0), (1.0, 50.0)])
    plan = plan_of(
        cluster, job, [(3, [("a", 4)]), (1, [("b", 4)])], micro_batches=8, schedule=kfkb(2)
    )
    case = Case(name="test", cluster=cluster, job=job, plan=plan, steps=3)
    outcome = play(case, 0.956, tmp_path)
    assert 0.6 < outcome.predicted / outcome.measured < 1.1
    for (
        device,
        predicted,
        measured,
    ) in outcome.peaks:  # what is held depends on the order of things only, not on time
        assert predicted == pytest.approx(measured, rel=0.1), device


def test_a_run_shows_what_its_links_carried_and_how_fast_its_devices_were(tmp_path: Path) -> None:
    """Planned for 200 Mbit/s; the lab gives 20. Layers sleep for their time, so devices are as fast
    as planned."""
    job = Job(num_layers=4, forward_seconds=4e-3, values=16_384, weights=1_000)
    planned, real = (cluster_of("lab", [(2.0, rate), (1.0, rate)]) for rate in (200.0, 20.0))
    plan = plan_of(
        planned, job, [(3, [("a", 4)]), (1, [("b", 4)])], micro_batches=8, schedule=kfkb(2)
    )
    play(Case(name="test", cluster=real, job=job, plan=plan, steps=3), 0.956, tmp_path)
    known = known_of(job, planned, 4, tmp_path)
    seen = seen_in(
        load_timeline(tmp_path / "timeline.json"), plan, known.chain, planned, known.model
    )
    assert set(seen.bandwidths) >= {"a0.nic.out", "b0.nic.in"}
    for name, rate in seen.bandwidths.items():
        assert 8e-6 * rate == pytest.approx(20, rel=0.15), name
    assert 0.7 < min(seen.speeds.values()) <= max(seen.speeds.values()) < 1.05
