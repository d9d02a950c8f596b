"""Determine the kind of a host's devices: as the user states it, or from a scheduler's name for
their type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from argosy.cluster.catalogue import catalogue, device_kind
from argosy.errors import Mismatch, bad_input, refused

# A slice of a card (MIG) is called a100_3g.40gb: three sevenths of its processors.
_SLICE = r"(?:^|[_-])[0-9]g\.[0-9]+gb"


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """A set of kinds that ``--kind`` gives: one for all devices, or one for a type or for the hosts
    of a pattern."""

    everywhere: str | None = None
    by_name: tuple[tuple[str, str], ...] = ()
    """Pairs of type or pattern of hosts, and kind."""

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Kinds:
        """Return the kinds of texts: ``A100-80GB`` for all, ``a100=A100-80GB`` for a type,
        ``gpu0*=A100-80GB`` for hosts."""
        everywhere = [text for text in texts if "=" not in text]
        if len(everywhere) > 1:
            expected = (
                "one kind for all devices, and NAME=KIND for a type or the hosts of a pattern"
            )
            raise bad_input(expected, " and ".join(everywhere[:2]), "--kind")
        named = [text.partition("=") for text in texts if "=" in text]
        by_name = tuple((name.strip(), kind.strip()) for name, _, kind in named)
        for kind in (*everywhere, *(kind for _, kind in by_name)):
            _check_known(kind)
        return cls(everywhere=everywhere[0] if everywhere else None, by_name=by_name)

    def check_used(self, devices: Iterable[tuple[str, str]]) -> None:
        """Raise an ``InputError`` if a name is neither a type nor a host of the file, which has
        these (host, type) of devices."""
        pairs = list(devices)
        for name, kind in self.by_name:
            if not any(_is_called(name, host, card) for host, card in pairs):
                types = sorted({card for _, card in pairs if card})
                known = f"the file has {', '.join(types[:4])}" if types else "the file has no types"
                expected = f"TYPE=KIND or HOSTS=KIND with a type or hosts of the file; {known}"
                raise bad_input(expected, f"{name}={kind}", "--kind")

    def of(self, host: str, card: str = "") -> str:
        """Return the kind of the devices of a host; ``card`` is a scheduler's name for their type.

        A kind for all devices applies to a type that may mean it, or that the catalogue does not
        have.
        """
        for name, kind in self.by_name:
            if _is_called(name, host, card):
                return kind
        if re.search(_SLICE, card):
            expected = (
                f"whole cards, or --kind {card[:40]}=KIND with a kind that is as fast as a slice"
            )
            raise bad_input(expected, f"slices of cards, {card[:40]} on {host}", "--kind")
        choices = kinds_called(card)
        if self.everywhere is not None and (not choices or self.everywhere in choices):
            return self.everywhere
        if len(choices) == 1:
            return choices[0]
        if not card:
            missing = "the file does not contain the kind of the devices"
            raise refused(f"--kind is needed, such as --kind A100-80GB: {missing}")
        known = f"; {card} may be {', '.join(choices[:4])}" if choices else ""
        example = choices[0] if choices else "A100-80GB"
        expected = f"--kind {card}={example}, or another kind of the catalogue{known}"
        raise bad_input(expected, f"{card} on {host}", "--kind")


def _is_called(name: str, host: str, card: str) -> bool:
    """Return whether a name of ``--kind`` means the devices of this type on this host."""
    return name.lower() == card.lower() or fnmatchcase(host, name)


def _check_known(kind: str) -> None:
    try:
        device_kind(kind)
    except Mismatch as error:
        raise bad_input(error.expected, kind, "--kind", suggestion=error.suggestion) from None


@lru_cache(maxsize=1024)
def kinds_called(name: str) -> tuple[str, ...]:
    """Return the kinds of the catalogue that a name may mean.

    If all words of some kinds are in the name, as drivers write them, the one with most words is
    returned; else all kinds whose words contain those of the name.

    >>> kinds_called("nvidia_a100-sxm4-80gb"), kinds_called("t4"), kinds_called("a100")[:2]
    (('A100-80GB',), ('T4',), ('A100-40GB', 'A100-80GB'))
    """
    words = words_of(name)
    names = [kind.name for kind in catalogue()]
    within = [kind for kind in names if words_of(kind) <= words]
    if within:
        return (max(within, key=lambda kind: (len(words_of(kind)), kind)),)
    return tuple(kind for kind in names if words and words <= words_of(kind))


def words_of(name: str) -> set[str]:
    """Return the lower-case runs of letters and digits without the maker's words.

    >>> sorted(words_of("nvidia_geforce_rtx2080_ti")), sorted(words_of("RTX-2080Ti"))
    (['2080ti', 'rtx'], ['2080ti', 'rtx'])
    """
    text = re.sub("geforce|nvidia|tesla", " ", name.lower())
    text = re.sub("[ _-]ti(?![a-z0-9])", "ti", text)
    return set(re.findall("[a-z0-9]+", re.sub("rtx(?=[0-9])", "rtx ", text)))
