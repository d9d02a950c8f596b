"""Captured programs in an ordinary loop: last short batches and evaluations between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from runtime.own_programs import PROGRAMS
from runtime.program_cases import SEED, cut_of, optimizer, plan_of, prepared
from torch import Tensor
from torch.utils._pytree import tree_map

from argosy.errors import InputError
from argosy.plan.file import loads_plan
from argosy.runtime.step.trainer import parallelize
from argosy.workload.capture.initial import Recording, run_build

Loop = Sequence[tuple[str, int]]
"""What a loop does with how many samples: ``train`` or ``evaluate``."""


def rows(batch: Any, samples: int) -> Any:
    return tree_map(
        lambda leaf: leaf[:samples].clone() if isinstance(leaf, Tensor) else leaf, batch
    )


def loop_alone(name: str, loop: Loop) -> list[float]:
    """The losses of the loop that everybody writes."""
    torch.set_default_dtype(torch.float64)
    prepared(name)
    torch.manual_seed(SEED)
    model, loss_fn, batch = PROGRAMS[name]()
    updates, losses = optimizer([p for p in model.parameters() if p.requires_grad]), []
    for what, samples in loop:
        model.train(what == "train")
        with torch.set_grad_enabled(what == "train"):
            loss = loss_fn(model, rows(batch, samples))
        if what == "train":
            loss.backward()
            updates.step()
            updates.zero_grad()
        losses.append(float(loss.detach()))
    torch.set_default_dtype(torch.float32)
    return losses


def loop_by_plan(name: str, way: str, loop: Loop, plan: str | None = None) -> tuple[str, Any]:
    """On every rank: ("losses", them) or ("refused", why)."""
    torch.set_default_dtype(torch.float64)
    try:
        prepared(name)
        chosen = plan_of(name, way) if plan is None else loads_plan(plan)
        cut = cut_of(name, way) if plan is None else chosen.cut
        torch.manual_seed(SEED)
        recording = Recording()
        model, loss_fn, batch = run_build(PROGRAMS[name], recording)
        batch = tree_map(
            lambda leaf: recording.materialise([leaf])[0] if isinstance(leaf, Tensor) else leaf,
            batch,
        )
        trainer = parallelize(
            model, loss_fn, optimizer, batch, chosen, recording=recording, seed=SEED, cut=cut
        )
        calls = {"train": trainer.step, "evaluate": trainer.evaluate}
        return "losses", [calls[what](rows(batch, samples)) for what, samples in loop]
    except InputError as error:
        dist.barrier()  # a rank that leaves early would look like one that crashed
        return "refused", str(error)
    finally:
        torch.set_default_dtype(torch.float32)
