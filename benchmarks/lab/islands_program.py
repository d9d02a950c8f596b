"""The program that islands and synchronous plans run in the lab: layers that sleep for their time
(``emulated``)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab.emulated import Job, build_model, loss_of

JOB = Job(**json.loads(Path(os.environ["ARGOSY_LAB_JOB"]).read_text(encoding="utf-8")))
SAMPLES = int(os.environ["ARGOSY_LAB_SAMPLES"])


def build() -> Any:
    return build_model(JOB, lambda: 1.0), loss_of, torch.zeros(SAMPLES, JOB.values)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)
