"""What strangers do: results onto their sources, files of another sort, odd names, narrow terminals, no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_result import PLAN, Run

from argosy.plan.file import read_plan

HOSTS = ("import", "hosts", "--from", "hostfile", "--kind", "H200", "--intra", "1 GB/s", "--nic", "1 GB/s")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "plan.json").write_text(json.dumps(read_plan(PLAN).data))
    (tmp_path / "link.json").symlink_to("plan.json")
    (tmp_path / "hosts").write_text("one slots=2\n")
    (tmp_path / "train.py").write_text("def build(): ...\n")
    return tmp_path


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
    assert run("plan", "-m", "gpt2", "-c", "two-cards", "-b", "8", "-q", "--runnable", "-o", "two.json").code == 0
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "argosy.workload.capture.initial", None)
    result = run(*WITHOUT_TORCH[what])
    assert result.code == 4
    assert "needs torch" in result.err
    assert "pip install 'argosy[torch]'" in result.err
    assert not (files / "run").exists()
