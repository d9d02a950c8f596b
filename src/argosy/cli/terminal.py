"""Send output to its place: results to stdout, progress to stderr, files to disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from argosy.errors import RunError, excluded, impossible

if TYPE_CHECKING:
    from rich.console import Console

STDOUT = Path("-")
"""The value of ``-o`` that sends the result to stdout; all other output then goes to stderr."""
# The number of columns that the tables are designed for.
_LEAST_COLUMNS = 80


def stdout_console(width: int | None = None, *, beside: Path | None = None) -> Console:
    """Return the console for results.

    It writes to stderr if ``beside`` says that a file goes to stdout. It uses no colour if NO_COLOR
    is set or there is no terminal. Square brackets in a user's names are not markup. A terminal
    that is too narrow for the tables breaks their lines, so that no figure is omitted.
    """
    from rich.console import Console

    plain = bool(os.environ.get("NO_COLOR"))
    colours: Literal["auto"] | None = None if plain else "auto"
    console = Console(
        width=width,
        highlight=False,
        emoji=False,
        markup=False,
        color_system=colours,
        stderr=beside == STDOUT,
    )
    if width is None:
        console.width = max(console.width, _LEAST_COLUMNS)
    return console


def silent_console() -> Console:
    """Return a console that prints nothing, for commands whose JSON alone is wanted."""
    from rich.console import Console

    return Console(quiet=True)


def print_json(command: str, content: dict[str, Any]) -> None:
    """Print one JSON object on stdout, with sorted keys and a version."""
    document = {"version": 1, "command": command, **content}
    sys.stdout.write(json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")


@contextlib.contextmanager
def progress(message: str, *, quiet: bool) -> Iterator[None]:
    """Show on stderr what takes time: a spinner on a terminal, else a plain line."""
    if quiet:
        yield
    elif has_spinner():
        with spinner(message):
            yield
    else:
        sys.stderr.write(f"{message}\n")
        yield


def tell(text: str, *, quiet: bool) -> None:
    """Print a line on stderr unless ``quiet`` is set."""
    if not quiet:
        sys.stderr.write(f"{text}\n")


@contextlib.contextmanager
def needs(reason: str, extra: str) -> Iterator[None]:
    """Raise ``RunError`` with the package to install if an import inside the context fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise RunError(f"{reason} ({error}); pip install 'argosy[{extra}]'") from None


def has_spinner() -> bool:
    """Return whether a line on stderr may change."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")


@contextlib.contextmanager
def spinner(message: str) -> Iterator[Callable[[str], None]]:
    """Show a moving line with the time since it began; yield a function that changes its text."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    clock = TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True))
    columns = (SpinnerColumn(), clock, TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(message, total=None)
        yield lambda text: shown.update(task, description=text)


def say_written(text: str, output: Path) -> None:
    """Print that an output was written, unless it went to stdout."""
    if output != STDOUT:
        sys.stdout.write(f"{text}\n")


def no_stdout(path: Path, kind: str, *, option: str = "--output") -> None:
    """Raise ``InputError`` if something that stdout cannot take, such as a folder, is to go
    there."""
    if path == STDOUT:
        raise impossible(f"write {kind} to stdout", f"{option} is -", "a name")


def check_output(
    path: Path, *sources: str | Path | None, json: bool = False, option: str = "--output"
) -> None:
    """Raise ``InputError`` if an output cannot be written.

    Its folder may be missing, or it may overwrite one of the ``sources`` that the command reads or
    the ``json`` that it prints. Commands check this before a long search.
    """
    from argosy.document import is_there

    if path == STDOUT:
        if json:
            raise excluded(f"{option} -", "--json, which prints to stdout")
        return
    if path.is_dir():
        raise impossible(f"write {path}", "it is a folder", "the name of a file")
    if path.is_file() and any(
        source and is_there(source) and path.samefile(source) for source in sources
    ):
        raise impossible(f"write {path}", "this command reads it", "another file")
    if not path.parent.exists():
        reason = f"the folder {path.parent} does not exist"
        raise impossible(f"write {path}", reason, "creating it")


def write_file(path: Path, content: bytes, *, make_folder: bool = False) -> None:
    """Write a result; raise ``InputError`` if that is not possible.

    A missing folder is created only if ``make_folder`` is set.
    """
    if path == STDOUT:
        typer.echo(content, nl=False)  # the bytes, whatever the encoding of the terminal
        return
    if not make_folder:
        check_output(path)
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
        _replace(path, content)
    except OSError as error:
        raise impossible(f"write {path}", error, "another file") from None


def _replace(path: Path, content: bytes) -> None:
    """Write a file completely or not at all: the old content stays until the new one is on the
    disk."""
    target = path.resolve()
    if target.is_fifo():
        _feed(target, content)
        return
    if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
        path.write_bytes(content)  # a pipe or device, or a file in a read-only folder
        return
    partial = target.with_name(f".argosy-{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        if target.exists():
            partial.chmod(target.stat().st_mode)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _feed(pipe: Path, content: bytes) -> None:
    """Write to a named pipe that has a reader; waiting for one could block forever."""
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        reason = "nobody reads this named pipe" if error.errno == errno.ENXIO else error
        raise impossible(f"write {pipe}", reason, "another file") from None
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
