"""A rank that goes away, and what the other one makes of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from argosy.runtime.processes.failure import ElsewhereError, in_contact_beside_others


def send_to_nobody(rank: int, folder: str) -> None:
    """Rank 1 leaves without a word; rank 0 sends to it until that fails, and writes down how."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank == 1:
        os._exit(0)
    try:
        for _ in range(200):
            with in_contact_beside_others("in step 3"):
                dist.isend(torch.ones(4), 1)
            time.sleep(0.02)
    except ElsewhereError as error:
        Path(folder, "told").write_text(str(error))
    os._exit(0)
