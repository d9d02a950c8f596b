"""What ranks do in the tests of models with frozen weights, and of optimizers with less state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from runtime.small_models import Adapted, Block
from runtime.training_cases import Case, KeepGradients, built, plan_of
from torch import Tensor, nn

from argosy.dtype import Dtype
from argosy.measure.allocated import Allocations
from argosy.plan.offload import NO_OFFLOAD, parse_offload
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Recompute, Replica, Stage
from argosy.runtime.step.trainer import parallelize
from argosy.schedule import ScheduleSpec

WIDTH, LENGTH, CLASSES, BLOCKS = 96, 64, 512, 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda held: torch.optim.AdamW(held, foreach=True),  # the default on a GPU
    "momentum": lambda held: torch.optim.SGD(held, lr=0.1, momentum=0.9, foreach=False),
    "sgd": lambda held: torch.optim.SGD(held, lr=0.1, foreach=False),
    "adafactor": lambda held: torch.optim.Adafactor(held, foreach=False),
}


def what_happens(case: Case) -> dict[str, Any]:
    """Return what this rank holds, does and sends in a step after the first."""
    model, loss_fn, batch = built(case)
    trainer = parallelize(model, loss_fn, KeepGradients, batch, plan_of(case))
    sent: list[int] = []
    send = trainer.transport.send
    trainer.step(batch)

    def counted(tensor: Any, peer: int, *more: Any) -> None:
        sent.append(peer)
        send(tensor, peer, *more)

    trainer.transport.send = counted  # type: ignore[method-assign]
    trainer.step(batch)
    states = {} if trainer.optimizer is None else trainer.optimizer.state
    timeline = trainer.timeline()
    spans = [] if timeline is None else [(span.kind, span.stage) for span in timeline.spans]
    names = {id(held.parameter): held.name for held in trainer.held()}
    return {"sent": sent, "state": {names[id(parameter)] for parameter in states}, "spans": spans}


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A model that is trained in part, and how."""

    adapted: int | None = BLOCKS
    """Number of its last blocks with adapters beside frozen weights; None: all weights are
    trained."""
    stages: tuple[int, ...] = (BLOCKS + 2,)
    """Layers of each."""
    replicas: int = 1
    recompute: Recompute = Recompute.NONE
    zero: int = 0
    offload: str = ""
    optimizer: str = "adamw"
    num_micro_batches: int = 3

    def __str__(self) -> str:
        trained = "full" if self.adapted is None else f"adapters{self.adapted}"
        stages = "|".join(map(str, self.stages))
        kept = f"-{self.offload}" if self.offload else ""
        return f"{trained}-{stages}x{self.replicas}-{self.recompute}-zero{self.zero}-{self.optimizer}{kept}"

    @property
    def num_ranks(self) -> int:
        return len(self.stages) * self.replicas

    def plan(self) -> Plan:
        ends = [sum(self.stages[: at + 1]) for at in range(len(self.stages))]
        names = iter(f"n{rank}.0" for rank in range(self.num_ranks))
        return Plan(
            model=ModelRef(
                name="tuned", sequence_length=1, dtype=Dtype.FP32, optimizer=self.optimizer
            ),
            cluster=ClusterRef(name="local", hash="", content="{}"),
            global_batch=2 * self.replicas * self.num_micro_batches,
            micro_batch_size=2 * self.replicas,
            num_micro_batches=self.num_micro_batches,
            schedule=ScheduleSpec(),
            stages=tuple(
                Stage(
                    first=end - count,
                    end=end,
                    replicas=tuple(
                        Replica(devices=(next(names),), samples=2) for _ in range(self.replicas)
                    ),
                    recompute=self.recompute,
                    zero=self.zero,
                    offload=parse_offload(self.offload) if self.offload else NO_OFFLOAD,
                )
                for count, end in zip(self.stages, ends, strict=True)
            ),
        )

    def built(self) -> tuple[nn.Module, Any, Tensor]:
        torch.manual_seed(0)
        blocks = [Block(WIDTH, causal=True) for _ in range(BLOCKS)]
        model = nn.Sequential(
            nn.Embedding(CLASSES, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES, bias=False)
        )
        if self.adapted is not None:
            model.requires_grad_(False)
            for block in blocks[BLOCKS - self.adapted :]:
                block.attention.queries = Adapted(block.attention.queries, 4)
                block.feed_forward[2] = Adapted(block.feed_forward[2], 4)
        samples = 2 * self.replicas * self.num_micro_batches
        return model, loss_of, torch.randint(CLASSES, (samples, LENGTH))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    scores: Tensor = model(tokens)
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def held_and_peak(case: Tuned) -> tuple[float, float]:
    """Return bytes of optimizer state on this rank, and its peak above what it holds between
    steps."""
    model, loss_fn, batch = case.built()
    trainer = parallelize(model, loss_fn, OPTIMIZERS[case.optimizer], batch, case.plan())
    trainer.step(batch)
    with Allocations(torch.device("cpu")) as allocations:
        trainer.step(batch)
    state = [] if trainer.optimizer is None else list(trainer.optimizer.state.values())
    tensors = [
        value
        for entry in state
        for value in entry.values()
        if isinstance(value, Tensor) and value.dim()
    ]
    return float(sum(tensor.nbytes for tensor in tensors)), allocations.segments[-1].peak
