"""Describe the step and samples that a stage computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """The step and samples that random masks depend on."""

    step: int
    first_sample: int
    """The index of the first sample in the global batch."""
    samples: int
    global_batch: int = 0
    """The number of samples of all parts; 0 if these samples are all."""
    is_padding: bool = False
    """True if the samples are copies that fill up a short batch and have weight zero."""

    @property
    def total(self) -> int:
        return self.global_batch or self.samples
