"""Names on the command line: those that the tab key completes, of files, of hosts; and what is said
of wrong ones."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.cli import main, names
from argosy.cli.running import elastic
from argosy.errors import InputError

PLAN = "gpt2-xl-on-two-cards"


def test_files_complete_beside_bundled_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for name in ("runs/one.json", "runs/two.json", "gpt.json"):
        Path(name).touch()
    assert names.plans("gpt") == [PLAN, "gpt.json"]
    assert names.plans("runs/") == ["runs/one.json", "runs/two.json"]
    assert names.plans("runs/t") == ["runs/two.json"]
    assert "gpt.json" not in names.plans("")
    assert names.plans("**[") == []


def test_timelines_of_one_name_are_all_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / run / "timeline.json" for run in ("before", "after")]
    for file in files:
        file.parent.mkdir()
        with pytest.raises(SystemExit):
            main(["simulate", PLAN, "-q", "-o", str(file)])
    for shown, labels in ((files, [str(file) for file in files]), (files[:1], ["timeline.json"])):
        page = tmp_path / "page.html"
        with pytest.raises(SystemExit) as stop:
            main(["report", PLAN, *map(str, shown), "-q", "-o", str(page)])
        assert stop.value.code == 0
        assert all(f">simulated, {label}</option>" in page.read_text() for label in labels)
    capsys.readouterr()


def test_a_host_whose_name_leads_nowhere_is_asked_for_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere(name: str) -> str:
        raise socket.gaierror(-2, f"{name} is not known")

    monkeypatch.setattr(socket, "gethostbyname", nowhere)
    with pytest.raises(InputError, match=r"Cannot find the address of this host .* Try --address"):
        elastic._own_address()


@pytest.mark.parametrize("seconds", ["abc", -1, 0, True, None, [1.0]])
def test_a_comparison_without_times_is_refused(
    seconds: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compare.json"
    file.write_text(
        json.dumps({"rows": [{"name": "x", "feasible": True, "iteration_seconds": seconds}]})
    )
    with pytest.raises(SystemExit) as stop:
        main(["report", PLAN, "--compare", str(file), "-q", "-o", str(tmp_path / "page.html")])
    assert stop.value.code == 2
    assert "compare.json: rows[0].iteration_seconds: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--out", "file/run"],
            'Cannot create the folder file/run because the system reports "Not a directory"',
        ),
        (["--lab", "nosuch"], 'found "nosuch", expected a lab that is up'),
        (["--port", "99999"], "--port"),
        (["--node-rank", "4"], "--node-rank: found 4, expected at most 0, the plan's last node"),
        (["--dry-run", "--slurm", "job.sh"], "--dry-run cannot be combined with --slurm"),
        (
            ["--elastic", "--dry-run"],
            "--dry-run cannot be combined with --elastic",
        ),
    ],
)
def test_a_run_that_cannot_begin_says_why(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("train.py").write_text("def build(): ...\n")
    with pytest.raises(SystemExit) as stop:
        main(["run", PLAN, "train.py", *arguments])
    said = capsys.readouterr().err
    assert stop.value.code == 2, said
    assert says in said
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("complete", "beginning", "name"),
    [
        (names.clusters, "mixed-1", "mixed-16"),
        (names.profiles, "h200-llama", "h200-llama-2-7b"),
        (names.calibrations, "", "h200-bf16"),
    ],
)
def test_bundled_names_complete(
    complete: Callable[[str], list[str]], beginning: str, name: str
) -> None:
    assert any(found.startswith(name) for found in complete(beginning))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "found a list of 0, expected a JSON object"),
        ({"rows": [{}]}, "expected what argosy compare --json prints, with rows"),
        ({"rows": [], "model": "gpt2"}, 'model: found "gpt2", expected gpt2-xl, as in the plan'),
        ({"rows": [], "cluster": {"hash": "0"}}, 'cluster.hash: found "0", expected '),
        ({"rows": [], "global_batch": 1}, 'global_batch: found "1", expected 64, as in the plan'),
    ],
)
def test_a_comparison_of_something_else_is_refused(
    content: object, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compare.json"
    file.write_text(json.dumps(content))
    with pytest.raises(SystemExit) as stop:
        main(["report", PLAN, "--compare", str(file), "-q", "-o", str(tmp_path / "page.html")])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_comparison_of_the_plan_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "compare.json", tmp_path / "page.html"
    rows = [
        {"name": "rival-one", "feasible": True, "iteration_seconds": 12.0},
        {"name": "rival-two", "feasible": False, "reason": "too large for it"},
    ]
    file.write_text(json.dumps({"rows": rows, "model": "gpt2-xl", "global_batch": 64}))
    with pytest.raises(SystemExit) as stop:
        main(["report", PLAN, "--compare", str(file), "-q", "-o", str(page)])
    assert stop.value.code == 0, capsys.readouterr().err
    assert all(text in page.read_text() for text in ("rival-one", "rival-two", "too large for it"))
