"""Bytes of memory: what a stage holds on each of its devices.

With P parameters in a stage, share r of its tensors on the device, n replicas and the number of micro-batches in
flight:

    (1)  weights    = r P b                    b bytes per element of the dtype;  / n under ZeRO 3
    (2)  gradients  = r P b                                                       / n under ZeRO 2 and 3
    (3)  optimizer  = r P s                    s from OPTIMIZER_BYTES;            / n under ZeRO 1 to 3
    (4)  activations of one micro-batch = r n_samples (sum of the layers' kept bytes, less what recomputation drops)
    (5)  recomputed in a backward       = r n_samples (the largest that a layer of the stage has dropped)

Tensor-parallel groups are taken to split activations along the sequence outside the matrix products too. How many
micro-batches are in flight at a time is the schedule's affair: the simulator adds (4) up as it goes.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.errors import bad_input, closest
from argosy.plan.plan import Recompute, Stage
from argosy.workload.chain import Chain

OPTIMIZER_BYTES = {"adamw": 8, "adam": 8, "lion": 4, "momentum": 4, "sgd": 0}
"""State per parameter, in fp32; a 16-bit model keeps 4 more for its fp32 master copy."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What a device holds of a stage between iterations, in bytes."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def optimizer_bytes(chain: Chain) -> int:
    """s in (3)."""
    if chain.optimizer not in OPTIMIZER_BYTES:
        expected = f"one of the optimizers {', '.join(OPTIMIZER_BYTES)}"
        raise bad_input(
            expected, chain.optimizer, where="optimizer", suggestion=closest(chain.optimizer, OPTIMIZER_BYTES)
        )
    return OPTIMIZER_BYTES[chain.optimizer] + (4 if chain.dtype.bytes < 4 else 0)


def stage_parameters(chain: Chain, stage: Stage) -> int:
    """Weights a stage must hold; a tied layer counts unless its partner is in the same stage."""
    count = 0
    for layer in chain.layers[stage.first : stage.end]:
        count += layer.parameters
        if layer.tied_to is not None and not stage.first <= layer.tied_to < stage.end:
            count += layer.tied_parameters
    return count


def state_bytes(chain: Chain, stage: Stage, share: float) -> StateBytes:
    """(1) to (3) for one device of a stage."""
    elements = stage_parameters(chain, stage) * share
    replicas = len(stage.replicas)
    return StateBytes(
        weights=elements * chain.dtype.bytes / (replicas if stage.zero >= 3 else 1),
        gradients=elements * chain.dtype.bytes / (replicas if stage.zero >= 2 else 1),
        optimizer=elements * optimizer_bytes(chain) / (replicas if stage.zero >= 1 else 1),
    )


def activation_bytes(chain: Chain, stage: Stage, samples: int, share: float) -> float:
    """(4) for one micro-batch on one device."""
    total = 0.0
    for index in range(stage.first, stage.end):
        layer = chain.layers[index]
        match stage.recompute:
            case Recompute.NONE:
                total += layer.activation_bytes
            case Recompute.SELECTIVE:
                total += layer.activation_bytes - layer.selective_bytes
            case Recompute.FULL:
                total += chain.layers[index - 1].output_bytes if index else 0.0
    return total * samples * share


def recomputed_bytes(chain: Chain, stage: Stage, samples: int, share: float) -> float:
    """(5): what the backward of one micro-batch holds for a moment, on one device, because it computes it again."""
    layers = chain.layers[stage.first : stage.end]
    match stage.recompute:
        case Recompute.NONE:
            return 0.0
        case Recompute.SELECTIVE:
            largest = max(layer.selective_bytes for layer in layers)
        case Recompute.FULL:
            largest = max(layer.activation_bytes for layer in layers)
    return largest * samples * share
