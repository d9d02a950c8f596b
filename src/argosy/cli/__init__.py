"""The command line: one module per subcommand. Here errors become messages and exit codes, and
nowhere else."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from argosy.errors import ArgosyError, InputError, Problem, bad_input

COMPLETING = "_ARGOSY_COMPLETE"
"""Set by a shell that asks what could come next."""
BROKEN_PIPE = 1
INTERRUPTED = 130
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code; ``arguments`` default to the process's own."""
    _open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a bar that a terminal cannot show is no reason to fail
    sys.exit(_run(arguments))


def _open_what_is_closed() -> None:
    """Whoever closed a stream wants none of it; in their place a file that we write could get a
    stream's number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 (until the end)


def _run(arguments: Sequence[str] | None) -> int:
    from argosy.cli.app import app
    from argosy.cli.usage import UsageError, as_input_error, is_help

    given = list(sys.argv[1:] if arguments is None else arguments)
    if COMPLETING in os.environ:
        from argosy.cli.completion import listen

        listen()
    try:
        try:
            code = app(args=given, prog_name="argosy", standalone_mode=False)
        finally:
            sys.stdout.flush()
    except UsageError as error:
        if is_help(error):
            sys.stderr.write(f"{error}\n")
            return InputError.exit_code
        return _tell(as_input_error(error, given))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except ArgosyError as error:
        return _tell(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone
        _drop_output()
        return BROKEN_PIPE
    except MemoryError as error:
        found = str(error) or "not enough of it"
        return _tell(
            InputError(
                [
                    Problem(
                        path="memory", found=found, expected="a task that this machine has room for"
                    )
                ]
            )
        )
    except OSError as error:
        if error.errno in NO_ROOM:
            _drop_output()
            return _tell(bad_input("room for what is written", str(error.strerror), where="output"))
        if error.errno in FORBIDDEN and error.filename:
            found = str(error.strerror).lower()
            expected = "a file or folder that this user may use"
            return _tell(
                InputError([Problem(file=str(error.filename), found=found, expected=expected)])
            )
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = str(error.filename)
        return _tell(
            bad_input(
                "a name that a file can have", f"{len(name)} characters that begin with {name[:40]}"
            )
        )
    return code if isinstance(code, int) else 0


def _drop_output() -> None:
    """Keep the interpreter from flushing once more, when it ends, what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(error: ArgosyError) -> int:
    for line in str(error).splitlines():
        sys.stderr.write(f"error: {line}\n")
    return error.exit_code
