"""Every command there is: help with an example, JSON with a version, a clear error and its exit
code."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli.command_result import PLAN, Run

from argosy.cli.app import app

CLUSTER = """
name = "pair"
[[nodes]]
name = "a"
count = 2
devices = { kind = "CPU-core" }
nic = { bandwidth = "1 Gbit/s" }
"""
PROGRAM = (
    "import torch\n"
    "def build():\n"
    "    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))\n"
    "    return model, lambda model, batch: model(batch).square().mean(), torch.ones(4, 8)\n"
)


def commands(
    group: Any = None, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    found = typer.main.get_command(app) if group is None else group
    for name, command in found.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = {" ".join(path): command for path, command in commands()}
NO_JSON = {
    "lab card": "its output is that of the program it runs",
    "lab run": "its output is that of the program it runs",
}
"""Commands whose standard output belongs to a program of the user's."""

WRONG: dict[str, tuple[tuple[str, ...], int]] = {
    "demo": (("--width", "4"), 2),
    "init": (("--node", "nothing"), 2),
    "doctor": (("--width", "4"), 2),
    "plan": (("-m", "gpt9", "-c", "two-cards", "-b", "8"), 2),
    "compare": (("-m", "gpt9", "-c", "two-cards", "-b", "8"), 2),
    "explain": (("missing.json",), 2),
    "simulate": (("missing.json",), 2),
    "run": (("missing.json", "train.py:build"), 2),
    "trace": (("missing.json",), 2),
    "calibrate": (("missing.json",), 2),
    "export": (("missing.json", "--to", "megatron"), 2),
    "probe": (("--resume",), 2),
    "profile": (("missing.py:build",), 2),
    "report": (("missing.json",), 2),
    "devices": (("--width", "4"), 2),
    "models": (("--width", "4"), 2),
    "completion": (("csh",), 2),
    "import": (("missing.txt", "--from", "slurm"), 2),
    "cluster show": (("missing.toml",), 2),
    "cluster check": (("missing.toml",), 2),
}
"""A call that is wrong, and the code it ends with; DESIGN: 2 bad input, 3 infeasible, 4 a run that
failed."""

JSON: dict[str, tuple[str, ...]] = {
    "init": ("--node", "1 x 1 H200"),
    "doctor": ("-q",),
    "plan": ("-m", "gpt2", "-c", "two-cards", "-b", "8", "--dtype", "fp16", "-q"),
    "compare": (
        "-m",
        "gpt2",
        "-c",
        "two-cards",
        "-b",
        "8",
        "--dtype",
        "fp16",
        "--only",
        "megatron",
        "-q",
    ),
    "explain": (PLAN, "-q"),
    "simulate": (PLAN, "-q"),
    "trace": (PLAN, "-q"),
    "export": (PLAN, "--to", "megatron", "--lossy"),
    "probe": ("--seconds", "0.01", "-q"),
    "profile": ("train.py:build", "--samples", "1", "--seconds", "0.001", "-q"),
    "report": (PLAN, "-q"),
    "devices": (),
    "models": (),
    "completion": ("bash",),
    "import": (
        "hosts.txt",
        "--from",
        "hostfile",
        "--kind",
        "H200",
        "--intra",
        "1 GB/s",
        "--nic",
        "1 GB/s",
    ),
    "cluster show": ("mixed-16",),
    "cluster check": ("mixed-16",),
}
"""A call that is quick. Those that need more than this machine's input have their own tests (see
``ELSEWHERE``)."""

ELSEWHERE = {
    "demo": "test_cli_commands",
    "run": "test_run_command",
    "calibrate": "test_cli_calibrate",
    "nbody": "test_nbody",
}
"""Where the JSON of other commands is tested, by the beginning of a file's name."""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_a_short_first_line_and_an_example(run: Run, name: str) -> None:
    result = run(*name.split(), "--help")
    assert result.code == 0
    assert f"argosy {name}" in result.out.split("xample")[-1]
    first = (COMMANDS[name].help or "").strip().splitlines()[0]
    assert 10 < len(first) <= 80
    assert max(map(len, result.out.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert ("--json" in options) != (name in NO_JSON)


@pytest.mark.parametrize("name", JSON)
def test_json_has_a_version_and_the_command(
    run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "probe":
        monkeypatch.setattr("argosy.measure.probe._SIZES", {"cpu": (64,)})
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "hosts.txt").write_text("one slots=2\n")
    result = run(*name.split(), *JSON[name], "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert (document["version"], document["command"]) == (1, name)


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_one_clear_line_and_a_code(run: Run, name: str) -> None:
    arguments, code = WRONG[name]
    result = run(*name.split(), *arguments)
    assert result.code == code
    assert result.out == ""
    assert "Traceback" not in result.err
    assert "error: " in result.err


def test_no_command_is_left_out() -> None:
    """A new command has to be put into these tables."""
    plain = {name for name in COMMANDS if name.split()[0] not in ("lab", "nbody")}
    assert plain == set(WRONG)
    assert plain - set(JSON) == set(ELSEWHERE) & plain
    assert set(NO_JSON) <= set(COMMANDS)


@pytest.mark.parametrize("what", ELSEWHERE)
def test_what_is_tested_elsewhere_is(what: str) -> None:
    files = list(Path(__file__).parents[1].rglob(f"{ELSEWHERE[what]}*.py"))
    assert files
    texts = {
        node.value
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
    }
    assert "--json" in texts


def test_labs_say_in_json_what_they_did(run: Run) -> None:
    """Without one that is up; ``tests/lab`` has labs that are."""
    assert json.loads(run("lab", "show", "--json").out)["command"] == "lab show"
    for call in (
        ("up", "missing.toml"),
        ("change", "no-such-lab", "a0.nic", "0"),
        ("down", "no-such-lab"),
    ):
        result = run("lab", *call, "--json")
        assert (result.code, result.out) == (2, "")
        assert "error: " in result.err


def test_nothing_that_fits_ends_with_3(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pair.toml").write_text(CLUSTER)
    result = run("plan", "-m", "gpt3-175b", "-c", "pair.toml", "-b", "8", "--dtype", "fp32", "-q")
    assert result.code == 3


def test_what_cannot_be_measured_ends_with_4(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "argosy.measure.profile", None)  # as without torch
    result = run("profile", "train.py:build")
    assert result.code == 4
    assert "pip install 'argosy[torch]'" in result.err
