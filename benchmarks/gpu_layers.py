"""Seconds of a transformer block on a real GPU, by width, sequence, micro-batch and tensor width,
as JSON lines on stdout.

Needs torch and a CUDA device. A tensor-parallel shard is measured alone: its share of the heads and
of the inner width, without the all-reduce, which is the network's affair.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HIDDEN = (1024, 2048, 4096, 8192)
SEQUENCE = (1024, 2048, 4096)
MICRO_BATCH = (1, 2, 4, 8)
TENSOR_WIDTH = (1, 2, 4, 8)
MOST_TOKENS = 16384


class Block(nn.Module):
    """A pre-norm block with fused attention and a feed-forward of 4 x hidden, split over ``width``
    devices."""

    def __init__(self, hidden: int, width: int, head_dim: int = 128) -> None:
        super().__init__()
        self.heads, self.head_dim = hidden // head_dim // width, head_dim
        inner = self.heads * head_dim
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * inner), nn.Linear(inner, hidden)
        self.up, self.down = (
            nn.Linear(hidden, 4 * hidden // width),
            nn.Linear(4 * hidden // width, hidden),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, self.head_dim).unbind(2)
        )
        mixed = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


def median_seconds(work: Callable[[], None], repeats: int) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure(
    hidden: int, sequence: int, micro_batch: int, width: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Forward and backward over four blocks in a row, divided by four: neighbours hide each other's
    launches."""
    blocks = nn.Sequential(*(Block(hidden, width) for _ in range(4))).to("cuda", dtype)
    x = torch.randn(micro_batch, sequence, hidden, device="cuda", dtype=dtype, requires_grad=True)

    def both() -> None:
        blocks(x).sum().backward()

    def forward() -> None:
        with torch.enable_grad():
            blocks(x)

    repeats = 7
    ahead = median_seconds(forward, repeats) / 4
    total = median_seconds(both, repeats) / 4
    flop = micro_batch * (24 * sequence * hidden**2 + 4 * sequence**2 * hidden) / width
    return {
        "hidden": hidden,
        "sequence": sequence,
        "micro_batch": micro_batch,
        "tensor_width": width,
        "forward_seconds": ahead,
        "backward_seconds": total - ahead,
        "forward_flop": flop,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    options = parser.parse_args()
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "dtype": options.dtype,
    }
    for hidden, sequence, micro_batch, width in itertools.product(
        HIDDEN, SEQUENCE, MICRO_BATCH, TENSOR_WIDTH
    ):
        if micro_batch * sequence <= MOST_TOKENS:
            torch.cuda.reset_peak_memory_stats()
            row = measure(hidden, sequence, micro_batch, width, getattr(torch, options.dtype))
            sys.stdout.write(json.dumps(about | row) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
