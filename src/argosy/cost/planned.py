"""Compute the peak memory of a plan's devices in closed form, without a simulation.

    (1)  peak = state + in-flight depth x activations + what arrives, or is computed again, for one
         more micro-batch

This is a little less than a simulated peak, because of tensors that arrive early.
"""

from __future__ import annotations

import operator

from argosy.cost.memory import activation_bytes, passing_bytes, state_bytes
from argosy.plan.plan import Plan, Stage
from argosy.schedule import most_in_flight
from argosy.workload.chain import Chain


def planned_memory(plan: Plan, chain: Chain) -> dict[str, float]:
    """Return the peak (1) of every device in use, in bytes."""
    return {name: sum(parts) for name, parts in planned_parts(plan, chain).items()}


def planned_parts(plan: Plan, chain: Chain) -> dict[str, tuple[float, ...]]:
    """Return the terms of (1) for every device in use, in bytes: weights, gradients (with the
    errors that PowerSGD keeps of them), optimizer, activations, buffers."""
    depths = most_in_flight(plan.schedule, len(plan.stages), plan.num_micro_batches)
    held: dict[str, tuple[float, ...]] = {}
    for index, stage in enumerate(plan.stages):
        arriving = chain.layers[stage.first - 1].output_bytes if index else 0.0
        returning = chain.returned_bytes(stage.end - 1) if index + 1 < len(plan.stages) else 0.0
        parts: dict[tuple[int, float], tuple[float, ...]] = {}
        for replica in stage.replicas:
            for name, share in replica.members:
                if (replica.samples, share) not in parts:
                    state = state_bytes(chain, stage, share)
                    kept = depths[index] * activation_bytes(chain, stage, replica.samples, share)
                    more = _passing(chain, stage, replica.samples, share, arriving, returning)
                    parts[replica.samples, share] = (
                        state.weights,
                        state.gradients + state.errors,
                        state.optimizer,
                        kept,
                        more,
                    )
                own = parts[replica.samples, share]
                earlier = held.get(name)
                if earlier is not None:
                    own = tuple(map(operator.add, earlier, own))
                held[name] = own
    return held


def _passing(
    chain: Chain, stage: Stage, samples: int, share: float, arriving: float, returning: float
) -> float:
    """Return the bytes that arrive for one more micro-batch, or come back, and those that its
    forward or backward holds for a moment."""
    ahead, back = (
        passing_bytes(chain, stage, samples, share, backward=way) for way in (False, True)
    )
    return max(arriving * samples * share + ahead, returning * samples * share + back)
