"""Under torchrun: a step shared by unequal devices through ``argosy.parallelize``; rank 0 prints
the losses."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import argosy


def build() -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).double()

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return functional.mse_loss(net(x), x)

    return model, loss, torch.randn(64, 256, dtype=torch.float64)


def main(cluster: str) -> None:
    plan = argosy.find_plan(argosy.capture_program(build), cluster)
    model, loss, batch = build()
    trainer = argosy.parallelize(
        model, loss, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), batch, plan
    )
    losses = [trainer.step(batch) for _ in range(3)]
    if torch.distributed.get_rank() == 0:
        sys.stdout.write(" ".join(map(repr, losses)) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
