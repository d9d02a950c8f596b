"""Describe a part of a stage: equal replicas from one pool."""

from __future__ import annotations

from typing import NamedTuple

from argosy.space.exchange import Split


class PoolPart(NamedTuple):
    """A set of equal replicas that come from one pool.

    A search makes and hashes thousands of them, which is why this is a tuple.
    """

    pool: int
    width: int
    replicas: int
    samples: int
    """Samples of one replica."""
    extra: int = 0
    """Number of replicas that take one sample more."""
    context: int = 1
    """Number of parts of the sequence; equal in all parts of an option."""
    expert: int = 1
    """Number of holders that the experts are split over; equal in all parts of an option."""

    @property
    def most(self) -> int:
        """Return the samples of the busiest replica."""
        return self.samples + (self.extra > 0)

    @property
    def all_samples(self) -> int:
        """Return the samples of all replicas together."""
        return self.samples * self.replicas + self.extra

    @property
    def devices(self) -> int:
        return self.width * self.replicas

    @property
    def tensor_width(self) -> int:
        return self.width // self.context

    @property
    def split(self) -> Split:
        return Split(self.width, self.context, self.expert)
