"""Many inputs in several processes, which an input may end without ending the run."""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from fuzz.fuzz_loop import Failure, try_input
from fuzz.fuzz_targets import BY_NAME

HANG = 600.0
"""Seconds after which a process that is stuck outside Python is ended."""
REPORT_EVERY = 2.0


def fuzz(
    names: Sequence[str], count: int, seconds: float, jobs: int, first: int
) -> tuple[Counter[str], dict[str, int]]:
    """Counts by target and failures by place; every place is told when it is first met."""
    context = multiprocessing.get_context("spawn")
    end = time.monotonic() + seconds
    workers: dict[Connection, tuple[BaseProcess, int]] = {}

    def start(job: int, begin: int) -> None:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_work, args=(theirs, names, count, job, jobs, begin, first, end)
        )
        process.start()
        theirs.close()
        workers[ours] = (process, job)

    for job in range(jobs):
        start(job, 0)
    counts: Counter[str] = Counter(dict.fromkeys(names, 0))
    failures: Counter[str] = Counter()
    at: dict[int, tuple[int, str, int]] = {}
    try:
        while workers:
            for ready in wait(list(workers)):
                assert isinstance(ready, Connection)
                process, job = workers[ready]
                try:
                    done, failed, position = ready.recv()
                except (EOFError, ConnectionResetError):
                    process.join()
                    del workers[ready]
                    if (
                        process.exitcode
                    ):  # died in an input: it is a failure, and the rest is still to be done
                        index, name, number = at[job]
                        failed, done = (
                            [Failure(name, number, f"process ended with {process.exitcode}", "")],
                            Counter(),
                        )
                        start(job, index + 1)
                    else:
                        continue
                else:
                    at[job] = position
                counts.update(done)
                for failure in failed:
                    if not failures[failure.place]:
                        print(
                            f"{failure.target} {failure.number}: {failure.place}\n{failure.text}",
                            flush=True,
                        )
                    failures[failure.place] += 1
    except KeyboardInterrupt:  # what was done so far counts
        for process, _ in workers.values():
            process.terminate()
    return counts, dict(failures)


def _work(
    tell: Connection,
    names: Sequence[str],
    count: int,
    job: int,
    jobs: int,
    begin: int,
    first: int,
    end: float,
) -> None:
    """Every ``jobs``-th input; tells what it has done now and then, and what it begins before it
    begins it."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for whoever started this
    done: Counter[str] = Counter()
    failed: list[Failure] = []
    told = 0.0
    sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115 (a command that asks gets no answer)
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        for index, (name, number) in enumerate(
            itertools.islice(_inputs(names, count, first), job, None, jobs)
        ):
            if index < begin:
                continue
            if time.monotonic() > end:
                break
            if time.monotonic() - told > REPORT_EVERY or BY_NAME[name].may_crash:
                tell.send((done, failed, (index, name, number)))
                done, failed, told = Counter(), [], time.monotonic()
                faulthandler.dump_traceback_later(HANG, exit=True)
            failure = try_input(BY_NAME[name], number, Path(folder))
            done[name] += 1
            failed += [failure] if failure else []
    faulthandler.cancel_dump_traceback_later()
    tell.send((done, failed, (0, "", 0)))
    tell.close()


def _inputs(names: Sequence[str], count: int, first: int) -> Iterator[tuple[str, int]]:
    """(target, number) of ``count`` inputs, targets in turn, each as often as its weight says."""
    whole = sum(BY_NAME[name].weight for name in names)
    owed = dict.fromkeys(names, 0.0)
    numbers = dict.fromkeys(names, first)
    given = 0
    while given < count:
        for name in names:
            owed[name] += len(names) * BY_NAME[name].weight / whole
            while owed[name] >= 1 and given < count:
                owed[name] -= 1
                yield name, numbers[name]
                numbers[name] += 1
                given += 1


def _memory_folder() -> str | None:
    """A folder that no disk is behind, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
