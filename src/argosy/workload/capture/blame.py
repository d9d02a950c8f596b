"""Turn errors of a user's own program into input errors that name the line they came from.

A user's file, its ``build``, its model and its loss run inside Argosy and may raise anything; every
such exception becomes an ``InputError`` that names the line. This module does not need torch.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from argosy.errors import ArgosyError, InputError, Problem


def _libraries() -> tuple[str, ...]:
    torch = importlib.util.find_spec("torch")
    torches = (
        (str(Path(torch.origin).parent),) if torch is not None and torch.origin is not None else ()
    )
    return (*torches, str(Path(__file__).parents[2]))


LIBRARIES = _libraries()
"""Folders of torch and of this package, whose frames mean nothing to a user."""
INSTALLED = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"])
"""Folders of installed packages: a model in them was not written by the user."""
CONTENTS = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GuardOnDataDependentSymNode",
    "value out of a tracing tensor",
    ".numpy() is not supported",
    "tolist() shouldn't be called",
    "data_ptr",
)
"""Names or words of errors that are raised when a program reads the contents of a tensor."""


def reads_contents(error: Exception) -> bool:
    """Return whether an error was raised because a program read the contents of a tensor."""
    return any(word in f"{type(error).__name__}: {error}" for word in CONTENTS)


@contextmanager
def blamed(
    name: str,
    *,
    expected: str,
    suggestion: str | None = None,
    why: Callable[[], str] = str,
    passing: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Turn any exception of the user's program inside the block into an ``InputError``; ``name`` is
    its place if no line of the user is known, ``why`` returns why no module of it could be one
    operation. Exceptions of the types ``passing`` are left alone."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (ArgosyError, *passing)):
            raise
        if reads_contents(error):
            expected = "a step whose operations do not depend on the contents of tensors"
            suggestion = (
                "compute with masks in place of branches, `.item()` and indexing by a condition, "
                "or choose by top k, argmax or a sort in a module inside the model"
            )
            if why():
                suggestion += f" ({why()})"
        raise InputError([_problem(error, name, expected, suggestion)]) from error


def _problem(error: Exception, name: str, expected: str, suggestion: str | None) -> Problem:
    message = str(error).strip().split("\n")[0] or type(error).__name__
    if isinstance(error, SyntaxError):
        where = name if error.filename is None else f"{error.filename}:{error.lineno}"
        return Problem(
            where, f"{type(error).__name__} ({message})", expected, suggestion=suggestion
        )
    frames = _user_frames(error.__traceback__)
    frame = frames[-1] if frames else None
    where = f"{frame.filename}:{frame.lineno}" if frame else name
    line = f" in `{frame.line}`" if frame and frame.line else ""
    own = next((f for f in reversed(frames) if not f.filename.startswith(INSTALLED)), None)
    called = (
        f", called at {own.filename}:{own.lineno}" if own is not None and own is not frame else ""
    )
    actual = f"{type(error).__name__}{line} ({message}){called}"
    return Problem(where, actual, expected, suggestion=suggestion)


def _user_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """Return the frames that are neither torch's nor Argosy's; a library's model (transformers)
    counts as the user's."""
    return [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith((*LIBRARIES, "<"))
    ]


def running_line() -> str:
    """Return ``file:line`` of the innermost user frame of the current stack, or an empty text."""
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith((*LIBRARIES, "<"))]
    own = [frame for frame in frames if not frame.filename.startswith(INSTALLED)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def stack_line(stack: str | None) -> str:
    """Return ``file:line`` of the innermost user frame of a recorded stack, or an empty text."""
    innermost = ""
    for line in (stack or "").splitlines():
        text = line.strip()
        if text.startswith('File "') and not text[6:].startswith((*LIBRARIES, "<")):
            file, _, rest = text[6:].partition('"')
            number = rest.removeprefix(", line ").partition(",")[0]
            innermost = f"{file}:{number}"
    return innermost
