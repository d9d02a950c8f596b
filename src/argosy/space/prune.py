"""The rules that remove what cannot be part of the best plan: one function each, with its safety
argument, and a counter.

Others are where they are done: *divisibility* (a stage needs a sample for each replica) and
*unmeasured* (a profile has no times for it) in ``space.enumerate``, *symmetry* (devices of a pool
are interchangeable, so a stage is a number of devices and not a set) in ``space.pool``, and *bound*
in ``planner``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from argosy.space.option import Option


class Counters:
    """How many candidates each rule removed."""

    def __init__(self) -> None:
        self.removed: Counter[str] = Counter(
            divisibility=0, unmeasured=0, memory=0, dominance=0, bound=0
        )

    def add(self, rule: str, count: int = 1) -> None:
        self.removed[rule] += count


def fits_nowhere(option: Option) -> bool:
    """*memory*: safe because memory grows with every layer: if no single layer fits with one
    micro-batch in flight, no range of layers does."""
    return not any(option.fits(layer, layer + 1, 1, 1) for layer in option.prices.distinct_layers)


def without_dominated(options: Sequence[Option], counters: Counters) -> list[Option]:
    """*dominance*: of options with the same parts and recomputation, which differ in ZeRO only,
    drop one if another is no worse in gradient exchange, network load and memory, held and for a
    moment.

    Safe because these are the only numbers in which they differ, and times, memory and bounds of
    every plan grow with each of them. Of equals, the first stays.
    """
    kept: list[tuple[Option, tuple[float, ...]]] = []
    for option in options:
        mine = (*option.exchange, *option.load, *option.state, *option.update, option.whole)
        if any(all(a <= b for a, b in zip(other, mine, strict=True)) for _, other in kept):
            counters.add("dominance")
        else:
            kept.append((option, mine))
    return [option for option, _ in kept]
