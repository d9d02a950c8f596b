"""The numbered examples run, and print what was recorded: the same words, and numbers within 2
%."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
RECORD = runpy.run_path(str(FOLDER / "record.py"), run_name="record")
LONG = {"06_cosmic_web"}
"""A minute or more; tests/nbody runs it with fewer particles."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_CLOSE = 0.02


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in _NUMBER.findall(text)]


def words(text: str) -> str:
    return re.sub(r"[ \t]+", " ", _NUMBER.sub("#", text))


def examples() -> list[object]:
    return [
        pytest.param(
            path, id=path.stem, marks=[pytest.mark.exhaustive] if path.stem in LONG else []
        )
        for path in RECORD["EXAMPLES"]
    ]


@pytest.mark.parametrize("example", examples())
def test_an_example_prints_what_was_recorded(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "torch" in example.stem:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    recorded = example.with_suffix(".txt").read_text(encoding="utf-8")
    found = RECORD["printed"](example)
    assert words(found) == words(recorded)
    assert numbers(found) == pytest.approx(numbers(recorded), rel=_CLOSE, abs=_CLOSE)


def test_examples_are_numbered_and_listed() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in RECORD["EXAMPLES"]]
    assert [name[:2] for name in names] == [f"{number:02}" for number in range(1, len(names) + 1)]
    assert all(name in listed for name in names)
