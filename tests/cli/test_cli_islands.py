"""Island plans on the command line: planned, simulated, explained, compared, and what is
refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.command_result import Run

SITES = """
name = "sites"
[[nodes]]
name = "x"
count = 2
devices = { kind = "A100-80GB", count = 2 }
intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
nic = { bandwidth = "1 Gbit/s", latency = "10 ms" }
"""
JOB = ("-m", "gpt2", "--dtype", "bf16", "-b", "64", "-q")


@pytest.fixture
def sites(tmp_path: Path) -> str:
    path = tmp_path / "sites.toml"
    path.write_text(SITES)
    return str(path)


PLANNED: list[str] = []
"""The island plan, once a test has needed it."""


@pytest.fixture
def plan(run: Run, sites: str, tmp_path: Path) -> str:
    path = tmp_path / "islands.json"
    if not PLANNED:
        done = run("plan", *JOB, "-c", sites, "--islands", "auto", "-o", str(path))
        assert done.code == 0, done.err
        assert (
            "DiLoCo with 2 islands" in done.out
            and "what changes" in done.out
            and "the best synchronous" in done.out
        )
        PLANNED.append(path.read_text())
    path.write_text(PLANNED[0])
    return str(path)


def test_a_plan_is_simulated_explained_and_dry_run(run: Run, plan: str) -> None:
    content = json.loads(Path(plan).read_text())
    predicted = content["predicted"]
    assert (
        content["kind"] == "islands"
        and predicted["step_seconds"] < predicted["synchronous_seconds"]
    )
    played = json.loads(run("simulate", plan, "-q", "--json").out)
    assert played["step_seconds"] == pytest.approx(predicted["step_seconds"], rel=1e-6)
    assert len(played["exchanges"]) == 4 and played["stalled"] is None
    changes = json.loads(run("explain", plan, "-q", "--json").out)["changes"]
    seconds = {row["change"]: row["step_seconds"] for row in changes}
    assert seconds["exchanged as int8"] < seconds["exchanged as bf16"] < seconds["as it is"]
    assert (
        "waiting" in run("simulate", plan, "-q").out
        and "twice as fast" in run("explain", plan, "-q").out
    )


def test_islands_stand_beside_synchronous_plans(run: Run, sites: str) -> None:
    done = run("compare", *JOB, "-c", sites, "--only", "megatron", "--islands", "2", "--json")
    blocking, overlapped = json.loads(done.out)["islands"]
    assert overlapped["step_seconds"] < blocking["step_seconds"] < blocking["synchronous_seconds"]
    assert blocking["overlap"] == 0 < overlapped["overlap"]
    assert "train apart" in blocking["what_changes"] and "late" in overlapped["what_changes"]


def test_auto_keeps_to_a_synchronous_plan_that_is_faster(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "near.toml"
    path.write_text(SITES.replace("1 Gbit/s", "3200 Gbit/s").replace("10 ms", "1 us"))
    done = run("plan", *JOB, "-c", str(path), "--islands", "auto", "--json")
    assert "no islands: the best island plan takes" in done.err
    assert "kind" not in json.loads(done.out)["plan"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--islands", "9"), "expected for sites 2, for its two nodes"),
        (("-c", "two-cards", "--islands", "2"), "has one node"),
        (("--islands", "2", "--robust", "model"), "with --islands"),
        (
            ("--islands", "2", "--overlap", "--sync-every", "1"),
            "at least 2 with 1 fragment and --overlap",
        ),
        (
            ("--islands", "2", "--fragments", "3", "--max-sync-every", "2"),
            "at least 3 with 3 fragments",
        ),
        (("--islands", "some"), "auto, off or a whole number"),
        (("--islands", "2", "--sync-every", "0"), "at least 1"),
        (
            ("--islands", "2", "--sync-every", "5", "--fragments", "2"),
            "multiple of the 2 fragments",
        ),
        (("--islands", "2", "--compress", "int4"), "int8"),
        (("--islands", "2", "--outer", "0.7"), "0.7,0.9"),
        (("--islands", "2", "--scenario", "x*.nic=on-off"), "with --islands"),
        (("--sync-every", "5"), "--sync-every needs --islands"),
    ],
)
def test_plans_that_make_no_sense_are_refused(
    run: Run, sites: str, options: tuple[str, ...], expected: str
) -> None:
    done = run("plan", *JOB, *(() if "-c" in options else ("-c", sites)), *options)
    assert done.code == 2 and expected in " ".join(done.err.split()), done.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--island", "2", "--meeting", "x:1"), "at most 1, the last island"),
        (("--island", "1"), "--meeting HOST:PORT"),
        (("--meeting", "x:1"), "--meeting needs --island"),
        (("--elastic",), "does not apply to an island plan"),
        (("--adapt", "k"), "full"),
    ],
)
def test_runs_that_make_no_sense_are_refused(
    run: Run, plan: str, tmp_path: Path, options: tuple[str, ...], expected: str
) -> None:
    program = tmp_path / "train.py"
    program.write_text("def build(): ...\n")
    done = run("run", plan, str(program), "--out", str(tmp_path / "run"), *options)
    assert done.code == 2 and expected in " ".join(done.err.split()), done.err


def test_commands_of_all_islands_are_printed(run: Run, plan: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("def build(): ...\n")
    commands = json.loads(run("run", plan, str(program), "--dry-run", "--json").out)["commands"]
    assert [(one["island"], len(one["devices"])) for one in commands] == [(0, 2), (1, 2)]
    assert all("argosy.runtime.islands.worker" in one["command"] for one in commands)
    assert "# island 1" in run("run", plan, str(program), "--dry-run").out


def test_a_trace_shows_the_steps_around_an_exchange_and_the_links_that_it_crosses(
    run: Run, plan: str
) -> None:
    assert run("trace", plan, "-o", "trace.json", "-q").code == 0
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"device x0.0", "device x1.1", "link x0.nic.out", "link x1.nic.in"} <= processes
    assert run("trace", plan, "--per-rank", "ranks", "-n", "1", "-q").code == 0
    assert len(list(Path("ranks").iterdir())) == 4
    done = run("trace", plan, "--k", "2")
    assert done.code == 2 and "does not apply to an island plan" in done.err


def test_the_page_shows_islands_exchanges_and_what_changes(run: Run, plan: str) -> None:
    assert run("report", plan, "-o", "page.html", "-q").code == 0
    page = Path("page.html").read_text()
    for text in (
        "Islands train apart",
        "best synchronous plan",
        "after step",
        "exchanged as int8",
        "x1.nic.out",
    ):
        assert text in page, text
    done = run("report", plan, "--decisions", "x.jsonl")
    assert done.code == 2 and "does not apply to an island plan" in done.err


def test_no_other_system_takes_an_island_plan(run: Run, plan: str) -> None:
    done = run("export", plan, "--to", "megatron", "-o", "job")
    assert done.code == 2 and "a plan of one group of devices" in done.err
