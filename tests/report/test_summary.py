"""The figures of a simulated plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.cli.inputs import Scenario, load_scenario
from argosy.plan.file import read_plan
from argosy.report.marks import names_in_short
from argosy.report.summary import Summary, critical_parts, summarise, summary_to_dict
from argosy.sim.simulate import simulate
from argosy.timeline import Span, SpanKind


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return load_scenario(read_plan("gpt2-xl-on-two-cards"))


@pytest.fixture(scope="module")
def summary(scenario: Scenario) -> Summary:
    timeline = simulate(scenario.plan, scenario.chain, scenario.cluster, iterations=3)
    return summarise(scenario.plan, scenario.cluster, timeline)


def test_throughput_is_batch_over_mean_time(summary: Summary) -> None:
    assert summary.mean_seconds == pytest.approx(summary.end / 3)
    assert summary.samples_per_second * summary.end == pytest.approx(3 * 64)
    assert summary.tokens_per_second == 1024 * summary.samples_per_second


def test_critical_path_covers_the_whole_time(summary: Summary) -> None:
    assert sum(seconds for _, seconds in summary.critical) == pytest.approx(summary.end)
    assert summary.critical[0][0] == "compute of stage 1"


def test_devices_know_their_stage_and_limit(summary: Summary) -> None:
    assert [(device.kind, device.stages) for device in summary.devices] == [
        ("RTX-A6000", (0,)),
        ("RTX-A6000", (0,)),
        ("RTX-2080Ti", (1,)),
        ("RTX-2080Ti", (1,)),
    ]
    small = summary.devices[-1]
    assert not small.is_over
    assert replace(small, peak_memory=small.memory + 1).is_over
    assert not replace(summary, devices=(replace(small, peak_memory=small.memory + 1),)).fits


def test_links_are_sorted_by_utilisation(summary: Summary) -> None:
    shares = [link.utilisation for link in summary.links]
    assert shares == sorted(shares, reverse=True)


def test_nothing_finished_is_no_division_by_zero(summary: Summary) -> None:
    stalled = replace(summary, iteration_seconds=(), stalled="box0.0 is lost")
    assert summary_to_dict(stalled)["iterations"]["mean_seconds"] is None
    assert stalled.samples_per_second == 0


def test_critical_parts_name_stages_and_pairs_of_nodes() -> None:
    path = (
        Span("a0.0", SpanKind.FORWARD, 0, 2, 0, 0),
        Span("a0.0>v0.1", SpanKind.TRANSFER, 3, 6, 0, 0),
        Span("v0.1", SpanKind.BACKWARD, 6, 10, 1, 0),
        Span("v0.1", SpanKind.UPDATE, 10, 10.5),
    )
    assert critical_parts(path) == (
        ("compute of stage 1", 4),
        ("transfers a0>v0", 3),
        ("compute of stage 0", 2),
        ("waiting", 1),
        ("weight updates", 0.5),
    )


def test_numbers_of_any_length_may_end_a_name() -> None:
    names = [f"a{'9' * 5000}", f"a1{'0' * 5000}"]
    assert names_in_short(names) == ", ".join(names)
