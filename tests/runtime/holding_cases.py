"""What ranks do in the tests of what they hold at the beginning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from runtime.training_cases import Case, plan_of
from torch import Tensor, nn

from argosy.plan.plan import Plan
from argosy.runtime.processes.world import open_groups
from argosy.runtime.step.trainer import parallelize

WIDTH = 4


class Scaled(nn.Module):
    """With a table that is drawn, and may be any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angles", torch.randn(WIDTH, dtype=torch.complex64))
        self.register_buffer("kept", torch.rand(WIDTH) > 0.5)
        self.register_buffer("count", torch.randint(100, ()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.angles.abs() + self.kept  # type: ignore[operator]


class Mixed(nn.Module):
    """A product in half the precision of the norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.linear(x.bfloat16()).float())
        return result


def loss_of(model: Any, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def plan_for(shares: tuple[tuple[int, ...], ...], zero: int = 0) -> Plan:
    plan = plan_of(Case(shares=shares, num_micro_batches=2, zero=zero))
    stages = [replace(stage, first=at, end=at + 1) for at, stage in enumerate(plan.stages)]
    return replace(plan, stages=tuple(stages))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def buffers_of_ranks_that_drew_apart() -> list[Any]:
    """Two stages, the second on two replicas, and a table that both stages have."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(Scaled(), Scaled())
    model[1].register_buffer("shared", model[0].angles)
    parallelize(model, loss_of, adam, torch.ones(4, WIDTH), plan_for(((2,), (1, 1))))
    return [[value.tolist() for value in layer.buffers()] for layer in model]


def train_mixed(zero: int) -> tuple[list[float], dict[str, list[float]]]:
    torch.manual_seed(0)
    batch = torch.randn(4, WIDTH)
    trainer = parallelize(nn.Sequential(Mixed()), loss_of, adam, batch, plan_for(((1, 1),), zero))
    losses = [trainer.step(batch) for _ in range(3)]
    return losses, {
        held.name: held.parameter.detach().float().flatten().tolist() for held in trainer.held()
    }


def train_from_a_file(zero: int, path: str | None) -> list[float]:
    """The losses of a model whose weights are views of one file in memory, as those that
    ``from_pretrained`` reads are; None: the same weights, each with memory of its own."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH)), torch.randn(4, WIDTH)
    if path is not None:
        count = sum(weight.numel() for weight in model.parameters())
        at, mapped = 0, torch.from_file(f"{path}.{dist.get_rank()}", shared=False, size=count)
        for weight in model.parameters():
            view = mapped[at : at + weight.numel()].view_as(weight)
            at += weight.numel()
            weight.data = view.copy_(weight.data)
        assert not model[0].weight.data.untyped_storage().resizable()
    trainer = parallelize(model, loss_of, adam, batch, plan_for(((1, 1),), zero))
    return [trainer.step(batch) for _ in range(3)]


def patience_of_groups() -> list[float]:
    """Seconds: of all ranks, and of some of them."""
    some: Any = open_groups([(0, 1)], {})[0, 1]
    every: Any = dist.group.WORLD
    dist.barrier()  # a rank that has returned lets go of the group while another still joins it
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in (every, some)
    ]
