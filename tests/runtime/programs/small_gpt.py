"""A user's program for the tests of ``argosy run``: a small GPT, and on demand something that goes
wrong in step 2, or blocks that take a stated time."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from runtime.adapting_cases import Nap
from runtime.small_models import gpt

SAMPLES = 8
FAULT = os.environ.get("FAULT", "")
# Seconds of a slow block's forward for one sample; its backward takes twice as long.
NAP = 1.5e-3


class SlowBlock(nn.Module):
    """A block whose time grows with its samples, whatever else the machine does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(Nap.apply(x, lambda samples: time.sleep(NAP * samples)))


def build() -> Any:
    model, loss_fn, batch = gpt(SAMPLES)
    if FAULT == "slow":
        model.blocks = nn.ModuleList(SlowBlock(block) for block in model.blocks)  # type: ignore[union-attr]

    def faulty(stand_in: Any, rows: Any) -> torch.Tensor:
        loss = loss_fn(stand_in, rows)
        return loss * float("nan") if FAULT == "nan" and faults["step"] == 2 else loss

    return model, faulty, batch


faults = {"step": -1}


def data(step: int) -> Any:
    faults["step"] = step
    rows = SAMPLES + 1 if FAULT == "batch" and step == 2 else SAMPLES
    if FAULT == "killed" and step == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "broken" and step == 2 and os.environ["RANK"] == "1":
        raise KeyError("no such shard")
    if FAULT == "slow":
        time.sleep(0.1)
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(19, (rows, 7), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
