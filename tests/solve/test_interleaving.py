"""Interleaved variants: valid, played by the exact engine, taken only where they are faster or asked for alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.cluster.file import load_cluster
from argosy.errors import InfeasibleError
from argosy.plan.check import check_plan
from argosy.planner import SCHEDULES, Settings, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import simulate
from argosy.workload.load import load_model

WOVEN = tuple(ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=chunks) for chunks in (2, 4))


def test_an_interleaved_plan_is_valid_and_takes_what_it_says() -> None:
    chain, cluster = load_model("gpt2-medium", sequence_length=512, dtype="fp16"), load_cluster("mixed-8")
    plan = find_plan(chain, cluster, global_batch=16, settings=Settings(schedules=WOVEN))
    assert plan.schedule in WOVEN and plan.predicted is not None and plan.certificate is not None
    check_plan(plan, chain, cluster)
    timeline = simulate(plan, chain, cluster)
    assert timeline.iteration_ends[0] == pytest.approx(plan.predicted.iteration_seconds, rel=1e-9)
    room = {device.name: device.kind.memory for device in cluster.devices}
    assert all(peak <= room[name] for name, peak in timeline.peak_memory().items())
    assert plan.certificate.lower_bound_seconds <= plan.predicted.iteration_seconds


def test_among_others_the_fastest_wins() -> None:
    chain, cluster = load_model("gpt2-medium", sequence_length=512, dtype="fp16"), load_cluster("mixed-8")

    def seconds(schedules: tuple[ScheduleSpec, ...]) -> float:
        plan = find_plan(chain, cluster, global_batch=16, settings=Settings(schedules=schedules))
        assert plan.predicted is not None
        return plan.predicted.iteration_seconds

    both, alone, plain = seconds((*SCHEDULES, *WOVEN)), seconds(WOVEN), seconds(SCHEDULES)
    assert both <= plain and both <= max(alone, plain)


def test_what_cannot_be_interleaved_is_refused() -> None:
    chain = load_model("gpt2", sequence_length=512, dtype="fp16")
    with pytest.raises(InfeasibleError, match=r"no interleaved variant .* works: one stage \(\d"):
        find_plan(chain, load_cluster("two-cards"), global_batch=1, settings=replace(Settings(), schedules=WOVEN))
