"""Let optimizer state travel while the first step under a new plan computes.

Forward and backward read weights; only the update reads optimizer state. So a migration sends
weights first and begins with the state (``StateOnItsWay``), and the step goes on:

    (1)  the exchange has a process group of its own, so that no message of a step is matched with
         one of it
    (2)  under gloo it runs in a thread; under NCCL, whose calls return at once, on a stream of its
         own
    (3)  the optimizer gets the state when it is first read: before the update of the step, and
         before a checkpoint, a copy for another host or the next migration
    (4)  on a GPU, state that leaves is there together with state that arrives. If the plan's
         predicted memory leaves no room for both, or is not known, the rank waits before its step

A rank waits for its own messages only. The exchanges of other ranks continue by themselves, so a
rank that waits earlier than others blocks none of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.cost.memory import USABLE
from argosy.plan.plan import Plan
from argosy.runtime.communication.boxes import HeldParts
from argosy.runtime.processes.failure import in_contact
from argosy.runtime.processes.world import await_device, patience_of_all
from argosy.runtime.state.handover import Key


def open_state_group(device: torch.device) -> dist.ProcessGroup:
    """Open the process group of exchanges of state (1); every rank calls this at the same point."""
    group = dist.new_group(timeout=patience_of_all())
    assert isinstance(group, dist.ProcessGroup), "all ranks are members"
    place = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    with in_contact("while the group of migrations was opened"):
        dist.all_reduce(torch.zeros(1, device=place), group=group)  # NCCL connects at the first
    return group


def has_room(plan: Plan, name: str, device: torch.device, state_bytes: int) -> bool:
    """Return whether a device has memory for a step of a plan and for ``state_bytes`` more (4)."""
    if device.type != "cuda":
        return True
    peaks = {} if plan.predicted is None else dict(plan.predicted.peak_memory_bytes)
    total = torch.cuda.get_device_properties(device).total_memory
    return name in peaks and peaks[name] + state_bytes <= USABLE * total


def used_here(held: Mapping[Key, HeldParts]) -> None:
    """Keep the memory of tensors of another stream until the present work of this one is done."""
    for parts in held.values():
        for part in parts.parts:
            if isinstance(part.tensor, Tensor) and part.tensor.is_cuda:
                part.tensor.record_stream(torch.cuda.current_stream(part.tensor.device))


class StateOnItsWay:
    """An exchange of optimizer state that has begun."""

    def __init__(
        self, exchange: Callable[[], None], then: Callable[[], None], device: torch.device
    ) -> None:
        """Begin an ``exchange`` (2); ``then`` is called by the thread that waits for its end."""
        self.exchange, self.then, self.device = exchange, then, device
        self.error: BaseException | None = None
        self.waited = 0.0
        """Seconds that the rank waited for the exchange to end."""
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self.thread: threading.Thread | None = None
        if dist.get_backend() == "nccl":
            self._run()
        else:
            self.thread = threading.Thread(target=self._run, name="state", daemon=True)
            self.thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(self.stream):
                self.exchange()
        except BaseException as error:  # raised where the exchange is waited for
            self.error = error

    def leave(self, seconds: float) -> None:
        """Wait for the thread of the exchange, at most for some seconds."""
        if self.thread is not None:
            self.thread.join(seconds)

    def finish(self) -> None:
        """Wait for the end of the exchange, and raise the error that ended it, if any."""
        begin = time.perf_counter()
        if self.thread is not None:
            self.thread.join()
        if self.error is not None:
            raise self.error
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                await_device(self.device, "while optimizer state was moved")
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.waited = time.perf_counter() - begin
        self.then()
