"""Running a command in this process, as a user would."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.command_result import Result, Run

from argosy.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """A command in an empty folder, on a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run_command(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        captured = capsys.readouterr()
        return Result(stop.value.code, captured.out, captured.err)

    return run_command
