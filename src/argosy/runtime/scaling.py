"""Loss scaling for fp16: small gradients are lifted into its range and brought back before the update.

The scale s doubles after ``_PATIENCE`` steps without overflow and halves at each overflow, whose step is left out. One
with s = 1 is no matter of scale: it ends the run, which would leave out every step from there on. All ranks see the
same norm, so they agree without a word.
"""

from __future__ import annotations

_FIRST = 2.0**16
_PATIENCE = 2000


class LossScale:
    """s, or 1 where the dtype has range enough."""

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self.value = _FIRST if active else 1.0
        self.calm = 0
        """Steps since the last overflow or doubling."""

    @property
    def is_spent(self) -> bool:
        """Whether no smaller scale is left."""
        return self.value <= 1.0

    def observe(self, *, finite: bool) -> None:
        """What became of a step."""
        if not self.active:
            return
        self.calm = self.calm + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.calm == _PATIENCE:
            self.value, self.calm = self.value * 2, 0
