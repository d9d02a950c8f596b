"""Everything that can go wrong for a user, as one small tree.

    ArgosyError                exit code
    ├── InputError             2   a file, a field or an option is wrong; carries every problem found, not the first
    ├── InfeasibleError        3   the input is fine, but nothing satisfies it
    │   └── NothingFitsError   3   in particular, no plan fits on the devices
    └── RunError               4   a run started and failed

What *we* got wrong is an ``assert``. The command line is the only place that catches
``ArgosyError``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


class ArgosyError(Exception):
    """Base of the tree; ``exit_code`` is what the command line returns."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with an input: where, what was found, what was expected, what to
    do."""

    expected: str
    found: str | None = None
    file: str | None = None
    line: int | None = None
    path: str | None = None
    """Place inside the document, such as ``nodes[0].nic.bandwidth``."""
    suggestion: str | None = None

    def __str__(self) -> str:
        place = self.file or ""
        if self.file and self.line is not None:
            place += f":{self.line}"
        head = ": ".join(part for part in (place, self.path) if part)
        body = (
            f"expected {self.expected}"
            if self.found is None
            else f"found {self.found}, expected {self.expected}"
        )
        text = f"{head}: {body}" if head else body
        return f"{text}; {self.suggestion}" if self.suggestion else text


# Of more problems than this, the rest is counted: nobody reads a hundred thousand lines.
MOST_PROBLEMS = 100


class InputError(ArgosyError):
    """A file, a field or an option is wrong. ``problems`` lists everything that was found, in file
    order."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem], *, more: int = 0) -> None:
        """``more``: problems that were found beside ``problems``, and are only counted."""
        found = tuple(problems)
        rest = max(0, len(found) - MOST_PROBLEMS) + more
        self.problems = found[:MOST_PROBLEMS]
        if rest:
            self.problems += (
                Problem(file=found[0].file, found=f"{rest} more problems", expected="none"),
            )
        assert self.problems, "an InputError names at least one problem"
        super().__init__("\n".join(str(problem) for problem in self.problems))


class Mismatch(ValueError):  # noqa: N818 (a value that does not match, not an error of ours)
    """A value that is not what its place needs, raised by whoever reads it; the document reader
    adds where it stood."""

    def __init__(self, found: object, expected: str, suggestion: str | None = None) -> None:
        self.found, self.expected, self.suggestion = show(found), expected, suggestion
        super().__init__(str(Problem(expected=expected, found=self.found, suggestion=suggestion)))


class InfeasibleError(ArgosyError):
    """The input is well-formed, but nothing satisfies it. The message names the constraint that
    binds."""

    exit_code = 3


class NothingFitsError(InfeasibleError):
    """No plan fits on the devices; ``argosy.explain.infeasible.diagnose`` says what would."""


class RunError(ArgosyError):
    """A run started and did not finish."""

    exit_code = 4


def bad_input(
    expected: str, found: object = None, *, where: str | None = None, suggestion: str | None = None
) -> InputError:
    """An ``InputError`` with a single problem, for values that do not come from a document.

    >>> str(bad_input("at least 1 stage", 0, where="num_stages"))
    'num_stages: found 0, expected at least 1 stage'
    """
    shown = None if found is None else show(found)
    return InputError([Problem(expected=expected, found=shown, path=where, suggestion=suggestion)])


def show(value: object) -> str:
    """A found value as a user wrote it: strings in double quotes, long ones cut.

    >>> show("25 Gb/s"), show(True), show(3)
    ('"25 Gb/s"', 'true', '3')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    text = f'"{value}"' if isinstance(value, str) else "nothing" if value is None else str(value)
    return text if len(text) <= 60 else text[:56] + "..."


def closest(word: str, known: Iterable[str]) -> str | None:
    """A suggestion naming the known word that ``word`` probably misspells, if any.

    >>> closest("bandwith", ["bandwidth", "latency"])
    'did you mean "bandwidth"?'
    """
    by_lower = {name.lower(): name for name in known}
    match = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f'did you mean "{by_lower[match[0]]}"?' if match else None
