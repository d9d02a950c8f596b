"""What a new user meets first: init, doctor, and the tab key."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli.command_result import Run

from argosy.cluster.file import load_cluster

ANSWERS = "my lab\nlab\nA101\nV100-32GB\n2\n3\n50 GB/s\n25 Gbit\n25 Gbit/s\nyes\nRTX-4090\n1\n\n10 Gbit/s\nno\n"


def test_a_conversation_ends_in_a_file_that_loads(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(ANSWERS))
    result = run("init")
    assert result.code == 0
    assert result.out.startswith("wrote cluster.toml: ")
    assert 'found "my lab"' in result.err
    assert 'did you mean "25 Gbit/s"?' in result.err
    cluster = load_cluster(tmp_path / "cluster.toml")
    assert cluster.name == "lab"
    assert [node.name for node in cluster.nodes] == ["a0", "a1", "a2", "b0"]
    assert cluster.bandwidth(cluster.fastest("a0.0", "a0.1", 1e9)).at(0) == pytest.approx(50e9)
    assert cluster.bandwidth(cluster.fastest("a0.0", "b0.0", 1e9)).at(0) == pytest.approx(10e9 / 8)


def test_an_end_of_answers_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("lab\n"))
    result = run("init")
    assert result.code == 2
    assert "--node" in result.err


def test_options_in_place_of_answers(run: Run, tmp_path: Path) -> None:
    nodes = (
        "--node",
        "2 x 4 a100-80gb, intra 300 GB/s, nic 200 Gbit/s",
        "--node",
        "1 x 2 V100-32GB",
    )
    found = json.loads(run("init", "--name", "two", *nodes, "--json").out)
    assert (found["devices"], found["nodes"], found["command"]) == (10, 3, "init")
    text = (tmp_path / "cluster.toml").read_text()
    assert text.count("#") > 10
    assert "a guess" in text
    cluster = load_cluster(tmp_path / "cluster.toml")
    assert cluster.device("b0.1").kind.name == "V100-32GB"
    again = run("init", *nodes)
    assert again.code == 2
    assert "--force" in again.err
    assert run("init", *nodes, "--force").code == 0


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ("2 by 4", "nodes x devices of a kind"),
        ("2 x 4 A100-80G", "A100-80GB"),
        ("1 x 1 H100-SXM, nic fast", "rate such as"),
        ("1 x 1 H200, wifi 1 Gbit/s", "intra or nic"),
        ("0 x 4 H200", "at least 1 node"),
    ],
)
def test_options_that_say_nothing(run: Run, tmp_path: Path, node: str, says: str) -> None:
    result = run("init", "--node", node)
    assert result.code == 2
    assert says in result.err
    assert not (tmp_path / "cluster.toml").exists()


def test_doctor_tries_things(run: Run) -> None:
    pytest.importorskip("torch")
    findings = {
        one["what"]: one for one in json.loads(run("doctor", "--json", "-q").out)["findings"]
    }
    assert findings["torch"]["works"]
    assert findings["gloo"] == {
        "what": "gloo", "works": True, "found": "works", "needed_for": "running on CPUs", "to_do": "",
    }  # fmt: skip
    assert all(one["works"] or one["to_do"] for one in findings.values())
    assert {
        "GPU",
        "nccl",
        "network lab",
        "core shares",
        "browser",
        "numba",
        "highspy",
    } <= set(findings)


def test_doctor_says_what_to_do_without_a_package(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import util

    real = util.find_spec
    monkeypatch.setattr(
        util, "find_spec", lambda name, *rest: None if name == "scipy" else real(name, *rest)
    )
    out = run("doctor", "-q").out
    assert "no     scipy " in out
    assert "scipy: pip install 'argosy[nbody]'" in out


@pytest.fixture
def shell_folder(tmp_path: Path) -> Path:
    """A folder with a command ``argosy`` for a shell to run."""
    source = Path(__file__).parents[2] / "src"
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "argosy"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={source} exec {sys.executable} -m argosy "$@"\n')
    command.chmod(0o755)
    return tmp_path


def ask(shell: list[str], folder: Path, **variables: str) -> str:
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **variables}
    done = subprocess.run(
        shell, capture_output=True, text=True, check=True, env=environment, cwd=folder, timeout=60
    )
    return done.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["argosy", "expl"], ["explain"]),
        (["argosy", "plan", "--model", "llama-3-"], ["llama-3-70b", "llama-3-8b"]),
        (["argosy", "export", "x", "--to", "mega"], ["megatron"]),
    ],
)
def test_bash_completes(run: Run, shell_folder: Path, words: list[str], offered: list[str]) -> None:
    script = run("completion", "bash").out
    question = (
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _argosy_completion argosy"
    )
    answer = ask(
        ["bash", "-c", f'{script}\n{question}; printf "%s\\n" "${{COMPREPLY[@]}}"'], shell_folder
    )
    assert answer.split() == offered


def test_zsh_is_answered(run: Run, shell_folder: Path) -> None:
    script = run("completion", "zsh").out
    assert script.startswith("#compdef argosy")
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=script, text=True, check=True, timeout=60)
    answer = ask(
        ["argosy"],
        shell_folder,
        _ARGOSY_COMPLETE="complete_zsh",
        _TYPER_COMPLETE_ARGS="argosy expl",
    )
    assert "explain" in answer


def test_fish_is_answered(run: Run, shell_folder: Path) -> None:
    script = run("completion", "fish").out
    if shutil.which("fish"):
        answer = ask(["fish", "-c", f"{script}\ncomplete -C 'argosy expl'"], shell_folder)
    else:
        variables = {
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "_TYPER_COMPLETE_ARGS": "argosy expl",
        }
        answer = ask(["argosy"], shell_folder, _ARGOSY_COMPLETE="complete_fish", **variables)
    assert answer.split()[0] == "explain"
