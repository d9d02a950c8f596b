"""A small GPT on real text, trained by two islands in the lab: its loss after as many tokens as in
``islands_loss``.

``python -m benchmarks.lab.islands_text [STEPS]``: plans this file as a program for two islands over
the preempted link of ``benchmarks.lab.islands``, runs it on the hosts of a lab, and measures the
loss of the last checkpoint on held-out text.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from argosy.lab.lab import Lab
from argosy.runtime.islands.files import EXCHANGES, island_folder
from argosy.runtime.processes.run_folder import CHECKPOINTS, checkpoints, read_lines
from argosy.runtime.state.checkpoint import read_state_dict
from benchmarks.islands_loss import RATE, SAMPLES, Gpt, Text, loss_of
from benchmarks.lab.islands import CLUSTER, lab_cluster
from benchmarks.lab.run import ROOT

SEED = 0
TEXT = Text()


def build() -> Any:
    torch.manual_seed(SEED)
    return Gpt(TEXT.num_letters), loss_of, data(0)


def data(step: int) -> Any:
    return TEXT.batch(SEED, step + 1)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def main(steps: int) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(lab_cluster(), name="islands-text", shares=False),
    ):
        cluster, plan, out = (Path(folder) / name for name in ("lab.toml", "islands.json", "run"))
        cluster.write_text(CLUSTER, encoding="utf-8")
        options = [
            "--islands",
            "2",
            "--sync-every",
            "50",
            "--outer",
            "1,0",
            "--runnable",
            "-o",
            str(plan),
            "-q",
        ]
        _argosy("plan", "--program", __file__, "-c", str(cluster), *options)
        run = [
            "--lab",
            "islands-text",
            "--steps",
            str(steps),
            "--out",
            str(out),
            "--any-device",
            "-q",
        ]
        _argosy("run", str(plan), __file__, *run)
        last = checkpoints(island_folder(out, 0) / CHECKPOINTS)[-1]
        model = Gpt(TEXT.num_letters)
        model.load_state_dict(read_state_dict(last), strict=False)
        lines = read_lines(island_folder(out, 0) / EXCHANGES)
    with torch.no_grad():
        loss = loss_of(model, TEXT.test_batch()).item()
    samples = sum(sum(line["samples"]) for line in lines)
    sys.stdout.write(
        f"{len(lines)} exchanges, {samples} of {steps * SAMPLES} samples, held-out loss {loss:.3f}\n"
    )


def _argosy(*arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    subprocess.run(
        [sys.executable, "-m", "argosy", *arguments], check=True, env=environment, cwd=ROOT
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
