"""Remove candidates that cannot be part of the best plan: one function per rule, with its safety
argument and a counter.

Other rules are applied elsewhere: *divisibility* (a stage needs a sample for each replica) and
*unmeasured* (a profile has no times for a candidate) in ``space.enumerate``, *symmetry* (devices of
a pool are interchangeable, so a stage is a number of devices and not a set) in ``space.pool``, and
*bound* in ``planner``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from argosy.space.option import Option


class Counters:
    """A count of the candidates that each rule removed."""

    def __init__(self) -> None:
        self.removed: Counter[str] = Counter(
            divisibility=0, unmeasured=0, memory=0, dominance=0, bound=0
        )

    def add(self, rule: str, count: int = 1) -> None:
        self.removed[rule] += count


def fits_nowhere(option: Option) -> bool:
    """Return whether no layer fits with one micro-batch in flight (rule *memory*).

    This is safe because memory grows with every layer: if no single layer fits, no range of layers
    does.
    """
    return not any(option.fits(layer, layer + 1, 1, 1) for layer in option.prices.distinct_layers)


def without_dominated(options: Sequence[Option], counters: Counters) -> list[Option]:
    """Drop options that another one dominates (rule *dominance*).

    All ``options`` have the same parts and recomputation and differ in ZeRO only. One is dropped if
    another is no worse in gradient exchange, network load and memory, both lasting and transient.

    This is safe because these are the only numbers in which they differ, and times, memory and
    bounds of every plan grow with each of them. The first of several equal options stays.
    """
    kept: list[tuple[Option, tuple[float, ...]]] = []
    for option in options:
        figures = (*option.exchange, *option.load, *option.state, *option.update, option.whole)
        if any(all(a <= b for a, b in zip(better, figures, strict=True)) for _, better in kept):
            counters.add("dominance")
        else:
            kept.append((option, figures))
    return [option for option, _ in kept]
