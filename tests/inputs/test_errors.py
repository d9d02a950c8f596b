"""Each kind of problem has its own form, and every problem survives JSON."""

from __future__ import annotations

import json

import pytest

from argosy.errors import Problem, bad_input, excluded, impossible, refused

FULL_DISK = OSError(28, "No space left on device")
FORMS = {
    '--k: found "x", expected a number': bad_input("a number", "x", where="--k"),
    "--schedule cannot be combined with --program": excluded("--schedule", "--program"),
    "--run needs --plan": refused("--run needs --plan"),
    "Cannot use port 80 because it is taken. Try another.": impossible(
        "use port 80", "it is taken", "another"
    ),
    'Cannot save because the system reports "No space left on device". Try later.': impossible(
        "save", FULL_DISK, "later"
    ),
}


@pytest.mark.parametrize("text", FORMS)
def test_every_kind_has_its_form_and_survives_json(text: str) -> None:
    [problem] = FORMS[text].problems
    assert str(problem) == str(FORMS[text]) == text
    assert Problem(**json.loads(json.dumps(vars(problem)))) == problem


def test_a_message_has_a_place_and_a_suggestion() -> None:
    problem = Problem(file="a.toml", line=3, path="x", message="is odd", suggestion="write 2")
    assert str(problem) == "a.toml:3: x: is odd; write 2"
    assert problem != Problem(file="a.toml", line=3, path="x", message="is odd")


def test_a_message_replaces_found_and_expected() -> None:
    with pytest.raises(AssertionError, match="a message replaces"):
        Problem(expected="a number", message="is odd")
