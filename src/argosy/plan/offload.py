"""Define what a stage keeps outside its devices: optimizer state, activations or weights, in host
memory or on NVMe."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields

from argosy.cluster.host import Tier
from argosy.errors import bad_input, closest


@dataclass(frozen=True, kw_only=True)
class Offload:
    """A choice of what a stage keeps outside its devices, and in which tier; None: on the
    devices."""

    optimizer: Tier | None = None
    """Tier of the optimizer's moments. A copy of 16-bit weights in fp32 stays on the device."""
    activations: Tier | None = None
    """Tier of the activations that a forward keeps for its backward, except the input of the
    stage."""
    weights: Tier | None = None
    """Tier of the weights that the layers read, trained and frozen."""

    def __bool__(self) -> bool:
        return not (self.optimizer is None and self.activations is None and self.weights is None)

    @property
    def parts(self) -> tuple[tuple[str, Tier | None], ...]:
        return (
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("weights", self.weights),
        )

    @property
    def named(self) -> dict[str, str]:
        """Return the tiers as a plan file stores them: ``{"optimizer": "host"}``."""
        return {name: str(tier) for name, tier in self.parts if tier is not None}

    def __str__(self) -> str:
        """Return the text that ``--offload`` reads: ``optimizer,activations=nvme``."""
        texts = (
            f"{name}={tier}" if tier is Tier.NVME else name
            for name, tier in self.parts
            if tier is not None
        )
        return ",".join(texts)


# The choice to keep everything on the devices.
NO_OFFLOAD = Offload()


def parse_offload(text: str) -> Offload:
    """Return the choice that a text such as ``optimizer,activations=nvme`` describes.

    >>> str(parse_offload("activations, optimizer=nvme"))
    'optimizer=nvme,activations'
    """
    names = [field.name for field in fields(Offload)]
    tiers: dict[str, Tier] = {}
    for part in text.split(","):
        name, _, tier = (piece.strip() for piece in part.partition("="))
        if name not in names:
            expected = f"some of {', '.join(names)}, with commas between them"
            raise bad_input(expected, part.strip(), "--offload", suggestion=closest(name, names))
        if tier not in ("", *Tier):
            raise bad_input(f"{name}, {name}=host or {name}=nvme", part.strip(), "--offload")
        tiers[name] = Tier(tier or Tier.HOST)
    return Offload(**tiers)


def choices(allowed: Offload) -> Iterator[Offload]:
    """Yield every choice that uses a part of what is allowed, nothing first.

    >>> [str(choice) for choice in choices(parse_offload("optimizer,activations"))]
    ['', 'activations', 'optimizer', 'optimizer,activations']
    """
    tiers = [(None,) if tier is None else (None, tier) for _, tier in allowed.parts]
    for optimizer, activations, weights in itertools.product(*tiers):
        yield Offload(optimizer=optimizer, activations=activations, weights=weights)
