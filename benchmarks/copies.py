"""What copies in memory cost an elastic run: the same job without any, with one every fifth step,
and after every step.

    python -m benchmarks.copies          the table, as markdown (two minutes)

Two hosts, a pipeline of two stages, AdamW. Computing is sleeping, so that copies and steps do not
take a core from each other; state, copies and traffic (loopback) are real.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from argosy.plan.file import dumps_plan
from benchmarks.lab.cases import cluster_of, plan_of
from benchmarks.lab.emulated import Job

LAYERS, STEPS, SKIPPED = 8, 24, 4
WEIGHTS = (1_000_000, 4_000_000)
"""Of a layer."""
SLEEP = 5e-3
"""Seconds of a layer's forward for one sample."""
_PROGRAM = """
import os
import time

import torch

from benchmarks.lab.emulated import Job, build_model, loss_of

job = Job(num_layers={layers}, forward_seconds={sleep}, values=1024, weights={weights})
batch = torch.zeros(8, 1024)


def build():
    return build_model(job, lambda: 1.0), loss_of, batch


def data(step):
    with open("{times}" + os.environ["RANK"], "a") as file:
        file.write(str(time.monotonic()) + "\\n")
    return batch
"""


def seconds_of_a_step(weights: int, copy_every: int, folder: Path) -> float:
    """From the beginning of one to that of the next, the first ones left out."""
    cluster = cluster_of("copies", [(1.0, 10_000.0)] * 2)
    job = Job(num_layers=LAYERS, forward_seconds=SLEEP, values=1024, weights=weights)
    plan = plan_of(
        cluster, job, [(LAYERS // 2, [("a", 2)]), (LAYERS // 2, [("b", 2)])], micro_batches=4
    )
    (folder / "plan.json").write_text(dumps_plan(plan))
    text = _PROGRAM.format(layers=LAYERS, sleep=SLEEP, weights=weights, times=folder / "times-")
    (folder / "program.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "argosy",
        "run",
        str(folder / "plan.json"),
        f"{folder / 'program.py'}:build",
    ]
    command += ["--elastic", "--here", "--any-device", "--quiet", "--copy-every", str(copy_every)]
    command += ["--steps", str(STEPS), "--out", str(folder / "run")]
    subprocess.run(command, check=True, capture_output=True)
    begins = [float(line) for line in (folder / "times-0").read_text().splitlines()][SKIPPED:]
    return statistics.mean(later - earlier for earlier, later in pairwise(begins))


def main() -> None:
    print(
        "| state of a rank | without copies | every fifth step | after every step |\n| --- | --- | --- | --- |"
    )
    for weights in WEIGHTS:
        state = weights * LAYERS // 2 * 12 / 1e6
        cells = []
        for copy_every in (0, 5, 1):
            with tempfile.TemporaryDirectory() as name:
                cells.append(seconds_of_a_step(weights, copy_every, Path(name)))
        shown = " | ".join(f"{one:.3f} s ({one / cells[0] - 1:+.1%})" for one in cells)
        print(f"| {state:.0f} MB | {shown} |", flush=True)


if __name__ == "__main__":
    main()
