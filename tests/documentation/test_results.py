"""Every command and note that docs/results.md names exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main, note_text
from benchmarks.registry import Row, Sweep
from benchmarks.suite import ENTRIES, NOTES, SUITE

ROOT = Path(__file__).parent.parent.parent
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def rows_of(text: str) -> list[list[str]]:
    """Cells of the tables' rows, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "claim" and not set(row[0]) <= {"-", " "}]


def commands_of(cell: str) -> list[str]:
    """What is in backticks and begins like a command; a test file alone is one of pytest."""
    found = re.findall(r"`([^`]+)`", cell)
    return [
        f"pytest tests/runtime/{text}" if re.fullmatch(r"test_\w+\.py", text) else text
        for text in found
    ]


def notes_of(cell: str) -> list[str]:
    return re.findall(r"\]\(([^)]+\.md)\)", cell)


@pytest.mark.parametrize("row", rows_of(RESULTS), ids=lambda row: row[0][:40])
def test_every_command_and_every_note_exists(row: list[str]) -> None:
    assert commands_of(row[1])
    for command in commands_of(row[1]):
        assert exists(command), command
    for note in notes_of(row[3]):
        assert (ROOT / "docs" / note).resolve().is_file(), note
    assert notes_of(row[3]) or row[3] == "the tests themselves"


def exists(command: str) -> bool:
    words = shlex.split(command)
    match words:
        case ["pytest", *rest]:
            return all((ROOT / path).exists() for path in rest if path.startswith("tests"))
        case ["make", target]:
            return (
                re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
                is not None
            )
        case ["argosy", "nbody", name]:
            return (ROOT / "src" / "argosy" / "cli" / "gravity" / f"{name}.py").is_file()
        case ["python", "-m", "benchmarks", *names]:
            return bool(names) and all(name in ENTRIES for name in names)
        case ["python", "-m", module, *_]:
            path = ROOT / module.replace(".", "/")
            return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        case ["python", file, *_]:
            return (ROOT / file).is_file()
    return False


def test_the_suite_names_notes_and_commands_that_exist() -> None:
    for entry in SUITE:
        assert (ROOT / NOTES / entry.note).is_file(), entry
        assert exists(entry.command), entry
    written = {file.name for file in (ROOT / NOTES).glob("*.md")}
    assert written == {entry.note for entry in SUITE}, (
        "a note that no benchmark names, or the other way round"
    )
    modules = {
        file.stem
        for file in (ROOT / "benchmarks").glob("*.py")
        if "BENCHMARK = " in file.read_text()
    }
    assert len(modules) == sum(entry.benchmark is not None for entry in SUITE)


def test_a_list_and_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{listed}" for name in ENTRIES)
    assert main(["nothing"]) == 2
    assert "expected one of ratios, simulator" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "first"), [("fuzz", "make"), ("chaos", sys.executable), ("lab", sys.executable)]
)
def test_a_command_of_its_own_is_run_as_it_stands(
    name: str, first: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        ran.append(words)
        return subprocess.CompletedProcess(words, 3)

    monkeypatch.setattr(subprocess, "run", run)
    assert main([name]) == 3
    assert ran[0][0] == first and ran[0][-1] == shlex.split(ENTRIES[name].command)[-1]
    assert ENTRIES[name].shows in capsys.readouterr().out


def test_a_note_says_what_was_measured_when_and_how() -> None:
    text = note_text(
        ENTRIES["growth"], [Row(what="tasks", value=1.5, unit="ms", target="<= 2")], "2026-01-02"
    )
    assert (
        "2026-01-02" in text
        and "`python -m benchmarks growth`" in text
        and "| tasks | 1.5 ms | <= 2 |" in text
    )


def test_a_sweep_measures_every_phase_at_every_size() -> None:
    sweep = Sweep(
        over="steps", sizes=(2_000, 20_000), build=range, phases={"sum": sum, "list": list}
    )
    rows = sweep.measure()
    assert [row.what for row in rows[:3]] == [
        "sum, 2,000 steps",
        "sum, 20,000 steps",
        "sum: growth in steps",
    ]
    assert len(rows) == 6
