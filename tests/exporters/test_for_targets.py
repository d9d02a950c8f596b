"""Plans that are searched for a system: its exporter takes each of them as it is."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli.command_result import Result

from argosy.cli import main
from argosy.cluster.file import load_cluster
from argosy.cost.calibration_file import read_calibration
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan, Recompute
from argosy.plan.targets import TARGETS, TargetName
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleSpec
from argosy.workload.load import load_model

each_target = pytest.mark.parametrize("target", list(TargetName))


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> Result:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    return Result(stop.value.code, captured.out, captured.err)


def plan_and_export(
    capsys: pytest.CaptureFixture[str], folder: Path, target: str, *what: str
) -> None:
    file = str(folder / "plan.json")
    planned = run_command(capsys, "plan", *what, "--for", target, "-q", "-o", file)
    assert planned.code == 0, planned.err
    exported = run_command(capsys, "export", file, "--to", target, "--json")
    assert exported.code == 0, exported.err
    assert TARGETS[TargetName(target)].full_name in "".join(
        json.loads(exported.out)["files"].values()
    )


@each_target
def test_what_is_planned_for_a_system_is_exported_to_it(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_and_export(
        capsys, tmp_path, target, "-m", "llama-3-8b", "-c", "mixed-8", "-b", "16", "--dtype", "bf16"
    )


HARD = {
    "constants under which selective recomputation means something else": (
        "megatron",
        "-m qwen2.5-3b -c two-cards -b 8 --dtype fp16 --sequence-length 8192 --calibration torch",
    ),
    "a sequence that no width divides": (
        "torchtitan",
        "-m qwen3-8b -c mixed-8 -b 8 --dtype bf16 --sequence-length 1001",
    ),
    "an optimizer whose state Megatron-LM does not divide": (
        "megatron",
        "-m gpt2 -c two-cards -b 16 --dtype fp16 --optimizer momentum",
    ),
}


@pytest.mark.parametrize("what", HARD)
def test_the_search_keeps_to_what_the_target_refuses_only_when_it_starts(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, words = HARD[what]
    plan_and_export(capsys, tmp_path, target, *words.split())
    planned = json.loads((tmp_path / "plan.json").read_text())
    if "momentum" in words:  # distrib_optimizer.py of Megatron-LM: "Only Adam ... supported"
        assert {stage["zero"] for stage in planned["stages"]} == {0}


CASES = [
    ("llama-3-8b", "mixed-16", 64),
    ("llama-3-8b", "racks-128", 256),
    ("llama-3-8b", "one-per-node-16", 32),
    ("qwen3-30b-a3b", "racks-128", 256),
    ("llama-3-8b", "geo-8", 16),
]


@pytest.mark.exhaustive
@each_target
@pytest.mark.parametrize(("model", "cluster", "batch"), CASES)
def test_the_same_on_other_clusters(
    model: str,
    cluster: str,
    batch: int,
    target: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = str(tmp_path / "plan.json")
    what = [
        "-m",
        model,
        "-c",
        cluster,
        "-b",
        str(batch),
        "--dtype",
        "bf16",
        "--for",
        target,
        "-q",
        "-o",
        file,
    ]
    planned = run_command(capsys, "plan", *what)
    if planned.code == 3:
        assert "fits" in planned.err or "No plan was found" in planned.err
        return
    assert planned.code == 0, planned.err
    assert run_command(capsys, "export", file, "--to", target).code == 0


def planned(target: TargetName | None, settings: Settings | None = None) -> Plan:
    """gpt2 on two unlike cards, under the constants of Megatron-LM."""
    constants = read_calibration("megatron")
    chain = constants.chain(load_model("gpt2", sequence_length=512, dtype="fp16"))
    settings = settings or Settings(target=None if target is None else TARGETS[target])
    cluster = constants.cluster(load_cluster("two-cards"))
    return find_plan(
        chain, cluster, global_batch=16, settings=settings, model=constants.compute_model()
    )


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.iteration_seconds


def test_the_best_of_all_grids_is_found() -> None:
    """Every number of replicas, recomputation and ZeRO level tried by itself, on few devices."""
    best = planned(TargetName.MEGATRON)
    grids = []
    for replicas, recompute in itertools.product((1, 2), Recompute):
        grid = Settings(
            schedules=(ScheduleSpec(),), replicas=replicas, width=1, recompute=(recompute,)
        )
        with contextlib.suppress(InfeasibleError):
            grids.append(seconds(planned(None, replace(grid, zero=(1,), units=(1, 1)))))
    assert seconds(best) == pytest.approx(min(grids), rel=1e-6)
    assert seconds(best) >= seconds(planned(None)) * (1 - 1e-9), (
        "no restriction makes a plan faster"
    )


REFUSED = {
    "a model that it does not have": (
        ["-m", "gpt2", "--for", "torchtitan"],
        "a model with a recipe for torchtitan 0.3.0",
    ),
    "a model that others take": (
        ["-m", "gpt2", "--dtype", "bf16", "--for", "torchtitan"],
        "--for megatron, deepspeed, flagscale or torch takes it",
    ),
    "a dtype": (
        ["-m", "llama-3-8b", "--dtype", "fp16", "--for", "torchtitan"],
        "plan with --dtype bf16, or --for megatron, deepspeed or flagscale takes it",
    ),
    "an optimizer": (
        ["-m", "gpt2", "--dtype", "fp32", "--optimizer", "adamw8bit", "--for", "deepspeed"],
        "found adamw8bit, expected adamw, adam, lion, sgd or momentum, which is written for "
        "DeepSpeed; --for torch takes it",
    ),
    "some weights": (
        ["-m", "gpt2", "--dtype", "fp32", "--train", "lora", "--for", "torch"],
        "expected training of all weights, which is written for torch; without --for, Argosy "
        "itself trains it",
    ),
    "a shape": (["-m", "bert-base", "--for", "megatron"], "in the shape of Megatron-LM's GPT"),
    "a shape that comes close": (
        ["-m", "olmoe-1b-7b", "--dtype", "fp16", "--for", "megatron"],
        "norms per head, which are written for Megatron-LM; --for deepspeed takes it",
    ),
    "a schedule": (
        ["-m", "gpt2", "--schedule", "gpipe", "--for", "deepspeed"],
        "1f1b, which DeepSpeed",
    ),
    "a name": (["-m", "gpt2", "--for", "megatrn"], 'did you mean "megatron"?'),
    "islands": (
        ["-m", "gpt2", "--islands", "auto", "--for", "torch"],
        "--for cannot be combined with --islands",
    ),
    "another restriction": (
        ["-m", "gpt2", "--runnable", "--for", "torch"],
        "--runnable cannot be combined with --for",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_plan_can_be_made_for_is_refused_before_the_search(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, says = REFUSED[what]
    refused = run_command(capsys, "plan", "-c", "two-cards", "-b", "8", *arguments)
    assert refused.code == 2
    assert says in refused.err


@pytest.mark.parametrize("name", ["megatron", "deepspeed", "flagscale"])
def test_a_plan_for_no_system_is_refused_with_the_option_that_helps(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options of single lines do not make such a plan fit."""
    words = ["export", "llama-3-8b-on-mixed-16", "--to", name, "-o", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main(words)
    assert f"argosy plan --for {name} finds a plan that can be exported" in capsys.readouterr().err
