"""Hypothesis strategies for the vocabulary of Argosy, shared by all tests."""

from __future__ import annotations

from hypothesis import strategies as st

from argosy.cluster.trace import Trace


@st.composite
def traces(draw: st.DrawFn, *, max_steps: int = 8, may_end_at_zero: bool = True) -> Trace:
    """Step functions of up to ``max_steps`` knots, with segments at 0 among them.

    Knots are multiples of 1/8 s and values are 0 or from 1/16 to 1000, so that sums stay well conditioned.
    """
    values = st.one_of(st.just(0.0), st.floats(1 / 16, 1000))
    gaps = draw(st.lists(st.integers(1, 800), max_size=max_steps - 1))
    times, held = [0.0], [draw(values)]
    for gap in gaps:
        times.append(times[-1] + gap / 8)
        held.append(draw(values))
    if held[-1] == 0 and not may_end_at_zero:
        held[-1] = 1.0
    return Trace(tuple(times), tuple(held))
