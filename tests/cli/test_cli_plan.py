"""``argosy plan``: what it searches with, prints and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from cli.command_result import Run

from argosy.cli.planning.plan_request import parse_schedules
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError
from argosy.plan.file import load_plan
from argosy.plan.plan import Plan
from argosy.planner import SCHEDULES, SearchProgress, Settings, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.chain import Chain

SMALL = ("plan", "-m", "gpt2", "-c", "two-cards", "-b", "4", "--dtype", "fp16")
KINDS = ("1f1b", "eager-1f1b", "kfkb", "kfkb:K", "gpipe", "zero-bubble", "interleaved")
SCHEDULE_NAMES = (
    "one of the schedules 1f1b, eager-1f1b, kfkb, gpipe, zero-bubble, interleaved, zero-bubble-v, dualpipe-v or kfkb:K "
    "with K of at least 1"
)

CASES = {
    ("-b", "0"): "--global-batch: found 0, expected a whole number of at least 1",
    ("--time-budget", "30"): '--time-budget: found "30", expected a time such as "30 s"',
    ("--memory-budget", "4"): '--memory-budget: found "4", expected a size such as "80 GiB"; '
    'a number needs its unit: did you mean "4 GiB"?',
    ("--schedule", "chimera"): f'--schedule: found "chimera", expected {SCHEDULE_NAMES}',
    (
        "--schedule",
        "eager",
    ): f'--schedule: found "eager", expected {SCHEDULE_NAMES}; did you mean "eager-1f1b"?',
    (
        "--schedule",
        "kfkb:0",
    ): f'--schedule: found "kfkb:0", expected {SCHEDULE_NAMES}; did you mean "kfkb"?',
    (
        "--dtype",
        "fp61",
    ): 'dtype: found "fp61", expected one of the dtypes fp32, tf32, fp16, bf16, fp8; '
    'did you mean "fp16"?',
    (
        "--sequence-length",
        "5000",
    ): "sequence_length: found 5000, expected at most 1024: gpt2 has learned no position beyond",
    ("-c", "nowhere.toml"): "nowhere.toml: there is no such file",
    ("-m", "nothing.json"): "nothing.json: there is no such file or folder",
    (
        "-o",
        "missing/plan.json",
    ): "Cannot write missing/plan.json because the folder missing does not exist. Try creating it.",
    (
        "--executor",
        "thraed",
    ): '--executor: found "thraed", expected one of the executors process, thread; '
    'did you mean "thread"?',
    (
        "-o",
        "made.txt/plan.json",
    ): 'Cannot write made.txt/plan.json because the system reports "Not a directory". '
    "Try another file.",
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of every search, which itself goes on."""
    seen: list[Settings] = []

    def spy(
        chain: Chain,
        cluster: Cluster,
        *,
        global_batch: int,
        settings: Settings,
        model: ComputeModel,
    ) -> Plan:
        seen.append(settings)
        return find_plan(
            chain, cluster, global_batch=global_batch, settings=replace(settings, executor=None)
        )

    monkeypatch.setattr("argosy.planner.find_plan", spy)
    return seen


@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_message(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "made.txt").write_text("")
    result = run(*SMALL, "-q", *arguments)
    assert result.err == f"error: {CASES[arguments]}\n"
    assert result.code == 2
    assert result.out == ""


def test_what_would_make_it_fit_is_in_the_json(run: Run) -> None:
    result = run(
        "plan", "-m", "llama-3-8b", "-c", "two-cards", "-b", "2", "--dtype", "fp32", "-q", "--json"
    )
    assert result.code == 3
    why = json.loads(result.out)["infeasible"]
    assert result.err == f"error: {why['reason']}\n"
    assert max(need["over"] for need in why["needs"]) > 1
    assert why["plan"]["stages"][0]["layers"][0] == 0
    assert {change["kind"] for change in why["changes"]} == {
        "memory",
        "card",
        "offload",
        "optimizer",
        "tuning",
    }
    (tuned,) = [change for change in why["changes"] if change["kind"] == "tuning"]
    assert tuned["options"][:2] == ["--lora", "rank=16,targets=q,v"]
    assert tuned["seconds"] > 0


def test_what_fits_nowhere_is_infeasible(run: Run) -> None:
    result = run(
        "plan",
        "-m",
        "llama-3-70b",
        "-c",
        "two-cards",
        "-b",
        "2",
        "--dtype",
        "fp16",
        "-q",
        "-o",
        "plan.json",
    )
    assert result.code == 3
    assert result.err.startswith(
        "error: no plan of llama-3-70b (70.6 B parameters, fp16, adamw) fits on two-cards"
    )
    assert result.out.startswith("closest: llama-3-70b on two-cards: ")
    assert "A plan fits with any one of:\n  - " in result.out
    assert not Path("plan.json").exists()


def test_prints_stages_figures_and_proof_within_80_columns(run: Run) -> None:
    result = run(*SMALL, "-q")
    assert result.code == 0
    assert result.err == ""
    assert max(map(len, result.out.splitlines())) <= 80
    assert "\x1b" not in result.out
    assert result.out.startswith("gpt2 on two-cards: ")
    for text in (
        "stage  layers",
        "iteration    ",
        " samples/s, ",
        " GiB on the fullest device",
        "no plan of ",
        "plans judged",
    ):
        assert text in result.out


def test_json_has_the_plan_and_beside_it_what_matters(run: Run, tmp_path: Path) -> None:
    document = json.loads(run(*SMALL, "-q", "--json", "-o", "plan.json").out)
    assert document["version"] == 1
    assert document["command"] == "plan"
    assert list(document) == sorted(document)
    assert document["plan"] == json.loads((tmp_path / "plan.json").read_text())
    for name in ("certificate", "search", "runner_ups", "left_out"):
        assert document[name] == document["plan"][name]
    predicted = document["predicted"]
    assert predicted["samples_per_second"] == pytest.approx(4 / predicted["iteration_seconds"])
    assert predicted["tokens_per_second"] == pytest.approx(1024 * predicted["samples_per_second"])
    devices = [
        device for s in document["plan"]["stages"] for r in s["replicas"] for device in r["devices"]
    ]
    assert sorted(predicted["peak_memory_bytes"]) == sorted(devices)
    assert all(held > 0 for held in predicted["peak_memory_bytes"].values())
    gap = predicted["iteration_seconds"] / document["certificate"]["lower_bound_seconds"] - 1
    assert document["certificate"]["gap"] == pytest.approx(gap)
    assert document["search"]["cpu_seconds"] >= 0
    assert document["search"]["candidates"] > 0
    assert {"divisibility", "memory", "dominance", "bound"} <= set(document["search"]["pruned"])


def test_written_plan_is_one_that_other_commands_take(run: Run, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    result = run(*SMALL, "-q", "-o", "made/plan.json")
    assert (
        "wrote made/plan.json; next: argosy explain made/plan.json, argosy simulate made/plan.json\n"
        in result.out
    )
    seconds = load_plan(tmp_path / "made" / "plan.json").predicted
    simulated = json.loads(run("simulate", "made/plan.json", "--json", "-q").out)
    assert seconds is not None
    assert simulated["iterations"]["seconds"] == [pytest.approx(seconds.iteration_seconds)]
    assert run("explain", "made/plan.json", "-q").code == 0


def test_model_from_a_file_keeps_the_file_s_name(run: Run, tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_embd": 256,
        "n_head": 4,
        "vocab_size": 1000,
        "n_positions": 128,
    }
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    made = run(
        "plan",
        "-m",
        "own",
        "-c",
        "two-cards",
        "-b",
        "4",
        "--dtype",
        "fp16",
        "-q",
        "-o",
        "plan.json",
    )
    assert made.code == 0, made.err
    assert load_plan(tmp_path / "plan.json").model.name == "own"
    assert run("simulate", "plan.json", "-q").code == 0


def test_options_reach_the_search(run: Run, asked: list[Settings]) -> None:
    run(*SMALL, "-q")
    run(
        *SMALL,
        "-q",
        "--level",
        "2",
        "--gap",
        "0.5",
        "--time-budget",
        "2 min",
        "--memory-budget",
        "1 GB",
        "--no-prune",
        "--no-mixed",
    )
    run(
        *SMALL,
        "-q",
        "--max-width",
        "3",
        "--max-context",
        "2",
        "--max-expert",
        "4",
        "--schedule",
        "gpipe",
    )
    assert replace(asked[0], progress=None) == Settings()
    bounded = Settings(
        level=2, gap=0.5, time_budget=120.0, memory_budget=1e9, prune=False, mixed=False
    )
    assert replace(asked[1], progress=None) == bounded
    limited = Settings(
        max_width=3, max_context=2, max_expert=4, schedules=(ScheduleSpec(kind=ScheduleKind.GPIPE),)
    )
    assert replace(asked[2], progress=None) == limited


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("kfkb",), tuple(spec for spec in SCHEDULES if spec.kind is ScheduleKind.KFKB)),
        (("1f1b", "kfkb:3", "1f1b"), (ScheduleSpec(), ScheduleSpec(kind=ScheduleKind.KFKB, k=3))),
    ],
)
def test_schedules_are_those_asked_for(
    names: tuple[str, ...], expected: tuple[ScheduleSpec, ...]
) -> None:
    assert parse_schedules(names, 64) == expected


def test_a_schedule_asked_for_is_the_plan_s(run: Run) -> None:
    document = json.loads(run(*SMALL, "-q", "--json", "--schedule", "eager-1f1b").out)
    assert document["plan"]["schedule"]["kind"] == "eager-1f1b"


def test_profiles_reach_the_search(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"tensor_width": 1, "dtype": "fp16", "forward_seconds": 1.0, "backward_seconds": 2.0}
    profile = {
        "version": 1,
        "device": "RTX-A6000",
        "model": "gpt2",
        "rows": [{"layer": "block", "micro_batch": 1, **times}],
    }
    (tmp_path / "profile.json").write_text(json.dumps(profile))

    def search(
        chain: Chain,
        cluster: Cluster,
        *,
        global_batch: int,
        settings: Settings,
        model: ComputeModel,
    ) -> Plan:
        raise InfeasibleError(f"profiles of {', '.join(model.profiles or ())}")

    monkeypatch.setattr("argosy.planner.find_plan", search)
    assert run(*SMALL, "-q", "--profile", "profile.json").err == "error: profiles of RTX-A6000\n"


def test_workers_are_processes(run: Run, asked: list[Settings]) -> None:
    assert run(*SMALL, "-q", "--workers", "2").code == 0
    assert isinstance(asked[0].executor, ProcessPoolExecutor)


def searching(states: list[SearchProgress]) -> Callable[..., Plan]:
    """A search that tells these states and finds nothing."""

    def search(
        chain: Chain,
        cluster: Cluster,
        *,
        global_batch: int,
        settings: Settings,
        model: ComputeModel,
    ) -> Plan:
        for state in states if settings.progress is not None else ():
            settings.progress(state)  # type: ignore[misc]
        raise InfeasibleError("nothing fits")

    return search


def test_progress_is_a_line_when_something_changed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [
        SearchProgress(seconds=float("inf"), bound=1.0, candidates=16),
        SearchProgress(seconds=2.0, bound=1.0, candidates=1032),
        SearchProgress(seconds=2.0, bound=1.001, candidates=1048),
        SearchProgress(seconds=1.5, bound=1.25, candidates=1064),
    ]
    monkeypatch.setattr("argosy.planner.find_plan", searching(states))
    assert run(*SMALL).err.splitlines() == [
        "planning gpt2 for two-cards: 2x RTX-A6000 + 2x RTX-2080Ti in 1 node",
        "no plan yet, bound 1 s, 16 plans judged",
        "best 2 s, bound 1 s, gap 100.0 %, 1,032 plans judged",
        "best 1.5 s, bound 1.25 s, gap 20.0 %, 1,064 plans judged",
        "error: nothing fits",
    ]
    assert run(*SMALL, "-q").err == "error: nothing fits\n"


def test_json_needs_no_terminal_library() -> None:
    alone = "import sys, typer; sys.exit('rich' in sys.modules)"
    if subprocess.run([sys.executable, "-c", alone], check=False).returncode:
        pytest.skip("this typer loads rich itself")
    program = (
        "import sys; from argosy.cli import main\n"
        f"try: main([*{SMALL}, '-q', '--json'])\n"
        "except SystemExit: assert not {'rich', 'torch', 'multiprocessing'} & set(sys.modules)"
    )
    # What takes notes of the lines that ran would load more.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")
    }
    subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, env=environment
    )


def test_help_has_its_example(run: Run) -> None:
    result = run("plan", "--help")
    assert "    argosy plan -m llama-3-8b" in result.out
    assert all(kind in result.out for kind in KINDS)


CHANGING = (
    "plan",
    "-m",
    "gpt2",
    "-c",
    "mixed-8",
    "-b",
    "8",
    "--dtype",
    "fp16",
    "--sequence-length",
    "256",
    "-q",
)


def test_scenarios_and_prices_reach_the_json(run: Run) -> None:
    on_off = "new0.nic=on-off:on=1 s,off=1 s,low=0.1,seed=2,horizon=20 s"
    result = run(
        *CHANGING, "--json", "--scenario", on_off, "--scenario", "none", "--robust", "worst"
    )
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["scenarios"]["robust"] == "worst"
    assert (
        found["scenarios"]["chosen"]["worst_seconds"]
        <= found["scenarios"]["average_plan"]["worst_seconds"]
    )
    courses = json.loads(run(*CHANGING, "--json", "--for-trace", on_off).out)["courses"]
    assert [course["name"] for course in courses["courses"]][2:] == ["re-planned", "oracle"]
    priced = (
        "plan",
        "-m",
        "gpt2",
        "-c",
        "geo-8",
        "-b",
        "8",
        "--dtype",
        "fp16",
        "-q",
        "--json",
        "--objective",
        "cost",
    )
    front = json.loads(run(*priced).out)["pareto"]
    assert front == sorted(front, key=lambda point: float(point["iteration_seconds"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--scenario", "new0.nic=on-of"), "generators on-off, periodic"),
        (
            ("--scenario", "none", "--robust", "p99"),
            'found "p99", expected one of the objectives mean, p95, worst',
        ),
        (
            ("--objective", "speed"),
            'found "speed", expected one of the objectives throughput, cost',
        ),
        (
            ("--objective", "cost", "--scenario", "none"),
            "--objective cost cannot be combined with --scenario",
        ),
        (("--for-trace", "none"), "a scenario in which something changes"),
        (("--objective", "cost"), "Cannot compute costs because no device of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages_about_scenarios_and_prices(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    result = run(*CHANGING, *arguments)
    assert result.code == 2
    assert message in result.err
