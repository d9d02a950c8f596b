"""The report page: it shows what the timeline says, is one small file, and runs nothing but its own
script."""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from report.page_cases import thousand_gpus

import argosy
from argosy.cluster.file import cluster_from_content, load_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.planned import planned_memory
from argosy.explain import explain_plan, planned_stack
from argosy.plan.file import dumps_plan, load_plan, loads_plan
from argosy.plan.plan import LeftOut, Plan, RunnerUp, Search
from argosy.report.decisions import Told
from argosy.report.page import PageContent, Picture, ScenarioTimes, report_page
from argosy.report.page.curve import search_curve, spark_line
from argosy.report.page.tracks import KINDS, TICKS, _folded_stage, timeline_tracks
from argosy.sim.simulate import simulate
from argosy.timeline import Timeline
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

NAME = "llama-3-8b-on-mixed-16"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return load_plan(NAME)


@pytest.fixture(scope="module")
def cluster(plan: Plan) -> Cluster:
    return cluster_from_content(plan.cluster.content)


@pytest.fixture(scope="module")
def chain(plan: Plan) -> Chain:
    ref = plan.model
    return load_model(
        ref.name, sequence_length=ref.sequence_length, dtype=ref.dtype, optimizer=ref.optimizer
    )


@pytest.fixture(scope="module")
def timeline(plan: Plan, chain: Chain, cluster: Cluster) -> Timeline:
    return simulate(plan, chain, cluster)


def test_rows_say_what_the_spans_say(plan: Plan, cluster: Cluster, timeline: Timeline) -> None:
    tracks = timeline_tracks("predicted", timeline, plan, cluster)
    tick = timeline.end / TICKS
    assert [row["label"] for row in tracks["devices"]] == list(timeline.devices)
    for row in tracks["devices"]:
        spans = sorted(
            (s for s in timeline.spans if s.where == row["label"]), key=lambda s: (s.start, s.end)
        )
        numbers = row["spans"]
        clock = 0
        for span, at in zip(spans, range(0, len(numbers), 3), strict=True):
            start = clock + numbers[at]
            clock = start + numbers[at + 1]
            assert start * tick == pytest.approx(span.start, abs=tick)
            assert clock * tick == pytest.approx(span.end, abs=tick)
            assert KINDS[numbers[at + 2] % 8] is span.kind
            assert numbers[at + 2] // 8 - 1 == (
                -1 if span.micro_batch is None else span.micro_batch
            )


def test_memory_rows_reach_the_peak_and_keep_below_the_limit(
    plan: Plan, cluster: Cluster, timeline: Timeline
) -> None:
    peaks = timeline.peak_memory()
    for row in timeline_tracks("predicted", timeline, plan, cluster)["memory"]:
        name = row["label"].partition(" and ")[0]
        capacity = cluster.device(name).kind.memory
        assert max(row["area"][1::2]) == round(1000 * peaks[name] / capacity)
        assert row["limit"] == 1000
        assert max(accumulate(row["area"][::2])) <= TICKS


def test_links_never_carry_more_than_they_can(
    plan: Plan, cluster: Cluster, timeline: Timeline
) -> None:
    rows = timeline_tracks("predicted", timeline, plan, cluster)["links"]
    assert rows
    for row in rows:
        assert max(row["area"][1::2]) <= 1000


def test_the_page_is_one_file_with_the_figures_in_it(
    plan: Plan, chain: Chain, cluster: Cluster, timeline: Timeline
) -> None:
    explanation = explain_plan(plan, chain, cluster)
    rivals = [
        ("argosy", 7.5, "the fastest"),
        ("even", 15.0, "slow"),
        ("none", None, "no plan: memory"),
    ]
    picture = Picture(label="predicted", timeline=timeline)
    page = report_page(
        plan, cluster, [picture], PageContent(explanation=explanation, rivals=rivals)
    )
    assert not re.search(r"""(src|href)\s*=|https?://|@import|url\(""", page)
    assert "width:50.0%" in page
    for stage in plan.stages:
        assert f"{stage.first}..{stage.end - 1}" in page
    assert "What would help most" in page
    data = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert data is not None
    assert json.loads(data[1])["timelines"][0]["label"] == "predicted"


def test_text_from_files_cannot_become_markup(
    plan: Plan, cluster: Cluster, timeline: Timeline
) -> None:
    evil = "</script><script>alert(1)</script><img onerror=x>"
    device = plan.stages[0].devices[0]
    marked = replace(
        plan, left_out=(LeftOut(device=device, reason=evil),), model=replace(plan.model, name=evil)
    )
    told = Told(step=3, what=evil, predicted=evil, measured=evil, moved=evil, why=evil)
    page = report_page(
        replace(
            marked, runner_ups=(RunnerUp(description=evil, iteration_seconds=1.0, reason=evil),)
        ),
        cluster,
        [Picture(label=evil, timeline=replace(timeline, stalled=evil))],
        PageContent(
            rivals=[(evil, 1.0, evil), (evil, None, evil)],
            decided=[told],
            scenarios=[ScenarioTimes(name=evil, seconds=(1.0, 2.0))],
        ),
    )
    assert page.count("&lt;script&gt;") > 10
    assert evil not in page
    assert "<img" not in page
    assert page.count("<script") == 2


def test_measured_beside_predicted_shows_the_error(
    plan: Plan, cluster: Cluster, timeline: Timeline
) -> None:
    slower = replace(
        timeline,
        clock="measured",
        busy=tuple(2 * seconds for seconds in timeline.busy),
        iteration_ends=tuple(2 * end for end in timeline.iteration_ends),
    )
    pictures = [
        Picture(label="predicted", timeline=timeline),
        Picture(label="measured", timeline=slower),
    ]
    page = report_page(plan, cluster, pictures)
    assert "Predicted against measured" in page
    assert page.count("-50.0 %") == 2 + len(plan.stages), (
        "the figure, the whole, the devices of each stage"
    )
    assert page.count("+0.0 %") == len(plan.stages), "peak memory"


def test_many_devices_stay_a_small_page() -> None:
    """64 devices and 64 micro-batches in under 500 kB."""
    cluster = load_cluster("three-kinds-64")
    chain = load_model("gpt2-xl", dtype="fp16")
    plan = load_plan(NAME)
    names = [device.name for device in cluster.devices]
    replica, stage = plan.stages[0].replicas[0], plan.stages[0]
    num_layers = len(chain.layers)
    cuts = [num_layers * at // 8 for at in range(9)]
    stages = tuple(
        replace(
            stage,
            first=cuts[at],
            end=cuts[at + 1],
            replicas=tuple(
                replace(replica, devices=(name,), samples=1) for name in names[8 * at : 8 * at + 8]
            ),
        )
        for at in range(8)
    )
    wide = replace(
        plan,
        model=replace(
            plan.model, name=chain.name, sequence_length=chain.sequence_length, dtype=chain.dtype
        ),
        stages=stages,
        global_batch=512,
        micro_batch_size=8,
        num_micro_batches=64,
    )
    timeline = simulate(wide, chain, cluster)
    page = report_page(wide, cluster, [Picture(label="predicted", timeline=timeline)])
    assert len(page.encode()) < 500_000


def test_a_search_is_drawn_as_it_went(plan: Plan, cluster: Cluster, timeline: Timeline) -> None:
    history = ((0.1, 5.0, 2.0), (0.4, 4.0, 2.0), (1.0, 4.0, 3.5))
    searched = replace(
        plan, search=Search(cpu_seconds=1.0, candidates=9, pruned=(), history=history)
    )
    page = report_page(searched, cluster, [Picture(label="predicted", timeline=timeline)])
    best, bound = (
        [
            tuple(map(float, pair.split(",")))
            for pair in re.search(f'class="{name}" points="([^"]+)"', page)[1].split()
        ]
        for name in ("best", "bound")
    )
    assert best[0][1] < best[-1][1], "the best plan comes down"
    assert bound[0][1] > bound[-1][1] > best[-1][1], "the bound comes up, and stays below"
    assert [x for x, _ in best] == sorted(x for x, _ in best)
    assert "The best plan went from 5 s to 4 s, the bound from 2 s to 3.5 s" in page
    assert loads_plan(dumps_plan(searched)).search == searched.search
    assert search_curve(history[:1]) is None


def test_a_notebook_shows_the_same_page(
    plan: Plan, chain: Chain, cluster: Cluster, tmp_path: Path
) -> None:
    slower = argosy.with_changes(cluster, [{"link": "v0.nic", "steps": [["5 s", "4 Gbit/s"]]}])
    report = argosy.Report(
        plan=plan, chain=chain, cluster=cluster, scenarios={"calm": cluster, "<slow>": slower}
    )
    frame = report._repr_html_()
    inside = html.unescape(re.search('srcdoc="([^"]*)"', frame)[1])
    assert inside == report.html == report.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "While the network changes" in inside and "&lt;slow&gt;" in inside
    calm, slow = re.findall(r"<tr><td>(?:calm|&lt;slow&gt;)</td>(.*?)</tr>", inside)
    assert calm != slow


def test_a_bound_that_falls_is_explained() -> None:
    falling = search_curve(((0.1, 5.0, 2.0), (0.4, 5.0, 1.5)))
    assert falling is not None and "falls where finer plans are let in" in falling.in_words


def test_iterations_are_drawn_one_after_the_other_the_slowest_of_a_group_first() -> None:
    points = [
        tuple(map(float, one.split(","))) for one in spark_line([1.0] * 300 + [2.0], 2.0).split()
    ]
    heights = [y for _, y in points]
    assert heights[0] == 10.0 and heights[-1] == 1.0 and min(heights[:-2]) == 10.0
    assert points[-1][0] == 100.0 and len(points) <= 202
    assert spark_line([math.inf], 2.0) == "0.0,1.0 100.0,1.0"


def test_a_large_plan_is_told_what_it_holds_without_being_played_device_by_device() -> None:
    plan, chain, cluster = thousand_gpus()
    page = argosy.Report(plan=plan, chain=chain, cluster=cluster).html
    assert len(page.encode()) < 150_000
    assert page.count('class="part p0"') <= len(plan.stages)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert len(data["timelines"][0]["devices"]) < 64
    held = planned_stack(plan, chain, cluster)
    assert {one.device: one.peak for one in held} == pytest.approx(planned_memory(plan, chain))


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("stage3.0", 3),
        ("stage²", None),
        ("stage².0", None),
        (f"stage{'9' * 5000}.0", None),
        ("1.0", None),
    ],
)
def test_only_names_of_bundles_say_a_stage(name: str, stage: int | None) -> None:
    """A timeline may have any names."""
    assert _folded_stage(name) == stage
