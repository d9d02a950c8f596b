"""Choose which weights of a model are trained, and in which format the others are kept.

full        all weights, or all but those of the layers that a ``--freeze`` pattern names
lora        the model's own weights are frozen; beside a matrix (out x in) there are two trained
            ones, (rank x in) and (out x rank), whose product is added to it
int8, nf4   formats of frozen matrices in blocks, as in bitsandbytes: int8 with a 4-byte scale
            per row; NF4 with 4 bits and, with double quantisation, 8 bits per 64 weights and 32
            per 16,384
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from argosy.errors import bad_input, closest, excluded, refused

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""Matrices of a block that can have adapters: projections of attention and of the feed-forward."""
# Largest rank of adapters.
_MOST_RANK = 65_536


class Train(StrEnum):
    """A choice of what is trained."""

    FULL = "full"
    LORA = "lora"


class BaseFormat(StrEnum):
    """A format in which frozen matrices of blocks are kept, if not in the model's dtype."""

    INT8 = "int8"
    NF4 = "nf4"

    def matrix_bytes(self, rows: int, columns: int) -> float:
        """Return the bytes of a matrix with its scales.

        >>> 8 * BaseFormat.NF4.matrix_bytes(4096, 4096) / 4096**2
        4.126953125
        """
        weights = float(rows * columns)
        if self is BaseFormat.INT8:
            return weights + 4.0 * rows
        return weights * (4 + 8 / 64 + 32 / (64 * 256)) / 8


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A choice of the weights that are trained; the default trains all of them."""

    train: Train = Train.FULL
    rank: int = 16
    """Rank of the adapters, with ``lora``."""
    targets: tuple[str, ...] = ("q", "v")
    """Matrices that have adapters, with ``lora``."""
    freeze: tuple[str, ...] = ()
    """Patterns of names of layers that are not trained at all, such as ``block.[0-7]``."""
    base: BaseFormat | None = None
    """Format of frozen matrices in blocks; None: the model's dtype."""

    @property
    def is_full(self) -> bool:
        """Return whether every weight is trained."""
        return self.train is Train.FULL and not self.freeze

    @property
    def options(self) -> str:
        """Return the command-line options that request it: ``--train lora --lora
        rank=16,targets=q,v``."""
        parts = []
        if self.train is Train.LORA:
            parts.append(f"--train lora --lora rank={self.rank},targets={','.join(self.targets)}")
        parts += [f"--freeze '{pattern}'" for pattern in self.freeze]
        if self.base is not None:
            parts.append(f"--base-weights {self.base}")
        return " ".join(parts)

    def __str__(self) -> str:
        parts = (
            [f"LoRA of rank {self.rank} on {', '.join(self.targets)}"]
            if self.train is Train.LORA
            else []
        )
        parts += [f"{', '.join(self.freeze)} frozen"] if self.freeze else []
        parts += [f"base weights in {self.base}"] if self.base is not None else []
        return ", ".join(parts)


# The tuning that trains all weights.
FULL = Tuning()


def parse_tuning(
    *,
    train: str | None = None,
    lora: str | None = None,
    freeze: Iterable[str] = (),
    base: str | None = None,
) -> Tuning:
    """Return the tuning that options name; ``--lora`` alone requests LoRA.

    >>> parse_tuning(lora="rank=8,targets=q,k,v,o").targets
    ('q', 'k', 'v', 'o')
    """
    chosen = Train.LORA if train is None and lora is not None else Train.FULL
    if train is not None:
        chosen = Train(_known("--train", train, [str(choice) for choice in Train]))
    if lora is not None and chosen is not Train.LORA:
        raise excluded("--lora", f"--train {chosen}")
    settings = _lora_settings(lora or "")
    rank, targets = _rank(settings.get("rank")), _targets(settings.get("targets"))
    patterns = tuple(freeze)
    if any(not pattern for pattern in patterns):
        raise bad_input("a pattern of layer names such as block.[0-7]", "", "--freeze")
    packed = (
        None
        if base is None
        else BaseFormat(_known("--base-weights", base, [str(choice) for choice in BaseFormat]))
    )
    if packed is not None and chosen is Train.FULL and not patterns:
        needed = "--train lora or --freeze, because trained weights keep their format"
        raise refused(f"--base-weights needs {needed}")
    return Tuning(train=chosen, rank=rank, targets=targets, freeze=patterns, base=packed)


def _lora_settings(text: str) -> Mapping[str, str]:
    """Return ``rank=16,targets=q,v`` as a mapping; a part without ``=`` belongs to the setting
    before it."""
    settings: dict[str, str] = {}
    last = ""
    for part in text.split(",") if text else ():
        name, separator, value = part.partition("=")
        if separator and name in settings:
            raise bad_input(f"one {name}", text, "--lora")
        if separator and name in ("rank", "targets"):
            settings[name], last = value, name
        elif separator or last != "targets":
            raise bad_input("rank=R,targets=q,v,...", text, "--lora")
        else:
            settings[last] += f",{part}"
    return settings


def _rank(text: str | None) -> int:
    if text is None:
        return FULL.rank
    if not text.isdecimal() or not 1 <= int(text[:9]) <= _MOST_RANK or len(text) > 9:
        raise bad_input(f"a whole number from 1 to {_MOST_RANK}", text, "--lora rank")
    return int(text)


def _targets(text: str | None) -> tuple[str, ...]:
    if text is None:
        return FULL.targets
    names = text.split(",")
    for name in names:
        _known("--lora targets", name, [*TARGETS, "all"])
    return tuple(name for name in TARGETS if name in names or "all" in names)


def _known(where: str, value: str, names: list[str]) -> str:
    if value not in names:
        raise bad_input(
            f"one of {', '.join(names)}", value, where, suggestion=closest(value, names)
        )
    return value
