"""Join the processes of a run, choose the device of each, and check that they fit the plan."""

from __future__ import annotations

import ctypes
import datetime
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from argosy.errors import InputError, Problem, RunError, impossible, invalid
from argosy.plan.plan import Plan
from argosy.plan.runnable import unsupported
from argosy.runtime.processes.failure import ElsewhereError
from argosy.runtime.processes.meeting import meet
from argosy.runtime.processes.ranks import devices_by_rank

PATIENCE = datetime.timedelta(minutes=10)
"""The time that a rank waits for another that sends nothing and has not ended."""
_SETTINGS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "TORCH_NCCL_HIGH_PRIORITY": "1"}
"""Settings that must be in the environment before CUDA starts.

The first gives each stream a GPU queue of its own: a waiting receive of NCCL blocks all streams of
its queue, and the sender may wait for one of these. The second lets collectives begin before
kernels of layers that are queued already.
"""
_SHARED_SETTINGS = {"NCCL_MAX_CTAS": "4"}
"""Further settings if ranks share a GPU: waiting kernels of NCCL must leave processors to those
that compute."""
# torch ends a process of NCCL without a message after this multiple of the run's timeout, that is,
# later than ``await_device`` raises an error.
_WATCHDOG = 1.5
# Seconds between two queries of the GPU.
_POLL = 1e-4
# Seconds that aborting communicators may take.
_ABORTING = 10.0
_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The environment variable that allows several ranks of NCCL on one GPU."""
# The first version of NCCL that runs several ranks on one GPU.
_FIRST_SHARING = (2, 30)


def check_supported(plan: Plan) -> None:
    sentences = unsupported(plan)
    if sentences:
        raise InputError(
            Problem(path="plan", message=sentence.removesuffix(".")) for sentence in sentences
        )


def join(
    plan: Plan | None,
    roster: Sequence[str] | None = None,
    *,
    patience: datetime.timedelta = PATIENCE,
) -> None:
    """Join the process group that torchrun prepared, unless the caller has already joined one.

    ``roster`` lists devices by rank.
    """
    if roster is None:
        assert plan is not None, "a plan or a roster must name the devices"
        roster = devices_by_rank(plan)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if not dist.is_initialized():
        missing = [
            name
            for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            if name not in os.environ
        ]
        if missing:
            reason = f"{missing[0]} is not set in the environment"
            remedy = "starting it by torchrun or `argosy run`, or initialising a process group"
            raise impossible("train in this process", reason, remedy)
        check_world_size(roster, int(os.environ["WORLD_SIZE"]))
        try:
            backend = _backend(roster)
            meet(backend, patience=_WATCHDOG * patience if backend == "nccl" else patience)
        except (OSError, RuntimeError, ValueError) as error:
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RunError(
                f"rank {os.environ['RANK']} could not join the others at {place}: {reason}"
            ) from None
    check_world_size(roster, dist.get_world_size())


def check_world_size(roster: Sequence[str], world_size: int) -> None:
    expected = len(roster)
    if world_size != expected:
        raise invalid(
            "plan",
            f"{world_size} process{'' if world_size == 1 else 'es'}",
            f"{expected}, one for each device of the plan ({', '.join(roster)})",
        )


def device_of(roster: Sequence[str], rank: int) -> torch.device:
    """Return the GPU with the number that the rank's device has on its node, modulo the number of
    GPUs; without GPUs the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(roster[rank].rpartition(".")[2])
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _backend(roster: Sequence[str]) -> str:
    """Return NCCL if every rank of every node has a GPU of its own or NCCL can share one, else
    gloo."""
    if not torch.cuda.is_available():
        return "gloo"
    largest = max(int(device.rpartition(".")[2]) for device in roster)
    if largest < torch.cuda.device_count():
        return "nccl"
    if why_unshared() is not None:
        return "gloo"
    for name, value in _SHARED_SETTINGS.items():
        os.environ.setdefault(name, value)
    return "nccl"


def why_unshared() -> str | None:
    """Return why NCCL cannot run several ranks on one GPU, or None if it can."""
    version = nccl_version()
    if tuple(version[:2]) < _FIRST_SHARING:
        installed, needed = (".".join(map(str, numbers)) for numbers in (version, _FIRST_SHARING))
        return f"NCCL {installed} runs one rank per GPU; {needed} runs several with {_SHARING}=1"
    return None if os.environ.get(_SHARING) == "1" else f"{_SHARING} is not 1"


def nccl_version() -> tuple[int, ...]:
    """Return the version of the loaded NCCL library, which may be newer than the one that torch was
    built with."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return tuple(torch.cuda.nccl.version())
    major, rest = divmod(number.value, 10_000)
    return (major, *divmod(rest, 100))


def await_device(device: torch.device, moment: str) -> None:
    """Wait for the work queued on a GPU, but no longer than the run's timeout, since the kernels of
    NCCL wait permanently for a rank that is gone.

    Raise an ``ElsewhereError`` after aborting all communicators.
    """
    if device.type != "cuda" or dist.get_backend() != "nccl":
        return
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    limit = patience_of_all().total_seconds() / _WATCHDOG
    end = time.monotonic() + limit
    while not event.query():
        if time.monotonic() > end:
            abort()
            raise ElsewhereError(
                f"lost contact {moment}: another rank sent nothing for {limit:g} s"
            )
        time.sleep(_POLL)


def abort() -> None:
    """End the kernels of NCCL that wait for other ranks, as far as that succeeds within
    ``_ABORTING`` seconds."""
    thread = threading.Thread(
        target=dist.distributed_c10d._abort_process_group, name="abort", daemon=True
    )
    thread.start()
    thread.join(_ABORTING)


def patience_of_all() -> datetime.timedelta:
    """Return the timeout of the group of all ranks, which may have been opened by the user; groups
    within it get the same."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    group: Any = dist.group.WORLD
    return group._get_backend(device).options._timeout


def open_groups(
    rank_sets: list[tuple[int, ...]], known: Mapping[tuple[int, ...], dist.ProcessGroup | None]
) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """Open a process group for every set of two ranks or more; it is None if this rank is not a
    member. Known groups are not opened again. Every rank calls this with the same sets."""
    groups = dict(known)
    for ranks in sorted(set(rank_sets)):
        if len(ranks) > 1 and ranks not in groups:
            group = dist.new_group(list(ranks), timeout=patience_of_all())
            groups[ranks] = group if isinstance(group, dist.ProcessGroup) else None
    return groups


def gather_texts(
    text: str, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[str]:
    """Gather every rank's text on every rank. Texts are sent as bytes, so that nothing that arrives
    can be executed.

    ``group`` contains all ranks; unless given, it is the one that training uses.
    """
    where = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    data = text.encode()
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=where)
    lengths[dist.get_rank()] = len(data)
    dist.all_reduce(lengths, group=group)
    padded = bytearray(data.ljust(max(1, int(lengths.max())), b" "))
    rows = [torch.empty(len(padded), dtype=torch.uint8, device=where) for _ in lengths]
    dist.all_gather(rows, torch.frombuffer(padded, dtype=torch.uint8).to(where), group=group)
    return [
        bytes(row[:length].cpu().numpy()).decode()
        for row, length in zip(rows, lengths.tolist(), strict=True)
    ]
