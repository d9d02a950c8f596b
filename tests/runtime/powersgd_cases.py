"""PowerSGD on the ranks of a pool, and in one process with the gradient of the whole batch."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runtime.training_cases import Case, KeepGradients, Outcome, built, outcome_of, plan_of
from torch import Tensor
from torch.utils._pytree import tree_map

from argosy.plan.plan import Plan
from argosy.runtime.processes.run_folder import checkpoints
from argosy.runtime.step.trainer import parallelize

RANK = 2


def factored_plan(case: Case, rank: int = RANK) -> Plan:
    plan = plan_of(case)
    return replace(plan, model=replace(plan.model, powersgd=rank))


def drawn(batch: Any, step: int) -> Any:
    """The samples of a batch in another order, so that steps differ."""
    generator = torch.Generator().manual_seed(step)

    def redrawn(leaf: Any) -> Any:
        return (
            leaf[torch.randperm(len(leaf), generator=generator)]
            if isinstance(leaf, Tensor)
            else leaf
        )

    return tree_map(redrawn, batch)


def train_factored(
    case: Case, folder: str = "", save_at: int = -1, resumes: bool = False
) -> Outcome:
    """To be called by every rank; ``save_at``: steps after which a checkpoint is written."""
    torch.manual_seed(0)
    model, loss_fn, batch = built(case)
    trainer = parallelize(model, loss_fn, KeepGradients, batch, factored_plan(case))
    if resumes:
        (saved,) = checkpoints(Path(folder))
        trainer.load(saved)
    losses = []
    while trainer.steps < case.steps:
        losses.append(trainer.step(drawn(batch, trainer.steps)))
        if trainer.steps == save_at:
            trainer.save(folder)
    return outcome_of(trainer, losses)


class AloneSum:
    """The algorithm of Vogels et al. for the gradients of one process, with Gram-Schmidt."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.errors: dict[str, np.ndarray] = {}
        self.columns: dict[str, np.ndarray] = {}

    def __call__(self, name: str, gradient: np.ndarray) -> np.ndarray:
        matrix = gradient.reshape(len(gradient), -1)
        rows, columns = matrix.shape
        if gradient.ndim < 2 or self.rank * (rows + columns) >= rows * columns:
            return gradient
        if name not in self.columns:
            seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
            first = torch.randn(
                columns,
                self.rank,
                generator=torch.Generator().manual_seed(seed),
                dtype=torch.float64,
            )
            self.columns[name], self.errors[name] = first.numpy(), np.zeros_like(matrix)
        wanted = matrix + self.errors[name]
        basis = wanted @ self.columns[name]
        for at in range(self.rank):
            for before in range(at):
                basis[:, at] -= basis[:, before] * (basis[:, before] @ basis[:, at])
            basis[:, at] /= np.linalg.norm(basis[:, at])
        self.columns[name] = wanted.T @ basis
        passed = basis @ self.columns[name].T
        self.errors[name] = wanted - passed
        return passed.reshape(gradient.shape)


def train_factored_alone(case: Case) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses by step and the last weights, in one process."""
    torch.manual_seed(0)
    model, loss_fn, batch = built(case)
    optimizer, summed, losses = KeepGradients(model.parameters()), AloneSum(RANK), []
    for step in range(case.steps):
        loss = loss_fn(model, drawn(batch, step))
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(torch.from_numpy(summed(name, parameter.grad.numpy())))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {
        name: parameter.detach().numpy() for name, parameter in model.named_parameters()
    }
