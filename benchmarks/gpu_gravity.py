"""A full force on a real GPU against one CPU core of the same machine, as JSON lines on stdout.

Needs torch with a CUDA device, numpy, numba, scipy and argosy. Boxes are displaced far into the
non-linear regime by 2LPT, so they are clustered, though less than an evolved box. ``peak`` is the
share of the card's fp32 rate that the pair kernel reaches, at 40 FLOP a pair that is asked for:
lanes that only fill up a block do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from argosy.nbody.force.gravity import compute_forces
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.gpu.force import for_gpu, gpu_forces
from argosy.nbody.initial.conditions import initial_conditions

FP32_FLOPS = {
    "NVIDIA H200": 67e12,
    "NVIDIA H100 80GB HBM3": 67e12,
    "NVIDIA A100-SXM4-80GB": 19.5e12,
}
PAIR_FLOP = 40.0


def measure(side: int, repeats: int, *, with_cpu: bool) -> dict[str, Any]:
    box = initial_conditions(box=1.5 * side, per_side=side, redshift=0.5, seed=1)
    positions = box.particles.positions
    settings = GravitySettings(mesh_cells=2 * side, softening=0.05, threads=1)
    fast = for_gpu(settings)
    found = gpu_forces(positions, box.size, 1.0, fast)
    runs = [gpu_forces(positions, box.size, 1.0, fast).seconds for _ in range(repeats)]
    seconds = {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
    rate = found.pairs / seconds["pairs"]
    peak = FP32_FLOPS.get(torch.cuda.get_device_name(), 67e12)
    row: dict[str, Any] = {
        "particles": side**3,
        "seconds": seconds,
        "particles_per_second": side**3 / seconds["all"],
        "pairs_per_second": rate,
        "peak": rate * PAIR_FLOP / peak,
        "gpu_bytes": torch.cuda.max_memory_allocated(),
    }
    if with_cpu:
        begin = time.process_time()
        exact = compute_forces(positions, box.size, 1.0, settings).total
        row["cpu_core_seconds"] = time.process_time() - begin
        row["faster_than_one_core"] = row["cpu_core_seconds"] / seconds["all"]
        errors = np.linalg.norm(found.total - exact, axis=1) / np.linalg.norm(exact, axis=1)
        row["difference"] = {
            "median": float(np.median(errors)),
            "percentile_99": float(np.percentile(errors, 99)),
        }
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", type=int, nargs="*", default=[32, 64, 128, 256])
    options = parser.parse_args()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    compute_forces(
        np.random.default_rng(1).uniform(0, 1, (500, 3)),
        1.0,
        1.0,
        GravitySettings(mesh_cells=32, softening=0.01),
    )
    for side in options.sides:
        row = measure(side, 3, with_cpu=side <= 128)
        sys.stdout.write(json.dumps(about | row) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
