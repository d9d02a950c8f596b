"""What strangers do: results onto their sources, files of another sort, odd names, narrow
terminals, no torch."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest
from cli.command_result import PLAN, Run

import argosy.runtime.job.program  # noqa: F401 (looks for torch once, before a test takes it away)
from argosy.cli.running.demo_training import train
from argosy.cli.terminal import check_output, stdout_console
from argosy.plan.file import read_plan

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}
HOSTS = (
    "import",
    "hosts",
    "--from",
    "hostfile",
    "--kind",
    "H200",
    "--intra",
    "1 GB/s",
    "--nic",
    "1 GB/s",
)
ONTO_ITSELF = {
    "simulate": ("simulate", "plan.json", "-o", "plan.json"),
    "report": ("report", "plan.json", "-o", "folder/../plan.json"),
    "report's timeline": ("report", PLAN, "plan.json", "-o", "plan.json"),
    "trace": ("trace", "plan.json", "-o", "link.json"),
    "export": ("export", "plan.json", "--to", "torchrun", "-o", "plan.json"),
    "import": (*HOSTS, "-o", "hosts"),
    "calibrate": ("calibrate", "plan.json", "-o", "plan.json"),
    "plan's cluster": ("plan", "-m", "gpt2", "-c", "plan.json", "-b", "8", "-o", "plan.json"),
    "plan's model": ("plan", "-m", "plan.json", "-c", "two-cards", "-b", "8", "-o", "plan.json"),
    "plan's program": ("plan", "--program", "train.py:build", "-c", "two-cards", "-o", "train.py"),
    "profile": ("profile", "train.py:build", "-o", "train.py"),
    "run": ("run", "plan.json", "train.py", "--slurm", "train.py"),
    "nbody plan": ("nbody", "plan", "-c", "hosts", "-o", "hosts"),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "plan.json").write_text(json.dumps(read_plan(PLAN).data))
    (tmp_path / "link.json").symlink_to("plan.json")
    (tmp_path / "hosts").write_text("one slots=2\n")
    (tmp_path / "train.py").write_text("def build(): ...\n")
    return tmp_path


@pytest.mark.parametrize("what", ONTO_ITSELF)
def test_no_result_takes_the_place_of_what_is_read(run: Run, files: Path, what: str) -> None:
    before = {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}
    result = run(*ONTO_ITSELF[what])
    assert result.code == 2
    assert result.err.endswith(" because this command reads it. Try another file.\n")
    assert {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()} == before


def test_a_result_may_take_the_place_of_another(run: Run, files: Path) -> None:
    (files / "old.json").write_text("an older result")
    assert run("simulate", "plan.json", "-q", "-o", "old.json").code == 0
    check_output(Path(os.devnull), os.devnull)


@pytest.mark.parametrize(
    "arguments", [("simulate", "plan.json"), ("trace", "plan.json"), ("report", "plan.json")]
)
def test_a_missing_folder_is_told_before_anything_is_played(
    run: Run, files: Path, arguments: tuple[str, ...]
) -> None:
    result = run(*arguments, "-o", "missing/result")
    assert result.code == 2
    reason = "because the folder missing does not exist. Try creating it."
    assert result.err == f"error: Cannot write missing/result {reason}\n"


def test_a_demonstration_that_cannot_be_kept_does_not_begin(run: Run, files: Path) -> None:
    result = run("demo", "--out", "hosts")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        'error: Cannot create the folder hosts because the system reports "File exists". '
        "Try another folder.\n"
    )


def test_a_file_of_another_sort_is_one_line(run: Run, files: Path) -> None:
    assert run("simulate", "plan.json", "-q", "-o", "timeline.json").code == 0
    result = run("explain", "timeline.json")
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert "timeline.json: found a file of another kind, with busy, clock, devices" in result.err
    assert "expected a file with model, cluster, global_batch" in result.err


def test_misspelt_fields_are_still_told_one_by_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"modle": 1, "clutser": 2, "stags": 3}')
    assert 'did you mean "cluster"?' in run("simulate", "plan.json").err


def test_a_timeline_of_another_cluster_has_no_place_in_a_page(run: Run, files: Path) -> None:
    assert run("simulate", "plan.json", "-q", "-o", "timeline.json").code == 0
    result = run("report", "gpt2-xl-on-two-cards", "timeline.json")
    assert result.code == 2
    assert result.err == (
        'error: timeline.json: devices: found "a0.0", expected devices of two-cards, on which the plan is\n'
    )


def test_a_plan_finds_its_model_beside_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job" / "mine").mkdir(parents=True)
    (tmp_path / "job" / "mine" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path / "job")
    assert (
        run(
            "plan",
            "-m",
            "mine",
            "-c",
            "two-cards",
            "-b",
            "8",
            "--runnable",
            "-q",
            "-o",
            "plan.json",
        ).code
        == 0
    )
    monkeypatch.chdir(tmp_path)
    assert run("simulate", "job/plan.json", "-q").out.startswith("mine on two-cards")
    (tmp_path / "train.py").write_text("def build(): ...")
    dry = ("train.py:build", "--adapt", "k", "--dry-run")
    assert '"model": "job/mine"' in run("run", "job/plan.json", *dry).out
    assert " --model " not in run("run", "gpt2-xl-on-two-cards", *dry).out
    (tmp_path / "job" / "plan.json").rename("plan.json")
    result = run("explain", "plan.json")
    assert result.code == 2
    assert result.err.startswith("error: plan.json:")
    assert (
        ': model.name: found "mine", expected a preset, or a file or folder that is here or beside'
        in result.err
    )
    assert "; --model says where its costs are" in run("run", "plan.json", *dry).err
    assert '"model": "job/mine"' in run("run", "plan.json", *dry, "--model", "job/mine").out


def test_no_name_is_no_model(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    result = run("plan", "-m", "", "-c", "two-cards", "-b", "8")
    assert result.code == 2
    assert result.err.startswith(
        'error: model: found "", expected a file, a folder or one of the presets'
    )


def test_brackets_in_names_are_no_markup(run: Run, tmp_path: Path) -> None:
    for name in ("m[red]", "m[/b]"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
        result = run("plan", "-m", name, "-c", "two-cards", "-b", "8", "-q", "-o", "plan[red].json")
        assert result.out.startswith(f"{name} on two-cards: ")
        assert "wrote plan[red].json; next: argosy explain 'plan[red].json'" in result.out


@pytest.mark.parametrize("columns", ["0", "1", "20", "60"])
def test_a_narrow_terminal_loses_no_figure(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    wide = run("explain", PLAN, "-q").out
    monkeypatch.setenv("COLUMNS", columns)
    assert run("explain", PLAN, "-q").out == wide


def test_more_than_the_memory_holds_is_one_clear_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise MemoryError("Unable to allocate 7 PiB")

    monkeypatch.setattr("argosy.cli.catalogue.devices.catalogue", fail)
    result = run("devices")
    assert result.code == 2
    reason = "this machine has too little memory (Unable to allocate 7 PiB)"
    told = f"error: Cannot finish this command because {reason}. Try a smaller task.\n"
    assert result.err == told


def test_commands_to_go_on_with_can_be_pasted(run: Run) -> None:
    told = run("init", "--node", "1 x 2 A100-80GB", "-o", "mine [1].toml").out
    assert "wrote mine [1].toml: " in told
    assert told.endswith("argosy cluster show 'mine [1].toml'\n")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_what_may_not_be_used_is_one_clear_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), "locked/plan.json")

    monkeypatch.setattr("argosy.cli.catalogue.devices.catalogue", fail)
    result = run("devices")
    assert result.code == 2
    reason = f'the system reports "{os.strerror(number)}"'
    told = f"error: Cannot open locked/plan.json because {reason}. "
    assert result.err == f"{told}Try a file or folder that you may use.\n"


WITHOUT_TORCH = {
    "plan": ("plan", "--program", "train.py", "-c", "two-cards", "-o", "out.json"),
    "explain": ("explain", "train.py:build", "--cluster", "two-cards"),
    "run": ("run", "two.json", "train.py", "--here"),
    "run --elastic": ("run", "two.json", "train.py", "--here", "--elastic"),
}


@pytest.mark.parametrize("what", WITHOUT_TORCH)
def test_without_torch_it_is_said_what_to_install(
    run: Run, files: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    assert (
        run(
            "plan", "-m", "gpt2", "-c", "two-cards", "-b", "8", "-q", "--runnable", "-o", "two.json"
        ).code
        == 0
    )
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "argosy.workload.capture.initial", None)
    monkeypatch.setitem(sys.modules, "argosy.runtime.sources.operations", None)
    monkeypatch.delattr("argosy.runtime.sources.operations", raising=False)
    result = run(*WITHOUT_TORCH[what])
    assert result.code == 4
    assert "needs torch" in result.err
    assert "pip install 'argosy[torch]'" in result.err
    assert not (files / "run").exists()


def test_the_demonstration_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "skipped" in train(stdout_console(), tmp_path, quiet=True)
    assert "pip install 'argosy[torch]'" in capsys.readouterr().out
