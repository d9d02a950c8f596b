"""Define every error that a user can cause or meet, as one small tree.

    ArgosyError                exit code
    ├── InputError             2   a file, field or option is wrong; it lists all problems
    ├── InfeasibleError        3   the input is valid, but nothing satisfies it
    │   └── NothingFitsError   3   in particular, no plan fits on the devices
    └── RunError               4   a run started and failed

A mistake of Argosy itself is an ``assert``. The command line is the only place that catches
``ArgosyError``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass


class ArgosyError(Exception):
    """The base class from which all errors are derived; the command line returns its
    ``exit_code``."""

    exit_code = 1


@dataclass(frozen=True)
class Problem:
    """A problem that was found in an input: its place, what is wrong, and a suggestion.

    A bad value has ``found`` and ``expected``. Any other problem has a ``message``, which replaces
    them: options that exclude each other (``excluded``), or something that cannot be done
    (``impossible``).
    """

    path: str | None = None
    """Place inside the document, such as ``nodes[0].nic.bandwidth``."""
    found: str | None = None
    expected: str = ""
    _: KW_ONLY
    message: str | None = None
    file: str | None = None
    line: int | None = None
    suggestion: str | None = None

    def __post_init__(self) -> None:
        assert self.message is None or not self.expected, "a message replaces found and expected"

    def __str__(self) -> str:
        place = self.file or ""
        if self.file and self.line is not None:
            place += f":{self.line}"
        head = ": ".join(part for part in (place, self.path) if part)
        if self.message is not None:
            body = self.message
        elif self.found is None:
            body = f"expected {self.expected}"
        else:
            body = f"found {self.found}, expected {self.expected}"
        text = f"{head}: {body}" if head else body
        return f"{text}; {self.suggestion}" if self.suggestion else text


# Largest number of problems that one error lists; the rest is only counted, because nobody reads a
# hundred thousand lines.
MOST_PROBLEMS = 100


class InputError(ArgosyError):
    """An error that reports a wrong file, field or option; ``problems`` lists all that were found,
    in file order."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem], *, more: int = 0) -> None:
        """Build the error; ``more`` is the number of problems that were found in addition and are
        only counted."""
        given = tuple(problems)
        rest = max(0, len(given) - MOST_PROBLEMS) + more
        self.problems = given[:MOST_PROBLEMS]
        if rest:
            self.problems += (Problem(file=given[0].file, message=f"{rest} more problems"),)
        assert self.problems, "an InputError names at least one problem"
        super().__init__("\n".join(str(problem) for problem in self.problems))


class Mismatch(ValueError):  # noqa: N818 (a value that does not match, not an error of ours)
    """An error that a parser raises for a value that its place cannot take; the document reader
    adds the place."""

    def __init__(self, found: object, expected: str, suggestion: str | None = None) -> None:
        self.found, self.expected, self.suggestion = show(found), expected, suggestion
        super().__init__(str(self.at()))

    def at(
        self, *, file: str | None = None, line: int | None = None, path: str | None = None
    ) -> Problem:
        """Return the problem that this is at a place."""
        return Problem(
            path, self.found, self.expected, file=file, line=line, suggestion=self.suggestion
        )


class InfeasibleError(ArgosyError):
    """An error that reports valid input which nothing satisfies; the message names the constraint
    that binds."""

    exit_code = 3


class NothingFitsError(InfeasibleError):
    """An error that reports that no plan fits; ``argosy.explain.infeasible.diagnose`` finds what
    would."""


class RunError(ArgosyError):
    """An error that reports a run which started and did not finish."""

    exit_code = 4


def raise_any(problems: Iterable[Problem]) -> None:
    """Raise an ``InputError`` if there are any problems."""
    if problems := tuple(problems):
        raise InputError(problems)


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems of a file in the order of their lines."""
    return sorted(problems, key=lambda problem: problem.line or 0)


def bad_input(
    expected: str, found: object = None, where: str | None = None, *, suggestion: str | None = None
) -> InputError:
    """Return an ``InputError`` with a single problem, for values that do not come from a document.

    >>> str(bad_input("at least 1 stage", 0, where="num_stages"))
    'num_stages: found 0, expected at least 1 stage'
    """
    shown = None if found is None else show(found)
    return invalid(where, shown, expected, suggestion=suggestion)


def invalid(
    path: str | None = None,
    found: str | None = None,
    expected: str = "",
    *,
    file: str | None = None,
    line: int | None = None,
    suggestion: str | None = None,
) -> InputError:
    """Return an ``InputError`` with a single problem; ``found`` is a text that is shown as it is.

    >>> str(invalid(file="plan.json", line=3, found="2 stages", expected="at most 1"))
    'plan.json:3: found 2 stages, expected at most 1'
    """
    problem = Problem(path, found, expected, file=file, line=line, suggestion=suggestion)
    return InputError([problem])


def refused(message: str, *, path: str | None = None, file: str | None = None) -> InputError:
    """Return an ``InputError`` with a single problem that is stated in words of its own."""
    return InputError([Problem(path, message=message, file=file)])


def excluded(option: str, other: str) -> InputError:
    """Return the error for options that exclude each other.

    >>> str(excluded("--schedule", "--program"))
    '--schedule cannot be combined with --program'
    """
    return refused(f"{option} cannot be combined with {other}")


def impossible(action: str, reason: object, remedy: str) -> InputError:
    """Return the error for something that cannot be done; an ``OSError`` is a reason, too.

    >>> str(impossible("write a/plan.json", "the folder a does not exist", "creating it"))
    'Cannot write a/plan.json because the folder a does not exist. Try creating it.'
    """
    if isinstance(reason, OSError):
        reason = f'the system reports "{reason.strerror or reason}"'
    return refused(f"Cannot {action} because {reason}. Try {remedy}.")


def show(value: object) -> str:
    """Return a found value as a user wrote it: strings in double quotes, long ones cut.

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
    """Return a suggestion with the known word that ``word`` probably misspells; None if there is
    none.

    >>> closest("bandwith", ["bandwidth", "latency"])
    'did you mean "bandwidth"?'
    """
    by_lower = {name.lower(): name for name in known}
    match = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f'did you mean "{by_lower[match[0]]}"?' if match else None
