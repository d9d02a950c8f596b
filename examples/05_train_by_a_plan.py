"""Train by a plan with two unequal stages on two processes, and see that the losses are those of
one process.

python examples/05_train_by_a_plan.py
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

PROGRAM = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(8)))
    batch = {"x": torch.randn(16, 128), "y": torch.randn(16, 128)}
    return model, lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(), batch


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.5)
"""
DESK = """
name = "desk"

[[kinds]]
name = "core"
memory = "4 GiB"
memory_bandwidth = "10 GB/s"
flops = { fp32 = "50 GFLOP/s" }

[[nodes]]
name = "desk"
devices = [{ kind = "core" }, { kind = "core", efficiency = 0.5 }]
intra = [{ medium = "loopback", bandwidth = "1 GB/s", latency = "50 us" }]
"""


def one_process(file: Path, steps: int) -> list[float]:
    program = runpy.run_path(str(file))
    model, loss_fn, batch = program["build"]()
    optimizer = program["optimizer"](model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


with TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "net.py").write_text(PROGRAM)
    (folder / "desk.toml").write_text(DESK)
    torch.save(
        runpy.run_path(str(folder / "net.py"))["build"]()[0].state_dict(), folder / "weights.pt"
    )
    for command in (
        "profile net.py:build --kind core --samples 4,8 --seconds 0.02 -o profile.json",
        "plan --model profile.json --profile profile.json -c desk.toml -b 16 --runnable -o plan.json",
        "run plan.json net.py:build --steps 4 --here --any-device --init weights.pt",
    ):
        words = [sys.executable, "-m", "argosy", *command.split(), "--quiet"]
        subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    lines = (folder / "run" / "progress.jsonl").read_text().splitlines()
    together = [json.loads(line)["loss"] for line in lines]
    print("step  by the plan  one process")
    for step, (theirs, alone) in enumerate(
        zip(together, one_process(folder / "net.py", 4), strict=True)
    ):
        print(f"{step:4}  {theirs:11.5f}  {alone:11.5f}")
