"""A state machine of Hypothesis as a test of so many runs of so many steps."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine


def machine_test(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> type:
    """The same runs every time, however long they take."""
    case = type(f"{machine.__name__}{examples}", (machine,), {}).TestCase  # type: ignore[attr-defined]
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    assert isinstance(case, type)
    return case
