"""Modules whose operations depend on data are captured as one operation, with the work of the
tokens that they send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime.own_programs import BATCH, TIME, WIDTH
from runtime.routed_programs import (
    CHOICES,
    EXPERTS,
    Hit,
    Language,
    Limited,
    Routed,
    Sorted,
    experts_by_a_threshold,
    experts_in_a_list,
    experts_of_sorted_tokens,
    experts_that_are_hit,
    experts_that_are_the_model,
    experts_with_dropout,
)
from torch import Tensor, nn

from argosy.errors import InputError
from argosy.runtime.sources.operations import capture_program
from argosy.workload.capture.trace import capture
from argosy.workload.graph import MODULE, MODULE_BACKWARD


def expert_flop(module: nn.Module) -> int:
    """FLOP of one token in one expert."""
    return sum(2 * p.numel() for p in module.experts[0].parameters() if p.dim() == 2)  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("build", "gates"),
    [
        (experts_in_a_list, 1),
        pytest.param(experts_that_are_hit, 2, marks=pytest.mark.exhaustive),
        pytest.param(experts_of_sorted_tokens, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_mixture_is_one_operation_with_the_work_of_its_choices(build: Any, gates: int) -> None:
    graph = capture(build)
    calls = [node for node in graph.nodes if node.op == MODULE]
    backwards = [node for node in graph.nodes if node.op == MODULE_BACKWARD]
    assert [node.module for node in calls] == ["routed.0", "routed.1"]
    per_token = CHOICES * expert_flop(Routed()) + gates * 2 * WIDTH * EXPERTS
    for node in calls:
        assert node.arguments[3][0] == BATCH * TIME * per_token  # type: ignore[index]
        first = node.outputs[0]
        assert first is not None
        assert graph.values[first].shape == (BATCH, TIME, WIDTH)
    assert [node.arguments[2][0] for node in backwards] == [  # type: ignore[index]
        2 * BATCH * TIME * per_token
    ] * 2


def test_what_it_keeps_is_what_torch_keeps() -> None:
    program = capture_program(experts_in_a_list)
    graph = program.graph
    call = next(node for node in graph.nodes if node.op == MODULE)
    stands = call.outputs[-1]
    assert stands is not None
    module, x = Routed(), torch.randn(BATCH, TIME, WIDTH, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x)
    for tensor in (*module.parameters(), x):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert graph.values[stands].num_bytes == pytest.approx(sum(kept.values()), rel=0.1)


@pytest.mark.exhaustive
def test_a_limit_on_the_tokens_of_the_batch_mixes_samples() -> None:
    def build(kind: Any) -> Any:
        model = Language(kind)
        return model, lambda m, x: m(x).square().mean(), torch.randint(3, (BATCH, TIME))

    assert capture_program(lambda: build(Hit)).mixes is None
    assert capture_program(lambda: build(Sorted)).mixes is None
    mixes = capture_program(lambda: build(Limited)).mixes
    assert mixes is not None
    assert "argosy.module.default in routed.0, which combines samples" in mixes


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (experts_by_a_threshold, r"\(routed.0 reads a number that does not follow from top k"),
        (experts_with_dropout, r"\(routed.0 draws random numbers\)"),
        (experts_that_are_the_model, "in a module inside the model"),
    ],
)
def test_what_cannot_be_one_operation_is_refused(build: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as error:
        capture(build)
    assert "choose by top k, argmax or a sort" in str(error.value)
    assert "\n" not in str(error.value)
