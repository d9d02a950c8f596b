"""The text form of actions and schedules parses back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import schedules

from argosy.errors import Mismatch
from argosy.schedule import Action, ActionKind, Schedule, with_communication
from argosy.schedule.action import parse_rows

actions = st.builds(
    Action, st.integers(0, 10**6), st.sampled_from(ActionKind), st.integers(0, 10**6)
)


@given(actions)
def test_an_action_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(schedules(), st.integers(0, 3))
def test_a_schedule_parses_back(schedule: Schedule, lookahead: int) -> None:
    assert parse_rows(schedule.text()) == schedule.rows
    communicating = with_communication(schedule, lookahead=lookahead)
    assert parse_rows(communicating.text()) == communicating.rows


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 ", "2 F 0", "2FB0", "1.5F0"]
)
def test_what_is_no_action_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(Mismatch) as caught:
        Action.parse(text)
    expected = (
        'expected an action such as "2F0": stage, one of F, B, I, W, SF, RF, SB, RB, micro-batch'
    )
    assert str(caught.value) == f'found "{text}", {expected}'
