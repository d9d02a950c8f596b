"""Compute the bytes that devices hold for a whole iteration.

A device holds the state of all its stages ((1) to (3) of ``cost.memory``). Torchtitan's buffers add
to it:

    (1)  the last stage of a pipeline keeps the logits of all micro-batches, and joins them
    (2)  under ZeRO 1, whole gradients of a stage exist only during its own backwards; with at most
         as many micro-batches as workers, those of a worker's stages follow one another
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from argosy.cost.memory import StateBytes, state_bytes
from argosy.plan.plan import Plan, Stage
from argosy.workload.chain import Chain
from argosy.workload.systems import Buffers

# Copies of the logits of all micro-batches (1): one by one, and joined.
_KEPT_LOGITS = 2


@dataclass(kw_only=True)
class Resident:
    """A record of the bytes that a device holds for a whole iteration."""

    weights: float = 0.0
    gradients: float = 0.0
    """Gradients, and errors that PowerSGD keeps of them."""
    optimizer: float = 0.0
    outputs: float = 0.0
    """Logits of all micro-batches (1)."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.outputs


def resident_bytes(plan: Plan, chain: Chain) -> dict[str, Resident]:
    """Return what each device of a plan holds for a whole iteration."""
    held: dict[str, Resident] = defaultdict(Resident)
    for index, stage in enumerate(plan.stages):
        is_last = 0 < index == len(plan.stages) - 1
        in_turn = _in_turn(plan, chain, stage)
        states: dict[float, StateBytes] = {}
        for replica in stage.replicas:
            for name, share in replica.members:
                if share not in states:
                    states[share] = state_bytes(chain, stage, share)
                own, state = held[name], states[share]
                gradients = state.gradients + state.errors
                own.weights += state.weights
                own.gradients = (
                    max(own.gradients, gradients) if in_turn else own.gradients + gradients
                )
                own.optimizer += state.optimizer
                if is_last:
                    samples = plan.num_micro_batches * replica.samples * share
                    own.outputs += _KEPT_LOGITS * samples * chain.kept_logit_bytes
    return dict(held)


def _in_turn(plan: Plan, chain: Chain, stage: Stage) -> bool:
    """Return whether the whole gradients of a worker's stages follow one another (2)."""
    if chain.buffers is Buffers.ARGOSY or stage.zero != 1:
        return False
    return plan.num_micro_batches * plan.schedule.chunks <= len(plan.stages)
