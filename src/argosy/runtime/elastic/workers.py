"""The workers of one host: processes that come from one that has torch loaded already, so that they
start at once.

A worker tells its agent how far it is through a pipe, and is asked to pause through it. Needs no
torch itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from argosy.runtime.processes.failure import how_it_ended

Report = Callable[[str, dict[str, Any]], None]
"""Called with a device and what its worker says; last of all ``{"kind": "ended", ...}``."""


@dataclass
class WorkerProcess:
    """One process."""

    process: ForkServerProcess
    pipe: Connection
    last: dict[str, Any] | None = None
    """What it said about its end."""


class Workers:
    """Those that run on this host now."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.running: dict[str, WorkerProcess] = {}
        self.context: ForkServerContext = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["argosy.runtime.elastic.training"])

    async def prepare(self) -> None:
        """Load torch, once for all workers to come."""
        await asyncio.to_thread(self._prepare)

    def _prepare(self) -> None:
        process = self.context.Process(target=os.getpid)
        process.start()
        process.join()

    async def start(self, device: str, task: Mapping[str, Any]) -> None:
        """A worker for a device."""
        await asyncio.to_thread(self._start, device, task)
        worker = self.running[device]
        loop = asyncio.get_running_loop()
        loop.add_reader(worker.pipe.fileno(), self._hear, device, worker)

    def _start(self, device: str, task: Mapping[str, Any]) -> None:
        from argosy.runtime.elastic.begin import begin

        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=begin, args=(dict(task), theirs), name=device)
        process.start()
        theirs.close()
        self.running[device] = WorkerProcess(process, ours)

    def _hear(self, device: str, worker: WorkerProcess) -> None:
        """Something has come through the pipe, or it has been closed by the process's end."""
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            self._ended(device, worker)
            return
        if message["kind"] == "ending":
            worker.last = message
        else:
            self.report(device, message)

    def _ended(self, device: str, worker: WorkerProcess) -> None:
        asyncio.get_running_loop().remove_reader(worker.pipe.fileno())
        worker.pipe.close()
        worker.process.join()
        exit_code = worker.process.exitcode or 0
        worker.process.close()
        if self.running.get(device) is worker:
            del self.running[device]
            message = how_it_ended(exit_code)
            self.report(
                device, worker.last or {"kind": "ending", "how": "killed", "message": message}
            )

    def pause(self, *, save: bool) -> None:
        """Ask every worker to leave at the end of a step, which they agree on, and to write a
        checkpoint before."""
        for worker in self.running.values():
            with contextlib.suppress(OSError):
                worker.pipe.send({"save": save})

    async def kill(self) -> None:
        """End all at once."""
        ended, self.running = self.running, {}
        loop = asyncio.get_running_loop()
        # Kill all before waiting for any, so that no message of a dying worker is read.
        for worker in ended.values():
            worker.process.kill()
            loop.remove_reader(worker.pipe.fileno())
            worker.pipe.close()
        for worker in ended.values():
            await asyncio.to_thread(worker.process.join)
            worker.process.close()
