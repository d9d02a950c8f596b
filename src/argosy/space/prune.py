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

from argosy.cost.taken import num_exchanges
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
    """Drop options that another one dominates (the rule *dominance*).

    Of options with the same parts and recomputation, which differ in ZeRO only, one is dropped if
    another is no worse in gradient exchange with update, in network load, in the number of
    exchanges that take multiprocessors from layers, and in memory, both held and temporary.

    Safe because these are the only numbers in which they differ, and times, memory and bounds of
    every plan grow with each of them: a stage updates its weights as soon as it has exchanged their
    gradients. Exchange and update of W weights take r W + l seconds, and no stage has fewer than
    the lightest layer. Of equals, the first stays.
    """
    kept: list[tuple[Option, tuple[float, ...]]] = []
    for option in options:
        rates = tuple(map(sum, zip(option.exchange, option.update, strict=True)))
        lightest = sum(
            rate * held for rate, held in zip(rates, option.prices.lightest, strict=True)
        )
        exchanges = num_exchanges(option.zero)
        figures = (*rates[:-1], lightest, *option.load, *exchanges, *option.state, option.whole)
        if any(all(a <= b for a, b in zip(better, figures, strict=True)) for _, better in kept):
            counters.add("dominance")
        else:
            kept.append((option, figures))
    return [option for option, _ in kept]
