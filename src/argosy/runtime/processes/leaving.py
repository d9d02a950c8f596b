"""Leave the process groups when a script ends, before the interpreter does.

A thread of gloo frees the tensors of an exchange after the caller has gone on, and needs the
interpreter for it. An interpreter that is ending exits such a thread, which aborts the process
(SIGABRT), and torchrun then ends all other processes. So the groups end first, and with them
gloo's threads.
"""

from __future__ import annotations

import atexit
import gc
import threading
import weakref
from typing import Any

import torch.distributed as dist

# Trainers hold process groups, whose threads end with the last reference to them.
_trainers: weakref.WeakSet[Any] = weakref.WeakSet()
_is_leaving = threading.Event()
# Seconds that leaving may take: after a failure, gloo waits for processes that wait for this one.
_LIMIT = 10.0


def leave_at_exit() -> None:
    """Make this process leave its process groups when its script ends.

    A process that has joined groups already is left alone: the code that joined them leaves them.
    """
    if dist.is_initialized():
        return
    # Python 3.12 starts no threads at exit, so this one is started now and waits.
    thread = threading.Thread(target=_leave, name="leave", daemon=True)
    thread.start()
    atexit.register(_end, thread)


def release_at_exit(trainer: Any) -> None:
    """Release what a trainer holds when this process leaves."""
    _trainers.add(trainer)


def _end(thread: threading.Thread) -> None:
    for trainer in list(_trainers):
        if trainer.pending is not None:
            trainer.pending.leave(_LIMIT)
        vars(trainer).clear()
    gc.collect()
    _is_leaving.set()
    thread.join(_LIMIT)


def _leave() -> None:
    _is_leaving.wait()
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
