"""Which tests the GPUs of this machine can run."""

from __future__ import annotations

import pytest
import torch

from argosy.runtime.processes.world import why_unshared


def need_ranks(count: int) -> None:
    """Skip a test of more ranks than there are GPUs, if NCCL cannot share one."""
    gpus = torch.cuda.device_count()
    if count > gpus:
        reason = why_unshared()
        if reason is not None:
            pytest.skip(f"{count} ranks and {gpus} GPU{'' if gpus == 1 else 's'}: {reason}")
