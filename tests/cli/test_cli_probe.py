"""``argosy probe --run``: links and devices as a run's timeline shows them. What measures needs
torch, or a lab."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli.command_result import Run

from argosy.cli.inputs import load_scenario
from argosy.plan.file import dumps_plan, read_plan
from argosy.sim.simulate import simulate
from argosy.timeline import Contact, ContactKind, SpanKind, Timeline
from argosy.timeline.file import dumps_timeline

NAME = "gpt2-xl-on-two-cards"


def write_run(folder: Path) -> Timeline:
    """A run as its processes would tell it: every device at half its speed, and each message
    awaited as it was sent."""
    scenario = load_scenario(read_plan(NAME))
    played = simulate(scenario.plan, scenario.chain, scenario.cluster, iterations=2)
    spans = tuple(
        span._replace(start=2 * span.start, end=2 * span.end, via=(), waited_for=None)
        for span in played.spans
    )
    contacts = tuple(
        Contact(
            where=span.where.partition(">")[2],
            kind=ContactKind.WAITING,
            start=span.start,
            end=span.end,
            stage=0,
            micro_batch=span.micro_batch or 0,
            iteration=span.iteration,
        )
        for span in spans
        if span.kind is SpanKind.TRANSFER
    )
    timeline = replace(played, clock="measured", spans=spans, contacts=contacts)
    folder.mkdir()
    (folder / "timeline.json").write_text(dumps_timeline(timeline))
    (folder.parent / "plan.json").write_text(dumps_plan(scenario.plan))
    return timeline


def test_a_run_tells_what_its_links_carried_and_how_fast_its_devices_were(
    run: Run, tmp_path: Path
) -> None:
    write_run(tmp_path / "run")
    told = json.loads(run("probe", "--run", "run", "--plan", "plan.json", "--json").out)
    scenario = load_scenario(read_plan(NAME))
    believed = {link.name: link.bandwidth.at(0) for link in scenario.cluster.links}
    assert told["bandwidths"] and told["bandwidths"].keys() <= believed.keys()
    assert all(
        rate == pytest.approx(believed[name] / 2, rel=0.02)
        for name, rate in told["bandwidths"].items()
    )
    alone = [
        replica.devices[0]
        for stage in scenario.plan.stages
        for replica in stage.replicas
        if replica.width == 1
    ]
    assert list(told["speeds"]) == alone == ["box0.0", "box0.1"], (
        "nobody told what members of groups exchanged"
    )
    assert all(speed == pytest.approx(0.5, rel=1e-6) for speed in told["speeds"].values())
    shown = run("probe", "--run", "run", "--plan", "plan.json")
    assert shown.code == 0
    assert all(name in shown.out for name in (*told["bandwidths"], *told["speeds"]))
    assert shown.out.count("50 %") == len(told["speeds"])


def test_what_members_of_a_group_exchanged_is_left_out(run: Run, tmp_path: Path) -> None:
    """Every computation took 1 s longer, of exchanges."""
    timeline = write_run(tmp_path / "run")
    spans = [
        span if span.kind.is_communication else span._replace(end=span.end + 1, together=1.0)
        for span in timeline.spans
    ]
    (tmp_path / "run" / "timeline.json").write_text(
        dumps_timeline(replace(timeline, spans=tuple(spans)))
    )
    told = json.loads(run("probe", "--run", "run", "--plan", "plan.json", "--json").out)
    plan = load_scenario(read_plan(NAME)).plan
    assert any(replica.width > 1 for stage in plan.stages for replica in stage.replicas)
    assert told["speeds"] == {name: pytest.approx(0.5, rel=1e-6) for name in plan.devices}


def test_what_is_no_run_of_the_plan_is_refused(run: Run, tmp_path: Path) -> None:
    timeline = write_run(tmp_path / "run")
    file = tmp_path / "run" / "timeline.json"
    arguments = ("probe", "--run", "run", "--plan", "plan.json")
    assert "--run needs --plan" in run("probe", "--run", "run").err
    file.write_text(dumps_timeline(replace(timeline, clock="simulated", contacts=())))
    assert 'found "simulated", expected a timeline that a run has measured' in run(*arguments).err
    file.write_text(dumps_timeline(timeline).replace("box0.0", "x0.0"))
    strange = run(*arguments)
    assert (strange.code, strange.out) == (2, "")
    assert 'found "x0.0", expected a timeline of a run on two-cards' in strange.err
    file.write_text(
        dumps_timeline(
            replace(timeline, spans=tuple(s._replace(stage=None) for s in timeline.spans))
        )
    )
    assert json.loads(run(*arguments, "--json").out)["speeds"] == {}
    file.unlink()
    assert "timeline.json" in run(*arguments).err
