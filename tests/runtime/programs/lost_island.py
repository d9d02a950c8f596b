"""A user's program whose island of one process is killed once, in step 5, while the other island
goes on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from runtime.small_models import gpt

SAMPLES = 8
FOLDER = Path(os.environ["ISLANDS"])
KILLED = FOLDER / "killed"
OTHER, RETURNED = (FOLDER / island / "exchanges.jsonl" for island in ("island-0", "island-1"))


def build() -> Any:
    if os.environ.get("WORLD_SIZE") == "1" and KILLED.exists():
        while (
            '"islands": [0]' not in OTHER.read_text()
        ):  # it returns after the other has gone on without it
            time.sleep(0.05)
    return gpt(SAMPLES)


def data(step: int) -> Any:
    is_alone = os.environ["WORLD_SIZE"] == "1"
    if is_alone and step == 5 and not KILLED.exists():
        KILLED.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if not is_alone and step > 9 and "caught_up" not in RETURNED.read_text():
        time.sleep(1.0)  # so that it does not end before the other one is back
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(19, (SAMPLES, 7), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
