"""The rules that remove what cannot be part of the best plan: one function each, with its safety argument, and a
counter.

Three more rules are where the search does them: *divisibility* (a stage needs a sample for each replica), *symmetry*
(devices of a pool are interchangeable, so a stage is a number of devices and not a set) and *bound*
(``solve.pipeline``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from argosy.space.option import Option


class Counters:
    """How many candidates each rule removed."""

    def __init__(self) -> None:
        self.removed: Counter[str] = Counter(divisibility=0, memory=0, dominance=0, bound=0)

    def add(self, rule: str, count: int = 1) -> None:
        self.removed[rule] += count


def fits_nowhere(option: Option) -> bool:
    """*memory*: safe because memory grows with every layer: if no single layer fits with one micro-batch in flight,
    no range does."""
    fixed, each = option.memory(1)
    return bool(np.diagonal(fixed + each, offset=1).min() > 1)


def without_dominated(options: Sequence[Option], counters: Counters) -> list[Option]:
    """*dominance*: drop an option if another on the same devices is no slower in every table and needs no more memory.

    Safe because the bound and the judged time of a plan never fall when an entry of these tables rises, so that the
    other option can take its place in any plan. Of equals, the first stays.
    """
    kept: list[tuple[Option, tuple[np.ndarray, ...]]] = []
    for option in sorted(options, key=lambda one: (float(one.slowest[0, -1]), one.zero)):
        tables = _tables(option)
        if any(all((a <= b + 1e-15).all() for a, b in zip(mine, tables, strict=True)) for _, mine in kept):
            counters.add("dominance")
        else:
            kept.append((option, tables))
    return [option for option, _ in kept]


def _tables(option: Option) -> tuple[np.ndarray, ...]:
    """Everything that a smaller value of makes a plan better or no worse."""
    fixed, each = option.memory(1)
    weights = option.prices.parameters[None, :] - option.prices.parameters[:, None]
    upper = np.triu_indices(len(weights), 1)
    times = (option.forward, option.backward, option.least[0], option.least[1])
    steps = tuple(np.diff(sums).max(axis=0) for sums in times[:2]) + tuple(
        np.diff(sums).min(axis=0) for sums in times[2:]
    )
    return (*steps, option.slowest[upper], fixed[upper], each[upper], option.tail(weights)[upper], np.array(option.hop))
