"""What a stage may hand on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from argosy.errors import InputError
from argosy.runtime.executor import Executor


@pytest.mark.parametrize(
    ("carry", "says"),
    [
        ([torch.zeros(2)] * 65, "stage 1: found 65 tensors handed on, expected at most 64"),
        ({"hidden": torch.zeros(3)}, r"stage 1: found a tensor of shape \(3,\) among what is handed on"),
    ],
)
def test_what_cannot_travel_is_named(carry: Any, says: str) -> None:
    stage: Any = SimpleNamespace(seat=SimpleNamespace(stage=1, samples=2), output_form=None)
    with pytest.raises(InputError, match=says):
        Executor._handed_on(Executor.__new__(Executor), stage, 0, carry)
