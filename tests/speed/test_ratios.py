"""Nothing has become several times slower: CPU times over a baseline of the same run, with generous
bounds."""

from __future__ import annotations

import pytest

from benchmarks.ratios import RATIOS, Ratio

TRIES = 3
"""Other work can disturb one measurement; it does not make three of them several times worse."""


@pytest.mark.parametrize("ratio", RATIOS, ids=lambda ratio: ratio.name)
def test_it_is_no_several_times_slower(ratio: Ratio) -> None:
    found = []
    for _ in range(TRIES):
        found.append(ratio.measure())
        if ratio.holds(found[-1]):
            return
    pytest.fail(
        f"{ratio.name}: {', '.join(f'{value:.3g}' for value in found)}, expected {ratio.bound:g}"
    )
