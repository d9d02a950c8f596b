"""A part of a stage: equal replicas from one pool."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.space.exchange import Split


@dataclass(frozen=True, kw_only=True)
class PoolPart:
    """Equal replicas from one pool."""

    pool: int
    width: int
    replicas: int
    samples: int
    """Of a replica."""
    extra: int = 0
    """How many of the replicas take one sample more."""
    context: int = 1
    """Parts of the sequence; the same in all parts of an option."""
    expert: int = 1
    """Holders over which experts are split; the same in all parts of an option."""

    @property
    def most(self) -> int:
        """Samples of the busiest of them."""
        return self.samples + (self.extra > 0)

    @property
    def all_samples(self) -> int:
        """Of all of them together."""
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
