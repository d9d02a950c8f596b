"""Compute the peak memory of a plan's devices in closed form, without a simulation.

    (1)  peak = what is held for the whole iteration (``cost.resident``) + in-flight depth x
         activations + what arrives for one more micro-batch of each stage + what the forward or
         backward of one stage holds for a moment

This is a little less than a simulated peak, because of tensors that arrive early.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.cost.memory import activation_bytes, passing_bytes
from argosy.cost.resident import resident_bytes
from argosy.plan.plan import Plan, Stage
from argosy.schedule import most_in_flight
from argosy.workload.chain import Chain


@dataclass(kw_only=True)
class _Moving:
    """A record of the bytes that a device holds for micro-batches."""

    kept: float = 0.0
    arriving: float = 0.0
    passing: float = 0.0


def planned_memory(plan: Plan, chain: Chain) -> dict[str, float]:
    """Return the peak (1) of every device in use, in bytes."""
    return {name: sum(parts) for name, parts in planned_parts(plan, chain).items()}


def planned_parts(plan: Plan, chain: Chain) -> dict[str, tuple[float, ...]]:
    """Return the terms of (1) for every device in use, in bytes: weights, gradients (with the
    errors that PowerSGD keeps of them), optimizer, activations, buffers."""
    depths = most_in_flight(plan.schedule, len(plan.stages), plan.num_micro_batches)
    moving: dict[str, _Moving] = {}
    for index, stage in enumerate(plan.stages):
        arriving = chain.layers[stage.first - 1].output_bytes if index else 0.0
        returning = chain.returned_bytes(stage.end - 1) if index + 1 < len(plan.stages) else 0.0
        priced: dict[tuple[int, float], tuple[float, float, float]] = {}
        for replica in stage.replicas:
            for name, share in replica.members:
                key = (replica.samples, share)
                if key not in priced:
                    kept = depths[index] * activation_bytes(chain, stage, *key)
                    priced[key] = (kept, *_passing(chain, stage, *key, arriving, returning))
                kept, arrives, passes = priced[key]
                own = moving.setdefault(name, _Moving())
                own.kept += kept
                own.arriving += arrives
                own.passing = max(own.passing, passes)
    held = resident_bytes(plan, chain)
    return {
        name: (
            held[name].weights,
            held[name].gradients,
            held[name].optimizer,
            own.kept,
            held[name].outputs + own.arriving + own.passing,
        )
        for name, own in moving.items()
    }


def _passing(
    chain: Chain, stage: Stage, samples: int, share: float, arriving: float, returning: float
) -> tuple[float, float]:
    """Return the bytes that arrive for one more micro-batch, or come back, and those that its
    forward or backward holds for a moment."""
    ahead, back = (
        passing_bytes(chain, stage, samples, share, backward=way) for way in (False, True)
    )
    forward, backward = arriving * samples * share, returning * samples * share
    return (forward, ahead) if forward + ahead > backward + back else (backward, back)
