"""Real processes that stay: ranks of a process group that run one function after another.

Starting a process costs seconds, joining a group milliseconds; so a pool's processes live as long
as the test session, and each call joins as many of them as it needs.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MOST_RANKS = 5
PATIENCE = 300.0
"""Seconds after which a call that has not answered has failed: many, because a busy machine is no
failure."""
AFTER_FAILURE = 20.0
"""Seconds that the other ranks of a call have to end, once one has failed: they may wait for it in
a collective."""
GROUP_TIMEOUT = datetime.timedelta(seconds=240)


class RankError(AssertionError):
    """What the ranks of a call raised."""


class RankPool:
    """Runs ``function(*arguments)`` on the first n of its processes, as ranks 0 to n-1 of one
    group."""

    def __init__(self, backend: str = "gloo") -> None:
        self.backend = backend
        self.folder = tempfile.TemporaryDirectory(prefix="argosy-ranks-")
        self.calls = 0
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def __call__(self, num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results, by rank."""
        self._start()
        self.calls += 1
        store = str(Path(self.folder.name) / f"store-{self.calls}")
        for rank in range(num_ranks):
            self.pipes[rank].send((self.backend, rank, num_ranks, store, function, arguments))
        answers = self._answers(num_ranks)
        failures = [text for failed, text in answers if failed]
        if failures:
            raise RankError("\n".join(failures))
        return [result for _, result in answers]

    def _start(self) -> None:
        if self.processes:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "runtime.training_cases"])
        for _ in range(MOST_RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def _answers(self, num_ranks: int) -> list[tuple[bool, Any]]:
        """What each rank returned or raised; once one has failed the others are not waited for much
        longer."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + PATIENCE
        while len(answers) < num_ranks:
            waiting = {self.pipes[rank]: rank for rank in range(num_ranks) if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                silent = ", ".join(map(str, waiting.values()))
                texts = [text for failed, text in answers.values() if failed]
                raise RankError("\n".join([*texts, f"no answer in time from ranks {silent}"]))
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = self.pipes[rank].recv()
                except EOFError:
                    self.stop()
                    raise RankError(f"rank {rank} died") from None
                if answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE)
        return [answers[rank] for rank in range(num_ranks)]

    def stop(self, *, patience: float = 0.0) -> None:
        """Let processes end by themselves, which writes down what they covered, and then end
        them."""
        for pipe in self.pipes if patience else ():
            pipe.close()
        for process in self.processes:
            process.join(patience)
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


@contextlib.contextmanager
def rank_pool(backend: str = "gloo") -> Iterator[RankPool]:
    pool = RankPool(backend)
    try:
        yield pool
    finally:
        pool.stop(patience=10.0)
        pool.folder.cleanup()


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            backend, rank, num_ranks, store, function, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(_call(backend, rank, num_ranks, store, function, arguments))


def _call(
    backend: str,
    rank: int,
    num_ranks: int,
    store: str,
    function: Callable[..., Any],
    arguments: Any,
) -> tuple[bool, Any]:
    import torch.distributed as dist

    from argosy.runtime.processes.world import abort

    try:
        files = dist.FileStore(store, num_ranks)
        dist.init_process_group(
            backend, store=files, rank=rank, world_size=num_ranks, timeout=GROUP_TIMEOUT
        )
        result = function(*arguments)
    except BaseException:
        failure = f"rank {rank}:\n{traceback.format_exc()}"
        if dist.is_initialized() and backend == "nccl":
            abort()  # a kernel of NCCL may wait for another rank, and to leave the group is to wait for it
        elif dist.is_initialized():
            dist.destroy_process_group()
        return True, failure
    if dist.is_initialized():
        dist.destroy_process_group()
    return False, result
