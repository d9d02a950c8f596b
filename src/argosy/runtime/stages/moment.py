"""When and for whom a stage computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """What random masks depend on."""

    step: int
    first_sample: int
    """Of the global batch."""
    samples: int
    global_batch: int = 0
    """Samples of all parts; 0 where these are all."""
    is_padding: bool = False
    """Whether the samples are copies that fill up a short batch, and count for nothing."""

    @property
    def total(self) -> int:
        return self.global_batch or self.samples
