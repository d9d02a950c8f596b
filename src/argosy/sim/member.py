"""What one micro-batch of a stage costs one device: seconds of its actions, bytes that it keeps and holds."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.cost.compute import StageSeconds
from argosy.schedule import ActionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What one micro-batch of a stage costs one device."""

    seconds: StageSeconds
    kept: float = 0.0
    """Bytes from the forward to the backward."""
    forward_bytes: float = 0.0
    """Held for a moment by a forward."""
    backward_bytes: float = 0.0

    def of(self, kind: ActionKind) -> tuple[float, float]:
        """Seconds of an action, and those of them during which keys and values may arrive."""
        if kind is ActionKind.FORWARD:
            return self.seconds.forward, self.seconds.hidden_forward
        whole = self.seconds.backward if kind is ActionKind.BACKWARD else self.seconds.backward / 2
        return whole, min(whole, self.seconds.hidden_backward)
