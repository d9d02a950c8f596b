"""A user's program for the tests of elastic runs: a small model in float64 whose steps take a
while."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from runtime.graph_models import forked
from runtime.llama_models import LENGTH, mixture_of_blocks
from runtime.small_models import gpt

SAMPLES = 8
SECONDS = float(os.environ.get("STEP_SECONDS", "0"))
SLOW = Path(os.environ.get("SLOW", "/nonexistent"))
"""While this file is there, this host's steps take longer."""
GATE = Path(os.environ.get("GATE", "/nonexistent"))
"""Where this file is there, training waits before the step that it names."""
DEATH = os.environ.get("DEATH", "")
"""Rank 1 dies before its third step, and writes this file so that it happens once."""
CAPTURED = bool(os.environ.get("CAPTURED"))
"""Whether it is a model without layers, which runs in stages of operations that were captured."""
MIXTURE = bool(os.environ.get("MIXTURE"))
"""Whether every block has experts."""
FAULT = os.environ.get("FAULT", "")
RATE = float(os.environ.get("RATE", "0.01"))
"""The learning rate; at 0.001 training does not amplify rounding errors."""
REACHED = os.environ.get("REACHED", "")
"""A file into which rank 0 writes the step whose data it needs next, also when the run's own folder
is full."""


def build() -> Any:
    torch.set_default_dtype(torch.float64)
    if MIXTURE:
        return mixture_of_blocks(SAMPLES)
    return forked(SAMPLES) if CAPTURED else gpt(SAMPLES)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def batch_of(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    if CAPTURED:
        values = torch.randn(SAMPLES, 7, 12, generator=generator, dtype=torch.float64)
        return values, torch.randint(5, (SAMPLES,), generator=generator)
    if MIXTURE:
        return torch.randint(19, (SAMPLES, LENGTH + 1), generator=generator)
    tokens = torch.randint(19, (SAMPLES, 7), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def data(step: int) -> Any:
    if REACHED and os.environ["RANK"] == "0":
        Path(REACHED).write_text(str(step))
    time.sleep(SECONDS * (4 if SLOW.exists() else 1))
    while GATE.exists() and step >= int(GATE.read_text() or 0):
        time.sleep(0.02)
    if DEATH and step == 2 and os.environ["RANK"] == "1" and not Path(DEATH).exists():
        Path(DEATH).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT and step == 2:
        raise KeyError(FAULT)
    return batch_of(step)


def losses_alone(steps: int) -> list[float]:
    """One process, the same data in the same order."""
    torch.manual_seed(0)
    model, loss_fn, _ = build()
    own = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        loss = loss_fn(model, batch_of(step))
        loss.backward()
        own.step()
        own.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    sys.stdout.write(repr(losses_alone(int(sys.argv[1]))))
