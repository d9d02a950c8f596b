"""A user's program of which one rank stops answering in its third step, in the middle of it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "programs"))

from double_gpt import batch_of, build, optimizer

__all__ = ["build", "data", "optimizer"]


def data(step: int) -> Any:
    if step == 2 and os.environ["RANK"] == "1":
        time.sleep(3600)
    return batch_of(step)
