"""Run the command line: one module per subcommand.

Only this module turns errors into messages and exit codes.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from argosy.errors import ArgosyError, InputError, Problem, impossible

COMPLETING = "_ARGOSY_COMPLETE"
"""The environment variable that a shell sets to request completions."""
# The exit code if the reader of our output has gone.
BROKEN_PIPE = 1
# The exit code after an interrupt: 128 + SIGINT.
INTERRUPTED = 130
# System errors for missing permission, and for missing space.
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code; ``arguments`` default to the process's own."""
    _open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that a terminal cannot show is no reason to fail.
            stream.reconfigure(errors="replace")
    sys.exit(_run(arguments))


def _open_what_is_closed() -> None:
    """Replace standard streams that the caller closed by ``/dev/null``.

    Otherwise a file that we write could get a stream's number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The file stays open until the end of the process.
            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, null)


def _run(arguments: Sequence[str] | None) -> int:
    """Run a command and return its exit code."""
    import typer

    from argosy.cli.app import app

    # The click that typer uses is its own in some versions; this is its class of usage errors.
    usage_error: type[Exception] = typer.BadParameter.__bases__[0]
    given = list(sys.argv[1:] if arguments is None else arguments)
    if COMPLETING in os.environ:
        from argosy.cli.completion import listen

        listen()
    try:
        try:
            code = app(args=given, prog_name="argosy", standalone_mode=False)
        finally:
            sys.stdout.flush()
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{error}\n")
            return InputError.exit_code
        return _tell(_wrong_usage(error))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except ArgosyError as error:
        return _tell(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        _drop_output()
        return BROKEN_PIPE
    except MemoryError as error:
        details = f" ({error})" if str(error) else ""
        reason = f"this machine has too little memory{details}"
        return _tell(impossible("finish this command", reason, "a smaller task"))
    except OSError as error:
        return _tell(_system_error(error))
    return code if isinstance(code, int) else 0


def _wrong_usage(error: Any) -> InputError:
    """Return typer's error about the arguments in one line that names the command's help."""
    message = " ".join(error.format_message().split()).removesuffix(".")
    command = error.ctx.command_path if error.ctx is not None else "argosy"
    return InputError([Problem(message=message, suggestion=f"see {command} --help")])


def _system_error(error: OSError) -> ArgosyError:
    """Return a system error that a user can mend as an error of ours; raise any other again."""
    if error.errno in NO_ROOM:
        _drop_output()
        return impossible("write the output", error, "freeing space, or another disk")
    if error.errno in FORBIDDEN and error.filename:
        return impossible(f"open {error.filename}", error, "a file or folder that you may use")
    if error.errno != errno.ENAMETOOLONG:
        raise error
    name = str(error.filename)
    reason = f"its name has {len(name)} characters"
    return impossible(f"open the file {name[:40]}...", reason, "a shorter name")


def _drop_output() -> None:
    """Discard output that could not be written, so that the interpreter does not flush it at its
    end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(error: ArgosyError) -> int:
    """Print an error on stderr and return its exit code."""
    for line in str(error).splitlines():
        sys.stderr.write(f"error: {line}\n")
    return error.exit_code
