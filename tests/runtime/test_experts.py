"""Stages whose replicas share out experts train as one process does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from runtime.llama_models import EXPERTS, Experts, MixtureBlock
from runtime.rank_pool import RankPool
from runtime.test_context import source_of
from runtime.training_cases import Case, differences, plan_of, train_in_parallel
from torch import nn

from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.plan.plan import Recompute
from argosy.runtime.processes.ranks import ExpertSeat
from argosy.runtime.sources.expert_sharing import ExpertSharing
from argosy.runtime.sources.recipe import Recipe
from argosy.runtime.sources.source import LayerSource
from argosy.runtime.stages.experts import ExpertModules, expert_modules, experts_at
from argosy.runtime.stages.parameters import Catalogue
from argosy.schedule import ScheduleKind
from argosy.workload.capture.trace import capture

EVEN, UNEVEN, THREE = (3, 3), (5, 1), (3, 1, 2)
ALONE, HALF, WIDER = (1.0,), (0.5, 0.5), (0.7, 0.3)
GRID = (0.42, 0.18, 0.28, 0.12)
"""Two parts of two devices; one part is larger, and one device of each."""


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


GROUPS = [
    case(shares=((2, 2),), ratios=(HALF,), experts=EVEN, zero=3, clip=True),
    case(
        shares=((3,), (1, 2)), ratios=(WIDER, ALONE), experts=UNEVEN, kind=ScheduleKind.ZERO_BUBBLE
    ),
]
"""Groups that share experts with others, and a group beside stages that share them."""
MORE_GROUPS = [
    case(shares=((3,), (1, 2), (3,)), ratios=(WIDER, ALONE, ALONE), experts=UNEVEN),
    case(shares=((3,), (1, 2)), ratios=(HALF, ALONE), zero=1),
    case(shares=((4,),), ratios=(WIDER,), experts=()),
    case(shares=((4,),), ratios=((0.5, 0.3, 0.2),), experts=(), zero=2, clip=True),
    case(shares=((2, 2),), ratios=(WIDER,), recompute=Recompute.FULL, zero=1),
    case(shares=((2, 2),), ratios=(WIDER,), recompute=Recompute.SELECTIVE, zero=2),
    case(shares=((2, 2), (4,)), ratios=(HALF, ALONE), kind=ScheduleKind.KFKB, k=2),
    case(shares=((4,), (2, 2)), ratios=(ALONE, HALF), kind=ScheduleKind.GPIPE, zero=1),
    case(shares=((2, 1),), ratios=(HALF,), experts=(4, 2)),
    case(shares=((2, 2),), ratios=(HALF,), tied=True, zero=3),
    case(
        shares=((3,), (1, 2)) * 2,
        ratios=(WIDER, ALONE, HALF, ALONE),
        experts=UNEVEN,
        kind=ScheduleKind.INTERLEAVED,
        num_micro_batches=4,
    ),
    case(
        shares=((3,), (1, 2), (1, 2), (3,)),
        ratios=(WIDER, ALONE, ALONE, HALF),
        kind=ScheduleKind.DUALPIPE_V,
        num_micro_batches=4,
        zero=1,
    ),
    case(model="hf-mixtral", shares=((2, 2),), ratios=(WIDER,), single=True),
    case(model="hf-mixtral", shares=((3,), (1, 2)), ratios=(HALF, ALONE), single=True, zero=2),
]
PARTS = [case(shares=((2,),), ratios=(WIDER,), context=True, experts=UNEVEN, zero=1, clip=True)]
"""Parts of a sequence that share experts."""
MORE_PARTS = [
    case(shares=((2, 1), (3,)), ratios=(HALF, ALONE), context=True, experts=(2, 1, 1, 2), zero=3),
    case(shares=((2,),), ratios=(GRID,), context=True, members=2, zero=2),
    case(shares=((2,),), ratios=(GRID,), context=True, members=2, recompute=Recompute.FULL),
    case(shares=((2,), (2,)), ratios=(GRID, ALONE), context=True, members=2, zero=1),
    case(
        shares=((3,), (3,)),
        ratios=(ALONE, (0.25,) * 4),
        context=True,
        members=2,
        kind=ScheduleKind.ZERO_BUBBLE,
    ),
    case(shares=((2, 2),), ratios=(HALF,), context=True, recompute=Recompute.FULL),
    case(shares=((3,), (1, 2)), ratios=(HALF, ALONE), context=True, experts=UNEVEN),
    case(
        shares=((3,), (3,)),
        ratios=(WIDER, HALF),
        context=True,
        kind=ScheduleKind.ZERO_BUBBLE,
        recompute=Recompute.SELECTIVE,
    ),
    case(model="hf-mixtral", shares=((2,),), ratios=(WIDER,), context=True, single=True),
    case(
        model="hf-mixtral",
        shares=((2,),),
        ratios=(HALF,),
        context=True,
        single=True,
        dtype=Dtype.BF16,
    ),
]


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *GROUPS,
        *PARTS,
        *(
            pytest.param(c, marks=pytest.mark.exhaustive)
            for c in (*MORE, *MORE_GROUPS, *MORE_PARTS)
        ),
    ],
    ids=str,
)
def test_experts_train_as_in_one_process(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


@pytest.mark.parametrize(
    "ratios",
    [(2 / 3, 1 / 3), pytest.param((1 / 2, 1 / 3, 1 / 6), marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_a_group_divides_experts_that_a_captured_program_multiplies_by(
    ranks: RankPool, ratios: tuple[float, ...]
) -> None:
    """Such a program has no all-to-all: a sum adds up what the experts of every device return."""
    own = Case(model="dense-mixture", num_micro_batches=2, shares=((2,),), ratios=(ratios,))
    assert not differences(own, ranks(len(ratios), train_in_parallel, own))
    source = source_of(own)
    held = next(source.held(w) for w in source.weights if w.name == "2.experts.up")
    experts = [boxes[0].sizes[0] for boxes in held.values()]
    assert experts == [round(ratio * EXPERTS) for ratio in ratios]


def test_experts_are_found_by_what_they_hold_and_are_called_with() -> None:
    block = MixtureBlock()
    other = nn.Linear(3, EXPERTS)
    other.num_experts = EXPERTS  # type: ignore[assignment]
    assert list(expert_modules([block, block, nn.Sequential(other)])) == [block.experts]
    assert isinstance(block.experts, Experts)


def test_members_in_another_order_have_their_own_experts() -> None:
    seats = [ExpertSeat(place=place, member=0, ratios=(1.0,)) for place in (1, 0)]
    held = [list(experts_at(6, (4 / 6, 2 / 6), seat)) for seat in seats]
    assert held == [[4, 5], [0, 1, 2, 3]]


def test_the_members_of_a_group_divide_the_experts_of_their_holder() -> None:
    seats = [
        ExpertSeat(place=place, member=member, ratios=(0.7, 0.3))
        for place in (0, 1)
        for member in (0, 1)
    ]
    held = [list(experts_at(8, (0.5, 0.5), seat)) for seat in seats]
    assert held == [[0, 1, 2], [3], [4, 5, 6], [7]]


def test_parts_and_members_hold_experts_of_their_own() -> None:
    """Four holders of two replicas, and two holders of two devices."""
    parts = source_of(MORE_PARTS[0])
    weight = next(w for w in parts.weights if w.name == "2.experts.up")
    held = {rank: box.region[0] for rank, (box,) in parts.held(weight).items()}
    assert held == {0: (0, 2), 1: (2, 3), 2: (3, 4), 3: (4, 6)}
    grid = source_of(MORE_PARTS[1])
    weight = next(w for w in grid.weights if w.name == "3.experts.down")
    held = {rank: box.region[0] for rank, (box,) in grid.held(weight).items()}
    assert held == {0: (0, 2), 1: (2, 3), 2: (3, 5), 3: (5, 6)}


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (case(shares=((1, 1),), ratios=((0.25,) * 4,)), "found 3 experts of 6 on a holder"),
        (case(shares=((1, 1),), ratios=((HALF, ALONE),)), "found several widths, expected tensor-"),
    ],
    ids=("fewer than devices", "other widths"),
)
def test_holders_that_cannot_share_experts_are_refused(refused: Case, sentence: str) -> None:
    with pytest.raises(InputError, match=rf"stages\[0\].*: {sentence}"):
        source_of(refused)


def test_experts_of_which_holders_have_only_some_are_refused() -> None:
    plan = plan_of(case(shares=((1, 1),)))
    plan = replace(plan, stages=(replace(plan.stages[0], expert=3),))
    layers = nn.ModuleList([nn.Linear(2, 2), *(MixtureBlock() for _ in range(4))])
    with pytest.raises(InputError, match=r"expert: found 3, expected a divisor of 2 holders"):
        ExpertSharing(plan, ("n0.0", "n0.1"), ExpertModules(layers), {0: [layers[1].experts]})


def test_dropout_in_experts_is_refused_in_a_capture() -> None:
    def build() -> Any:
        block = MixtureBlock()
        block.experts.dropout = nn.Dropout(0.1)
        width = next(block.parameters()).shape[-1]
        return block, lambda model, x: model(x).square().mean(), torch.randn(2, 3, width)

    with pytest.raises(InputError, match="Experts: found dropout in experts"):
        capture(build)


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
