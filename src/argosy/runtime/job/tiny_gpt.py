"""Train a small GPT on the bytes of this file: the demo's program, for ``argosy run`` or alone.

If the environment sets the speed of a rank's device (``emulated``), its blocks take that long.

``python -m argosy.runtime.job.tiny_gpt STEPS MICRO_BATCH COUNT`` trains it in one process by a
plain loop, without argosy, and prints the losses as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from argosy.runtime.job.paced import pace
from argosy.runtime.processes.emulated import seconds_per_sample

# The sizes of the model, the length of a sample and the samples of a batch; all small.
WIDTH, LAYERS, HEADS, LENGTH, VOCABULARY, SAMPLES = 64, 8, 4, 32, 128, 16


class TinyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, letters: Tensor) -> Tensor:
        return self.letters(letters) + self.places(torch.arange(letters.shape[1]))


def loss_fn(model: Any, letters: Tensor) -> Tensor:
    return F.cross_entropy(model(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())


def build() -> tuple[nn.Module, Any, Tensor]:
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    embedding, blocks = Embedding(), [TinyBlock() for _ in range(LAYERS)]
    if seconds := seconds_per_sample():
        for block in blocks:
            pace(block, seconds)
    return nn.Sequential(embedding, *blocks, head), loss_fn, data(0)


def data(step: int) -> Tensor:
    letters = torch.tensor([byte % VOCABULARY for byte in Path(__file__).read_bytes()])
    starts = [(step * SAMPLES + at) * 37 % (len(letters) - LENGTH) for at in range(SAMPLES)]
    return torch.stack([letters[start : start + LENGTH + 1] for start in starts])


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def train_alone(steps: int, micro_batch: int, count: int) -> list[float]:
    torch.manual_seed(0)
    model, _, _ = build()
    update, losses = optimizer(model.parameters()), []
    for step in range(steps):
        update.zero_grad()
        total = 0.0
        for rows in data(step).split(micro_batch):
            loss = loss_fn(model, rows) / count
            loss.backward()
            total += loss.item()
        update.step()
        losses.append(total)
    return losses


if __name__ == "__main__":
    sys.stdout.write(json.dumps(train_alone(*map(int, sys.argv[1:]))))
