"""Fifty steps of a small GPT on real text, by a plan and alone. The text is Abraham Lincoln's at
Gettysburg, 1863."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from runtime.small_models import Block
from runtime.training_cases import Case, plan_of
from torch import Tensor, nn

from argosy.plan.plan import Plan
from argosy.runtime.step.trainer import parallelize
from argosy.schedule import ScheduleKind

TEXT = (Path(__file__).parent / "data" / "gettysburg.txt").read_text()
LETTERS = sorted(set(TEXT))
WIDTH, LENGTH, STEPS = 32, 24, 50
CASE = Case(shares=((3, 1), (4,)), kind=ScheduleKind.KFKB, k=2, num_micro_batches=3, zero=1)


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)

    def forward(self, letters: Tensor) -> Tensor:
        return self.letters(letters) + self.places


def build() -> nn.Module:
    torch.manual_seed(1)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS)))
    return nn.Sequential(Letters(), *(Block(WIDTH, causal=True) for _ in range(4)), head)


def loss_fn(model: Any, letters: Tensor) -> Tensor:
    return F.cross_entropy(model(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())


def data(step: int, samples: int) -> Tensor:
    codes = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    starts = torch.randint(
        len(codes) - LENGTH, (samples,), generator=torch.Generator().manual_seed(step)
    )
    return torch.stack([codes[start : start + LENGTH + 1] for start in starts.tolist()])


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def curve_by_plan() -> list[float]:
    """On every rank."""
    plan: Plan = plan_of(CASE)
    model, batch = build(), data(0, plan.global_batch)
    trainer = parallelize(model, loss_fn, optimizer, batch, plan, clip_norm=1.0)
    return [trainer.step(data(step, plan.global_batch)) for step in range(STEPS)]


def curve_alone() -> list[float]:
    size, count = sum(CASE.shares[0]), CASE.num_micro_batches
    model, losses = build(), []
    steps = optimizer(model.parameters())
    for step in range(STEPS):
        total = 0.0
        for rows in data(step, size * count).split(size):
            loss = loss_fn(model, rows) / count
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        steps.zero_grad()
        losses.append(total)
    return losses
