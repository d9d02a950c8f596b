"""A plan on disk for ``argosy run``, and what one process makes of the same program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from runtime.programs.small_gpt import data
from runtime.small_models import build
from runtime.training_cases import Case, plan_of

from argosy.cluster.topology import canonical
from argosy.plan.file import dumps_plan

PROGRAM = Path(__file__).parent / "programs" / "small_gpt.py"
CASE = Case(shares=((2,), (2,)), num_micro_batches=4)


def written_plan(
    folder: Path, case: Case = CASE, *, kind: str = "CPU-core", nodes: int = 1
) -> Path:
    plan = plan_of(case)
    each = len(plan.devices) // nodes
    names = {
        f"n0.{index}": f"n{index // each}.{index % each}" for index in range(len(plan.devices))
    }
    stages = tuple(
        replace(
            stage,
            replicas=tuple(
                replace(r, devices=tuple(names[name] for name in r.devices)) for r in stage.replicas
            ),
        )
        for stage in plan.stages
    )
    intra = [{"medium": "pcie", "bandwidth": "10 GB/s", "latency": "5 us"}]
    devices = {"kind": kind, "count": each}
    nic = {"bandwidth": "10 Gbit/s", "latency": "10 us"}
    node = {"name": "n", "count": nodes, "devices": devices, "intra": intra, "nic": nic}
    content = {"name": "local", "nodes": [node]}
    path = folder / "plan.json"
    plan = replace(plan, stages=stages, cluster=replace(plan.cluster, content=canonical(content)))
    path.write_text(dumps_plan(plan))
    return path


def losses_alone(steps: int) -> list[float]:
    """The reference: one process, the same micro-batches, the same initial values, AdamW."""
    model, loss_fn, _ = build("gpt", 8, tied=False, dtype=torch.float32)
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for step in range(steps):
        batch: Any = data(step)
        total = 0.0
        for index in range(4):
            loss = (
                loss_fn(
                    model, {key: rows[2 * index : 2 * index + 2] for key, rows in batch.items()}
                )
                / 4
            )
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
