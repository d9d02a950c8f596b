"""The rule that every input is held to, and the loop that holds many inputs to it.

An input may end with a value or an ``ArgosyError``, within ``SECONDS`` of processor time and
``BYTES`` more memory than before. Anything else is a failure: another exception, a call that does
not end, an allocation without measure, a process that dies.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType

from fuzz.fuzz_inputs import Files
from fuzz.fuzz_targets import Target

from argosy.errors import ArgosyError

SECONDS = 10.0
"""Of processor time for one input, which has a few megabytes at most; ten thousand times what most
take."""
BYTES = 2 * 2**30


class TooLongError(BaseException):
    """Not an ``Exception``: nothing that is fuzzed may catch it."""


@dataclass(frozen=True)
class Failure:
    """An input and what came of it."""

    target: str
    number: int
    place: str
    """The exception and the innermost line of ours; failures with the same place are taken for the
    same."""
    text: str


def judge(call: Callable[[], object]) -> tuple[str, str] | None:
    """None where the call kept to the rule; else where and how it did not."""
    try:
        with _bounded(), warnings.catch_warnings():
            warnings.simplefilter("error")
            call()
    except ArgosyError as error:
        if error.exit_code in (2, 3, 4) and str(error).strip():
            return None
        return "an ArgosyError without a message or code", repr(error)
    except (Exception, TooLongError) as error:
        return _place(error), "".join(traceback.format_exception(error))[-4000:]
    return None


def _place(error: BaseException) -> str:
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "/argosy/" in frame.filename
    ]
    where = (
        f"{frames[-1].filename.rpartition('/argosy/')[2]}:{frames[-1].lineno}"
        if frames
        else "elsewhere"
    )
    return f"{type(error).__name__} at {where}"


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Ends what takes too long by ``TooLongError``, and what takes too much memory by
    ``MemoryError``."""

    def stop(_: int, __: FrameType | None) -> None:
        raise TooLongError(f"more than {SECONDS:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def put_files(files: Files, folder: Path) -> None:
    """``files`` and nothing else in a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def luck_of(target: str, number: int) -> Random:
    """The same for the same input on every machine."""
    return Random(f"{target} {number}")


def try_input(target: Target, number: int, folder: Path) -> Failure | None:
    """One changed input of a reader; its files stay in ``folder / target.name``."""
    place = folder / target.name
    put_files(target.files(luck_of(target.name, number)), place)
    found = judge(lambda: target.read(place))
    return None if found is None else Failure(target.name, number, *found)
