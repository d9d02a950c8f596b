"""Stages whose replicas share out experts train as one process does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runtime.llama_models import EXPERTS, Experts, MixtureBlock
from runtime.rank_pool import RankPool
from runtime.training_cases import Case, differences, plan_of, train_in_parallel
from torch import nn

from argosy.errors import InputError
from argosy.plan.plan import Recompute
from argosy.runtime.communication.marks import untold
from argosy.runtime.sources.operations import _refuse_experts
from argosy.runtime.sources.recipe import Recipe
from argosy.runtime.sources.source import LayerSource
from argosy.runtime.stages.experts import ExpertGroup, expert_modules
from argosy.runtime.stages.parameters import Catalogue
from argosy.schedule import ScheduleKind

EVEN, UNEVEN, THREE = (3, 3), (5, 1), (3, 1, 2)


def case(**changes: object) -> Case:
    return Case(**{"model": "mixture", "num_micro_batches": 3, "experts": EVEN, **changes})  # type: ignore[arg-type]


CASES = [
    case(shares=((1, 2), (2, 1)), experts=UNEVEN, kind=ScheduleKind.ZERO_BUBBLE, clip=True),
    case(shares=((1, 2, 1, 1),), zero=3),
    case(shares=((1, 1, 2),), experts=THREE, zero=1, clip=True),
]
MORE = [
    case(shares=((2, 2),)),
    case(shares=((1, 1, 2),), experts=THREE, zero=2),
    case(shares=((1, 1, 2),), experts=THREE, zero=3, clip=True),
    case(shares=((1, 1, 2),), experts=(2, 2, 2), recompute=Recompute.FULL),
    case(shares=((1, 1, 1, 2),), experts=(2, 1, 1, 2), recompute=Recompute.SELECTIVE),
    case(shares=((2, 1, 1, 1),), experts=UNEVEN, zero=2, clip=True),
    case(shares=((2, 1, 1, 1),), zero=1, tied=True),
    case(shares=((1, 2), (2, 1)), kind=ScheduleKind.GPIPE, zero=1),
    case(
        shares=((1, 2), (2, 1)),
        kind=ScheduleKind.KFKB,
        k=2,
        experts=UNEVEN,
        recompute=Recompute.FULL,
    ),
    case(shares=((1, 2),) * 4, kind=ScheduleKind.INTERLEAVED, num_micro_batches=4, experts=UNEVEN),
    case(shares=((1, 2),) * 4, kind=ScheduleKind.ZERO_BUBBLE_V, num_micro_batches=4),
    case(shares=((1, 2),) * 4, kind=ScheduleKind.DUALPIPE_V, num_micro_batches=4, experts=UNEVEN),
    case(model="hf-mixtral", shares=((2, 1),), experts=UNEVEN, single=True),
    case(
        model="hf-mixtral",
        shares=((2, 1), (1, 2)),
        experts=EVEN,
        single=True,
        recompute=Recompute.FULL,
    ),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(more, marks=pytest.mark.exhaustive) for more in MORE)], ids=str
)
def test_experts_train_as_in_one_process(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


def test_experts_are_found_by_what_they_hold_and_are_called_with() -> None:
    block = MixtureBlock()
    other = nn.Linear(3, EXPERTS)
    other.num_experts = EXPERTS  # type: ignore[assignment]
    assert list(expert_modules([block, block, nn.Sequential(other)])) == [block.experts]
    assert isinstance(block.experts, Experts)


def test_members_in_another_order_have_their_own_experts() -> None:
    group = ExpertGroup(
        shares=(4 / 6, 2 / 6), places=(1, 0), member=0, group=None, exchanging=untold
    )
    assert group.numbers(6) == [[4, 5], [0, 1, 2, 3]]


def test_experts_in_captured_operations_are_refused() -> None:
    plan = plan_of(case(model="gpt", shares=((1, 1),)))
    with pytest.raises(
        InputError, match=r"stages\[0\]\.expert: found 2, expected 1 in stages of operations"
    ):
        _refuse_experts(plan)


def test_a_stage_without_experts_is_refused() -> None:
    layers = (nn.Linear(2, 2),)
    plan = plan_of(case(shares=((1, 1),)))
    plan = replace(plan, stages=(replace(plan.stages[0], end=1),))
    recipe = Recipe(
        model=layers[0], loss_fn=lambda *_: None, optimizer_factory=torch.optim.SGD, device=torch.device("cpu"),
        roster=("n0.0", "n0.1"),
    )  # fmt: skip
    with pytest.raises(
        InputError, match=r"stages\[0\]\.expert: found layers without experts, expected a module"
    ):
        LayerSource(recipe, Catalogue(layers[0], layers), layers, plan)
