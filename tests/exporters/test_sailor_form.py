"""Plans in Sailor's form: read back by the importer of its published runs, and refused where the
form has no words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli.command_result import Result
from support.measured_data import GH200, MIXED, needs_sailor

from argosy.calibrate.sailor import read_sailor_runs, sailor_plan
from argosy.cli import main
from argosy.cluster.file import load_cluster
from argosy.errors import InputError
from argosy.exporters.sailor import dumps_sailor, to_sailor
from argosy.plan.file import dumps_plan
from argosy.plan.plan import Plan, PolicyRule, Recompute
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.imports.sailor_runs import read_sailor_measured
from argosy.workload.load import load_model

CLUSTER = load_cluster("two-cards")
CHAIN = load_model("gpt2-xl", dtype="fp16")
PLAIN = Settings(
    even_shares=True,
    zero=(0,),
    recompute=(Recompute.NONE,),
    schedules=(ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),),
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan that the form can say; the A6000 of the cluster is given a name that Sailor knows."""
    return find_plan(CHAIN, NAMED, global_batch=64, settings=PLAIN)


NAMED = replace(
    CLUSTER,
    devices=tuple(
        replace(
            device,
            kind=replace(
                device.kind, name="RTX-3090" if "A6000" in device.kind.name else "RTX-2080Ti"
            ),
        )
        for device in CLUSTER.devices
    ),
)


def test_what_is_written_is_read_back(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan_config.json"
    path.write_text(dumps_sailor(plan, NAMED, zone="here"))
    run = read_sailor_measured(path)
    assert [stage.layers for stage in run.stages] == [
        tuple(range(s.first, s.end)) for s in plan.stages
    ]
    assert run.global_batch == plan.global_batch
    assert run.num_micro_batches == plan.num_micro_batches
    for ours, theirs in zip(plan.stages, run.stages, strict=True):
        assert [replica.tensor_width for replica in theirs.replicas] == [
            replica.width for replica in ours.replicas
        ]
        kinds = [NAMED.device(replica.devices[0]).kind.name for replica in ours.replicas]
        assert [replica.groups[0].kind for replica in theirs.replicas] == kinds
    assert plan.predicted is not None
    assert run.iteration_seconds == plan.predicted.iteration_seconds
    assert json.loads(path.read_text())["predicted"] is True


@needs_sailor
@pytest.mark.parametrize("folder", [GH200, MIXED], ids=lambda folder: folder.name)
def test_published_plans_survive_import_and_export(folder: Path, tmp_path: Path) -> None:
    measured = read_sailor_runs(folder)
    for run, path in zip(measured.runs, sorted(folder.glob("*.json")), strict=True):
        published, written = json.loads(path.read_text()), to_sailor(run.plan, run.cluster)
        for name in ("mbs", "gbs"):
            assert written[name] == published[name]
        (ours,), (theirs,) = written["pipeline_list"], published["pipeline_list"]
        for name in ("layers_per_stage", "tmp_per_stage", "dp"):
            assert ours[name] == theirs[name]
        (tmp_path / path.name).write_text(json.dumps(written))
        again = sailor_plan(read_sailor_measured(tmp_path / path.name), run.chain, run.cluster)
        assert again.stages == run.plan.stages


def uneven(plan: Plan) -> Plan:
    stage = plan.stages[0]
    first, *rest = stage.replicas
    return replace(
        plan,
        stages=(replace(stage, replicas=(replace(first, samples=99), *rest)), *plan.stages[1:]),
    )


def skewed(plan: Plan) -> Plan:
    first, *rest = plan.stages[0].replicas
    return with_stage(
        plan, replicas=(replace(first, devices=("box0.0", "box0.1"), ratios=(0.7, 0.3)), *rest)
    )


def with_stage(plan: Plan, **changes: object) -> Plan:
    return replace(plan, stages=(replace(plan.stages[0], **changes), *plan.stages[1:]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (uneven, "one micro-batch for all replicas"),
        (skewed, r"stages\[0\].replicas\[0\].ratios: found \[0.7, 0.3\], expected equal ratios"),
        (lambda plan: with_stage(plan, zero=1), r"stages\[0\].zero"),
        (lambda plan: with_stage(plan, recompute=Recompute.FULL), r"stages\[0\].recompute"),
        (lambda plan: with_stage(plan, context=2), r"stages\[0\].context"),
        (
            lambda plan: replace(plan, schedule=ScheduleSpec(kind=ScheduleKind.KFKB, k=2)),
            "its runs are 1F1B",
        ),
        (
            lambda plan: replace(plan, schedule=ScheduleSpec(depth=(9,) * len(plan.stages))),
            "its runs are 1F1B",
        ),
        (
            lambda plan: replace(
                plan, policy=(PolicyRule(edge="e", below=1e9, schedule=ScheduleSpec()),)
            ),
            "policy: found 1 rules",
        ),
    ],
)
def test_what_the_form_cannot_say_is_refused(plan: Plan, change, says: str) -> None:  # type: ignore[no-untyped-def]
    assert len(plan.stages) > 1
    with pytest.raises(InputError, match=says):
        to_sailor(change(plan), NAMED)


def test_kinds_without_a_name_are_refused(plan: Plan) -> None:
    with pytest.raises(InputError, match="RTX-A6000"):
        to_sailor(plan, CLUSTER)


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> Result:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    return Result(stop.value.code, captured.out, captured.err)


def test_the_command(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(dumps_plan(uneven(plan)))
    result = run_command(capsys, "export", str(path), "--to", "sailor")
    assert result.code == 2
    assert "argosy plan --even-shares" in result.err
    assert run_command(capsys, "export", str(path), "--to", "nowhere").code == 2
