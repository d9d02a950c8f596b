"""Start and watch the workers of one host, forked from a process that has already loaded torch, so
that they start at once.

A worker reports its progress to its agent through a pipe, and receives the request to pause through
it. Needs no torch itself.
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

from argosy.document import JsonObject
from argosy.runtime.processes.failure import how_it_ended

Report = Callable[[str, JsonObject], None]
"""A function that is called with a device and a message of its worker; the last message is
``{"kind": "ending", ...}``."""


@dataclass
class WorkerProcess:
    """A worker's process with the pipe that connects to it."""

    process: ForkServerProcess
    pipe: Connection
    last: JsonObject | None = None
    """The message with which it announced its end."""


class Workers:
    """The set of workers that this host runs."""

    def __init__(self, report: Report, count: int) -> None:
        """Prepare ``count`` workers.

        Several workers have one thread each unless the user sets another number, as torchrun does.
        Torch reads it when it is loaded, and workers are forked after that.
        """
        if count > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
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
        """Start a worker for a device."""
        await asyncio.to_thread(self._start, device, task)
        worker = self.running[device]
        loop = asyncio.get_running_loop()
        loop.add_reader(worker.pipe.fileno(), self._receive, device, worker)

    def _start(self, device: str, task: Mapping[str, Any]) -> None:
        from argosy.runtime.elastic.begin import begin

        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=begin, args=(dict(task), theirs), name=device)
        process.start()
        theirs.close()
        self.running[device] = WorkerProcess(process, ours)

    def _receive(self, device: str, worker: WorkerProcess) -> None:
        """Handle a message from the pipe, or its end, which is the process's end."""
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
        """Make every worker leave at the end of a step, on which they agree, after writing a
        checkpoint if ``save``."""
        for worker in self.running.values():
            with contextlib.suppress(OSError):
                worker.pipe.send({"save": save})

    async def kill(self) -> None:
        """End all workers at once."""
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
