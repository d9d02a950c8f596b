"""Scale the loss for fp16: small gradients are multiplied into its range and divided again before
the update.

The scale s doubles after ``_PATIENCE`` steps without overflow and halves at each overflow, whose
step is skipped. An overflow at s = 1 cannot be avoided by scaling: it ends the run, which would
otherwise skip every step from then on. All ranks compute the same norm, so they agree without
communication.
"""

from __future__ import annotations

import math

from torch import Tensor

from argosy.errors import RunError
from argosy.runtime.processes.failure import ElsewhereError

# The first scale; overflows reduce it quickly if it is too large.
_FIRST = 2.0**16
# Steps without overflow after which the scale doubles.
_PATIENCE = 2000


class LossScale:
    """The scale s, which stays 1 if the dtype has enough range."""

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self.value = _FIRST if active else 1.0
        self.calm = 0
        """Steps since the last overflow or doubling."""

    @property
    def is_spent(self) -> bool:
        """Return whether the scale cannot be reduced further."""
        return self.value <= 1.0

    def observe(self, *, finite: bool) -> None:
        """Adjust the scale to the outcome of a step."""
        if not self.active:
            return
        self.calm = self.calm + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.calm == _PATIENCE:
            self.value, self.calm = self.value * 2, 0


def check_finite(loss: float, norm: float, losses: Tensor, step: int, scale: LossScale) -> None:
    """Raise a ``RunError`` if the loss or the gradient of a step is not finite, before the update.

    ``losses`` are those of this rank's micro-batches.
    """
    if math.isfinite(loss):
        if not math.isfinite(norm) and scale.is_spent:
            shown = " and its scale 1" if scale.active else ""
            raise RunError(
                f"the gradient of step {step} is not finite, though the loss is {loss:g}{shown}"
            )
        return
    mine = [index for index, value in enumerate(losses.tolist()) if not math.isfinite(value)]
    if mine:
        raise RunError(f"the loss of step {step} is {loss}, first in micro-batch {mine[0]}")
    raise ElsewhereError(f"the loss of step {step} is {loss} on another rank")
