"""Where output goes: results to stdout, progress to stderr, files to disk."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argosy.errors import InputError, Problem

if TYPE_CHECKING:
    from rich.console import Console


def stdout_console(width: int | None = None) -> Console:
    """For results. Without colour where NO_COLOR is set or stdout is no terminal."""
    from rich.console import Console

    plain = bool(os.environ.get("NO_COLOR"))
    return Console(width=width, highlight=False, emoji=False, color_system=None if plain else "auto")


def silent_console() -> Console:
    """For commands that tell as they go, where only their JSON is wanted."""
    from rich.console import Console

    return Console(quiet=True)


def print_json(command: str, content: dict[str, Any]) -> None:
    """One JSON object on stdout, with sorted keys and a version."""
    document = {"version": 1, "command": command, **content}
    sys.stdout.write(json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")


@contextlib.contextmanager
def progress(message: str, *, quiet: bool) -> Iterator[None]:
    """Say on stderr what takes time: a spinner on a terminal, a plain line elsewhere."""
    from rich.console import Console

    if quiet:
        yield
    elif sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        with Console(stderr=True).status(message):
            yield
    else:
        sys.stderr.write(f"{message}\n")
        yield


def check_folder(path: Path) -> None:
    """An ``InputError`` where an output cannot be written for want of a folder: worth knowing before a long search."""
    if path.is_dir():
        raise InputError([Problem(file=str(path), expected="the name of a file to write", found="a folder")])
    if not path.parent.exists():
        raise InputError([Problem(file=str(path), expected=f"an existing folder {path.parent} to write into")])


def write_file(path: Path, content: bytes, *, make_folder: bool = False) -> None:
    """Write a result; an ``InputError`` where that cannot be done. Only an option that asks for a folder makes it."""
    if not make_folder:
        check_folder(path)
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
        path.write_bytes(content)
    except OSError as error:
        raise InputError([Problem(file=str(path), expected="a writable file", found=error.strerror)]) from None
