"""What ranks do in the tests of what they hold at most."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from argosy.plan.plan import Plan
from argosy.runtime.step.trainer import parallelize

WIDTH, CLASSES = 512, 8192
_THRESHOLD, _LARGE = -3, 2**16
"""M_MMAP_THRESHOLD; from so many bytes on, what is freed leaves the process at once."""


def peak_of_steps(plan: Plan) -> int:
    """Bytes above what a rank holds between steps, of a stack whose last two layers are by far the
    largest: while one has its gradient, the weights of the other arrive."""
    ctypes.CDLL(None).mallopt(_THRESHOLD, _LARGE)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
        nn.Linear(WIDTH, CLASSES),
        nn.Linear(CLASSES, WIDTH),
    )
    batch = torch.randn(plan.global_batch, WIDTH)
    trainer = parallelize(
        model, _loss, lambda held: torch.optim.AdamW(held, foreach=False), batch, plan
    )
    trainer.step(batch)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what is there now
    before = _status("VmRSS")
    for _ in range(2):
        trainer.step(batch)
    return _status("VmHWM") - before


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])
