"""A captured program by the plan that is found for it, under torchrun: the losses are those of one
process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runtime.programs.shared_step import build

CLUSTER = """
name = "slow-pair"

[[nodes]]
name = "box"
devices = [{ kind = "slow", count = 1 }, { kind = "slower", count = 1 }]
intra = [{ medium = "loopback", bandwidth = "50 GB/s", latency = "1 ns" }]

[[kinds]]
name = "slow"
memory = "8 GiB"
memory_bandwidth = "2 GB/s"
flops = { fp32 = "0.02 TFLOP/s" }

[[kinds]]
name = "slower"
memory = "8 GiB"
memory_bandwidth = "1 GB/s"
flops = { fp32 = "0.01 TFLOP/s" }
"""


def test_a_program_trains_under_torchrun(tmp_path: Path) -> None:
    cluster = tmp_path / "slow.toml"
    cluster.write_text(CLUSTER, encoding="utf-8")
    script = Path(__file__).parent / "programs" / "shared_step.py"
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    done = subprocess.run(
        [*run, str(cluster)], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(part) for part in done.stdout.split()]
    model, loss_fn, batch = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for found in losses:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        assert found == pytest.approx(float(loss.detach()), rel=1e-9)
        optimizer.step()
    assert len(losses) == 3
