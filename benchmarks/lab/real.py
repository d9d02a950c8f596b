"""Layers that compute: two products and tanh per sample, on the device's share of a core.

`python -m benchmarks.lab.real JOB MOST_SAMPLES FOLDER` measures them on every device of a lab at
the same time and writes a profile per kind of device.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from argosy.dtype import Dtype
from argosy.measure.profile import ProfileSettings, profile_model
from argosy.runtime.processes.emulated import join_device
from argosy.workload.profile_file import write_profile
from benchmarks.lab.emulated import Job, loss_of

_SECONDS = 0.4


class _Layer(nn.Module):
    def __init__(self, side: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(side))
        self.side = side

    def forward(self, tensor: Tensor) -> Tensor:
        square = tensor.view(-1, self.side, self.side)
        return torch.tanh(torch.tanh(square @ self.weight) @ self.weight).flatten(1)


def build_model(job: Job) -> nn.Sequential:
    side = math.isqrt(job.values)
    assert side * side == job.values == job.weights
    return nn.Sequential(*(_Layer(side) for _ in range(job.num_layers)))


def main(job_file: str, most_samples: str, folder: str) -> None:
    torch.set_num_threads(1)
    join_device()
    job = Job(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    kind = os.environ["ARGOSY_KIND_" + os.environ["ARGOSY_DEVICE"].replace(".", "_")]
    most = int(most_samples)
    profile = profile_model(
        build_model(job), loss_of, torch.zeros(most, job.values), ProfileSettings(name="real", kind=kind,
        samples=sorted({1, most}), dtype=Dtype.FP32, seconds=_SECONDS))  # fmt: skip
    write_profile(profile, Path(folder) / f"{kind}.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
