"""An ordinary training loop under a plan and in one process: masked targets, short batches,
schedulers, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from runtime.small_models import hf_bert
from runtime.training_cases import Case, plan_of
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, SequentialLR, StepLR

from argosy.runtime.step.trainer import parallelize

CASE = Case(shares=((3, 1), (4,)), num_micro_batches=2)
LAST_DIVIDED = Case(shares=((4,), (3, 1)), num_micro_batches=2)
WORDS, WIDTH = 11, 8
Batch = dict[str, Tensor]


def model_of(*, drops: bool = False) -> nn.Sequential:
    """Six layers in double precision."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    middle = nn.Sequential(blocks[3], nn.Dropout(0.5)) if drops else blocks[3]
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *blocks[:3], middle, nn.Linear(WIDTH, WORDS)
    ).double()


def batch_of(samples: int, length: int = 5, *, seed: int = 0) -> Batch:
    """Tokens and targets; sample i has (i + 2) % length of its targets, so parts of the batch have
    unequal numbers, and the part with sample 3 alone has none."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (
        torch.randint(WORDS, (samples, length), generator=generator) for _ in range(2)
    )
    kept = torch.arange(length)[None] < ((torch.arange(samples) + 2) % length)[:, None]
    return {"tokens": tokens, "labels": labels.masked_fill(~kept, -100)}


def masked(model: Any, batch: Batch) -> Tensor:
    """torch's mean over targets that are not masked."""
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def halved(model: Any, batch: Batch) -> Tensor:
    return masked(model, batch) / 2


def by_class(model: Any, batch: Batch) -> Tensor:
    """Classes have weights, and so have their targets in the mean."""
    weight = torch.linspace(0.5, 2, WORDS, dtype=torch.float64)
    logits = F.log_softmax(model(batch["tokens"]).flatten(0, 1), -1)
    return F.nll_loss(logits, batch["labels"].flatten(), weight=weight)


def paired(model: Any, batch: Batch) -> Any:
    """A mean written by hand, with its weight; no number where nothing counts."""
    counted = batch["labels"] >= 0
    errors = (model(batch["tokens"]).square().sum(-1) - 1).square()
    return (errors * counted).sum() / counted.sum(), counted.sum()


def shared(model: Any, batch: Batch) -> Any:
    """A sum over a number that the caller knows, here always 13."""
    logits = model(batch["tokens"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / 13, None


def unpaired(model: Any, batch: Batch) -> Tensor:
    return paired(model, batch)[0]


def selected(model: Any, batch: Batch) -> Tensor:
    """As many targets as there are, differently many in each part."""
    counted = batch["labels"] >= 0
    return F.cross_entropy(model(batch["tokens"])[counted], batch["labels"][counted])


def summed(model: Any, batch: Batch) -> Tensor:
    """A masked mean and something else."""
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + logits.square().mean()


LOSSES: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (masked, halved, by_class, paired, shared, unpaired, selected, summed)
}


def warm_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [warm_up(optimizer), StepLR(optimizer, 1, 0.5)], milestones=[2])


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.4, total_steps=8)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    """Means over rows and columns of a weight: parts of weights have others."""
    return torch.optim.Adafactor(parameters, lr=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def with_pair(parameters: Any) -> Any:
    optimizer = sgd(parameters)
    return optimizer, warm_up(optimizer)


def grouped(named_parameters: Any) -> torch.optim.Optimizer:
    """Other rates for biases, found by their names."""
    biases = [parameter for name, parameter in named_parameters if name.endswith("bias")]
    others = [parameter for name, parameter in named_parameters if not name.endswith("bias")]
    return torch.optim.SGD(
        [{"params": biases, "lr": 0.05}, {"params": others}], lr=0.2, momentum=0.9
    )


def together(tensors: list[Tensor]) -> Tensor:
    """Batches of several lengths as one; what fills them up is masked."""
    longest = max(tensor.shape[1] for tensor in tensors)
    fill = -100 if any((tensor < 0).any() for tensor in tensors) else 0
    return torch.cat(
        [F.pad(tensor, (0, longest - tensor.shape[1]), value=fill) for tensor in tensors]
    )


def alone(
    loss: str, steps: list[list[Batch]], *, scheduler: Any = None, optimizer: Any = sgd
) -> list[float]:
    """The reference: per step the loss of its batches as one, by plain torch."""
    model, losses = model_of(), []
    made = optimizer(list(model.named_parameters() if optimizer is grouped else model.parameters()))
    rates = None if scheduler is None else scheduler(made)
    for batches in steps:
        whole = {key: together([batch[key] for batch in batches]) for key in batches[0]}
        result = LOSSES[loss](model, whole)
        value = result[0] if isinstance(result, tuple) else result
        value.backward()
        made.step()
        made.zero_grad()
        if rates is not None:
            rates.step()
        losses.append(value.item())
    return losses


def by_plan(
    loss: str, steps: list[list[Batch]], case: Case = CASE, options: dict[str, Any] | None = None
) -> list[float]:
    """On every rank."""
    model, plan, options = model_of(), plan_of(case), dict(options or {})
    optimizer = options.pop("optimizer", sgd)
    trainer = parallelize(
        model, LOSSES[loss], optimizer, batch_of(plan.global_batch), plan, **options
    )
    losses = []
    for *others, last in steps:
        for batch in others:
            trainer.accumulate(batch)
        losses.append(trainer.step(last))
    return losses


def scored_inside(steps: int) -> tuple[torch.nn.Module, list[Batch]]:
    """BERT, whose last layer computes the loss, and batches with unequal numbers of targets."""
    torch.manual_seed(3)
    model, _, _ = hf_bert(1)
    batches = [batch_of(8, seed=step) for step in range(steps)]
    return model.double(), [
        {"input_ids": batch["tokens"], "labels": batch["labels"]} for batch in batches
    ]


def scored_alone(steps: int) -> list[float]:
    """The reference for ``scored_by_plan``, by plain torch."""
    (model, batches), losses = scored_inside(steps), []
    optimizer = sgd(model.parameters())
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def scored_by_plan(case: Case, steps: int) -> list[float]:
    """Losses of a model that computes them in its last layer, on every rank."""
    model, batches = scored_inside(steps)
    trainer = parallelize(
        model, lambda model, batch: model(**batch).loss, sgd, batches[0], plan_of(case)
    )
    return [trainer.step(batch) for batch in batches]


def evaluated(case: Case) -> tuple[list[float], list[float]]:
    """Losses of evaluations between training steps, and those of the steps."""
    plan = plan_of(case)
    trainer = parallelize(model_of(drops=True), masked, sgd, batch_of(plan.global_batch), plan)
    found = [trainer.evaluate(batch_of(5, 3)), trainer.evaluate(batch_of(8))]
    losses = [trainer.step(batch_of(8)) for _ in range(2)]
    return [*found, trainer.evaluate(batch_of(8))], losses


def moved_and_saved(folder: Path) -> tuple[list[float], list[float], list[Any]]:
    """Four steps with a move in between, four more from a checkpoint in a trainer of another
    plan."""
    plans = [plan_of(CASE), plan_of(Case(shares=((4,), (2, 2)), num_micro_batches=2))]
    rows = []
    trainer = parallelize(model_of(), masked, sgd, batch_of(8), plans[0], scheduler=sequence)
    trainer.callbacks.append(rows.append)
    losses = [trainer.step(batch_of(8, seed=step)) for step in range(2)]
    trainer.move(plans[1])
    losses += [trainer.step(batch_of(8, seed=step)) for step in range(2, 4)]
    saved = trainer.save(folder)
    other = parallelize(model_of(), masked, sgd, batch_of(8), plans[0], scheduler=sequence)
    other.step(batch_of(8))
    other.load(saved)
    return losses, [other.step(batch_of(8, seed=step)) for step in range(4, 6)], rows
