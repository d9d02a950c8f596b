"""What a timeline adds up to."""

from __future__ import annotations

import pytest

from argosy.timeline import Timeline


@pytest.mark.parametrize(
    ("clock", "ends", "seconds"),
    [
        ("measured", (5.0, 6.0), 1.0),
        ("measured", (5.0,), 5.0),
        ("measured", (5.0, 6.0, 8.0), 1.5),
        ("simulated", (5.0, 6.0), 3.0),
        ("simulated", (), None),
    ],
)
def test_a_usual_iteration_is_none_that_prepares_others(
    clock: str, ends: tuple[float, ...], seconds: float | None
) -> None:
    timeline = Timeline(clock=clock, devices=("a0.0",), spans=(), iteration_ends=ends, busy=(0.0,))
    assert timeline.usual_seconds == seconds
