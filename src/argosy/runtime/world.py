"""The processes of a run: joining them, the device of each, and whether they are those that the plan was made for."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from argosy.errors import InputError, Problem, RunError
from argosy.plan.plan import Plan
from argosy.plan.runnable import unsupported
from argosy.runtime.meeting import meet
from argosy.runtime.ranks import devices_by_rank

PATIENCE = datetime.timedelta(minutes=10)
"""How long a rank waits for another that has not gone away but says nothing."""


def check_supported(plan: Plan) -> None:
    sentences = unsupported(plan)
    if sentences:
        raise InputError([Problem(path="plan", expected="what the runtime executes", found=text) for text in sentences])


def join(plan: Plan | None, roster: Sequence[str] | None = None, *, patience: datetime.timedelta = PATIENCE) -> None:
    """Join the process group that torchrun prepared, unless the caller has one already; ``roster``: devices by rank."""
    if roster is None:
        assert plan is not None, "a plan or a roster says who takes part"
        roster = devices_by_rank(plan)
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            expected = "a process started by torchrun or `argosy run`, or an initialised process group"
            raise InputError([Problem(found=f"no {missing[0]} in the environment", expected=expected)])
        check_world_size(roster, int(os.environ["WORLD_SIZE"]))
        try:
            meet(_backend(roster), patience=patience)
        except (OSError, RuntimeError, ValueError) as error:
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RunError(f"rank {os.environ['RANK']} could not join the others at {place}: {reason}") from None
    check_world_size(roster, dist.get_world_size())


def check_world_size(roster: Sequence[str], world_size: int) -> None:
    expected = len(roster)
    if world_size != expected:
        raise InputError(
            [
                Problem(
                    path="plan",
                    found=f"{world_size} process{'' if world_size == 1 else 'es'}",
                    expected=f"{expected}, one for each device of the plan ({', '.join(roster)})",
                )
            ]
        )


def device_of(roster: Sequence[str], rank: int) -> torch.device:
    """The GPU with the number that the rank's device has on its node, shared where there are fewer; or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(roster[rank].rpartition(".")[2])
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _backend(roster: Sequence[str]) -> str:
    """NCCL where every rank of every node has a GPU of its own, gloo elsewhere."""
    if not torch.cuda.is_available():
        return "gloo"
    largest = max(int(device.rpartition(".")[2]) for device in roster)
    return "nccl" if largest < torch.cuda.device_count() else "gloo"


def patience_of_all() -> datetime.timedelta:
    """How long the group of all ranks waits, whoever opened it; groups within it wait no longer and no shorter."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    group: Any = dist.group.WORLD
    timeout: datetime.timedelta = group._get_backend(device).options._timeout
    return timeout


def open_groups(
    rank_sets: list[tuple[int, ...]], known: Mapping[tuple[int, ...], dist.ProcessGroup | None]
) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """A process group for every set of two ranks or more, None where this rank is not in it; those that are known are
    not opened again. Every rank calls this with the same sets."""
    groups = dict(known)
    for ranks in sorted(set(rank_sets)):
        if len(ranks) > 1 and ranks not in groups:
            group = dist.new_group(list(ranks), timeout=patience_of_all())
            groups[ranks] = group if isinstance(group, dist.ProcessGroup) else None
    return groups


def gather_texts(text: str, device: torch.device, group: dist.ProcessGroup | None = None) -> list[str]:
    """Every rank's text, on every rank: characters as numbers, so that nothing that arrives can run.

    ``group`` has all ranks in it; unless given, it is the one that training uses.
    """
    where = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    data = text.encode()
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=where)
    lengths[dist.get_rank()] = len(data)
    dist.all_reduce(lengths, group=group)
    padded = bytearray(data.ljust(max(1, int(lengths.max())), b" "))
    rows = [torch.empty(len(padded), dtype=torch.uint8, device=where) for _ in lengths]
    dist.all_gather(rows, torch.frombuffer(padded, dtype=torch.uint8).to(where), group=group)
    return [bytes(row[:length].cpu().numpy()).decode() for row, length in zip(rows, lengths.tolist(), strict=True)]
