"""Check which torch devices and backends work on this machine."""

from __future__ import annotations

import torch
import torch.distributed as dist


def cards() -> list[str]:
    """Return the names of the GPUs that torch can use; each is tried, because a driver may be
    installed and broken."""
    names = []
    for index in range(torch.cuda.device_count()):
        (torch.ones(8, device=f"cuda:{index}") * 2).sum().item()
        names.append(torch.cuda.get_device_name(index))
    return names


def why_backend_fails(backend: str) -> str | None:
    """Return why a process cannot sum a tensor over itself through a backend; None if it can."""
    if not dist.is_backend_available(backend):
        return "not in this build of torch"
    if backend == "nccl" and not torch.cuda.is_available():
        return "no GPU"
    try:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, rank=0, world_size=1, store=store)
        try:
            dist.all_reduce(torch.ones(4, device="cuda" if backend == "nccl" else "cpu"))
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None
