"""In what order ranks begin collectives, if gradient sums begin during the last backward."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from runtime.training_cases import Case, Outcome, train_with_early_sums

from argosy.runtime.weights import overlap
from argosy.runtime.weights.summing import RingSum

ORDERED = (
    "all_reduce", "all_to_all", "all_to_all_single", "all_gather", "broadcast", "reduce",
    "batch_isend_irecv",
)  # fmt: skip
"""What NCCL runs one after another on a group."""


def order_of_early_sums(case: Case) -> tuple[Outcome, dict[str, list[str]]]:
    """The outcome of training with a bucket for each weight, and by group what this rank began on
    it, in order."""
    begun: dict[str, list[str]] = defaultdict(list)
    begin_each = RingSum.begin_each

    def recorded(name: str, call: Any) -> Any:
        def begin(*arguments: Any, **keywords: Any) -> Any:
            group = arguments[0][0].group if name == "batch_isend_irecv" else keywords.get("group")
            begun[_name(group)].append(name)
            return call(*arguments, **keywords)

        return begin

    def begin(way: RingSum, tensors: Any) -> Any:
        begun[_name(way.group)].append(f"sum of {[tuple(tensor.shape) for tensor in tensors]}")
        return begin_each(way, tensors)

    with contextlib.ExitStack() as patches:
        for name in ORDERED:
            call = recorded(name, getattr(dist, name))
            patches.enter_context(mock.patch.object(dist, name, call))
        patches.enter_context(mock.patch.object(RingSum, "begin_each", begin))
        patches.enter_context(mock.patch.object(overlap, "BUCKET_BYTES", 1))
        return train_with_early_sums(case), dict(begun)


def complex_sum(rank_values: tuple[complex, ...]) -> complex:
    """A sum in place of a number of each rank."""
    numbers = torch.tensor([rank_values[dist.get_rank()]], dtype=torch.complex64)
    RingSum(None).begin_each([numbers, torch.ones(2, dtype=torch.complex64)]).wait()
    return complex(numbers)


def _name(group: Any) -> str:
    return str((group or dist.group.WORLD).group_name)
