"""What a stage may hand on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from argosy.errors import InputError
from argosy.runtime.stages.carry import describe, loads_form
from argosy.runtime.step.executor import Executor


class Pair(NamedTuple):
    one: Any
    other: Any


def test_a_form_travels_as_it_is() -> None:
    carry = {
        "hidden": [torch.zeros(2, 3, requires_grad=True), (torch.zeros(2, dtype=torch.int64), [])],
        "settings": {3: None, 4: True, 5: 1.5, 6: "x"},
    }
    form, tensors = describe(carry, 2, where="stage 0")
    found = loads_form(form.dumps(where="stage 0"))
    assert found == form
    assert [leaf.has_gradient for leaf in found.tensors] == [True, False]
    again = found.assemble(tensors)
    assert again["hidden"][0] is tensors[0]
    assert again["settings"] == carry["settings"]


@pytest.mark.parametrize("part", [{1, 2}, {(1, 2): 3}, Pair(1, 2), torch.float32], ids=str)
def test_what_no_other_process_could_read_is_not_handed_on(part: Any) -> None:
    form, _ = describe((torch.zeros(2), part), 2, where="stage 1")
    kind = type(part).__name__
    with pytest.raises(
        InputError,
        match=rf"stage 1: found {kind} in the output, expected tensors, tuples",
    ):
        form.dumps(where="stage 1")


@pytest.mark.parametrize(
    "other",
    [
        {"hidden": torch.zeros(2, 4)},
        {"other": torch.zeros(2, 3)},
        {"hidden": torch.zeros(2, 3), "flag": 1},
    ],
)
def test_every_micro_batch_hands_on_the_same(other: Any) -> None:
    """Also under the same names: whoever receives tensors takes them for what came first."""
    form, _ = describe({"hidden": torch.zeros(2, 3)}, 2, where="stage 1")
    stage: Any = SimpleNamespace(
        seat=SimpleNamespace(stage=1, samples=2), output_form=form, handed={}
    )
    executor = Executor.__new__(Executor)
    assert Executor._handed_on(executor, stage, 0, {"hidden": torch.ones(2, 3)}) == []
    with pytest.raises(
        InputError, match=r"stage 1: found a hand-over whose names, shapes.*for every micro-batch"
    ):
        Executor._handed_on(executor, stage, 1, other)


@pytest.mark.parametrize(
    ("carry", "says"),
    [
        ([torch.zeros(2)] * 65, "stage 1: found 65 tensors handed on, expected at most 64"),
        (
            {"hidden": torch.zeros(3)},
            r"stage 1: found a tensor of shape \(3,\) in the output",
        ),
    ],
)
def test_what_cannot_travel_is_named(carry: Any, says: str) -> None:
    stage: Any = SimpleNamespace(seat=SimpleNamespace(stage=1, samples=2), output_form=None)
    with pytest.raises(InputError, match=says):
        Executor._handed_on(Executor.__new__(Executor), stage, 0, carry)
