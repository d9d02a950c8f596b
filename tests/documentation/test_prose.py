"""Docstrings are sentences."""

from __future__ import annotations

from pathlib import Path

import pytest
from documentation.prose import docstrings_of, findings, first_sentence, has_verb

SOURCE = Path(__file__).parents[2] / "src" / "argosy"


def test_every_docstring_of_the_package_is_a_sentence() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 400
    assert [str(finding) for file in files for finding in findings(file)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Return the seconds of a step.", True),
        ("A stage that runs on two devices.", True),
        ("Seconds of a step.", False),
        ("The cheapest row; it is kept.", False),
    ],
)
def test_a_verb_is_found_in_the_first_sentence(text: str, expected: bool) -> None:
    assert has_verb(first_sentence(text)) is expected


@pytest.mark.parametrize("opening", ["Of the gap", "What a rank holds", "(2), and", "The same as"])
def test_an_opening_that_is_a_riddle_is_found(tmp_path: Path, opening: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(f'"""{opening} is kept."""\n')
    assert [finding.rule for finding in findings(file)] == ["riddle"]
    assert list(docstrings_of(file)) == [(1, f"{opening} is kept.")]
