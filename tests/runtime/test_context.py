"""Stages whose replicas cut the sequence train as one process does."""

from __future__ import annotations

import pytest
import torch
from runtime.rank_pool import RankPool
from runtime.ring_cases import worst_errors
from runtime.training_cases import Case, built, differences, plan_of, train_in_parallel

from argosy.errors import InputError
from argosy.plan.plan import Recompute
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.sources.operations import Captured, GraphSource
from argosy.runtime.sources.recipe import Recipe
from argosy.runtime.stages.compiling import check_compilable
from argosy.runtime.stages.layers import find_layers
from argosy.runtime.stages.parameters import Catalogue
from argosy.schedule import ScheduleKind
from argosy.solve.programs.sequence import RING
from argosy.space.operations.sequence import SequenceParts
from argosy.workload.capture.forward import capture_forward

ALONE, EVEN, UNEVEN, THREE, FOUR = (1.0,), (0.5, 0.5), (0.7, 0.3), (0.5, 0.3, 0.2), (0.25,) * 4


def case(**changes: object) -> Case:
    return Case(**{"model": "llama", "num_micro_batches": 3, "context": True, **changes})  # type: ignore[arg-type]


CASES = [
    case(
        shares=((2,), (2,)), ratios=(UNEVEN, EVEN), kind=ScheduleKind.ZERO_BUBBLE, zero=2, clip=True
    ),
    case(
        shares=((2, 1), (3,)), ratios=(UNEVEN, ALONE), recompute=Recompute.FULL, tied=True, steps=1
    ),
]
MORE = [
    case(shares=((2,),), ratios=(EVEN,)),
    case(shares=((2,),), ratios=(THREE,), clip=True),
    case(shares=((2,),), ratios=(FOUR,)),
    case(shares=((2,),), ratios=((0.4, 0.3, 0.2, 0.1),), recompute=Recompute.SELECTIVE),
    case(shares=((2,), (2,)), ratios=(UNEVEN, UNEVEN), tied=True),
    case(
        shares=((2,), (2,)),
        ratios=(ALONE, THREE),
        kind=ScheduleKind.GPIPE,
        recompute=Recompute.FULL,
    ),
    case(shares=((2,), (2,)), ratios=(EVEN, EVEN), kind=ScheduleKind.KFKB, k=2, zero=1),
    case(shares=((2,), (2,)), ratios=(THREE, EVEN), zero=3),
    case(shares=((3, 1),), ratios=(UNEVEN,), zero=1),
    case(shares=((3, 1),), ratios=(UNEVEN,), zero=2, recompute=Recompute.SELECTIVE),
    case(shares=((3, 1),), ratios=(EVEN,), zero=3),
    case(
        shares=((2,),) * 4,
        ratios=(EVEN, UNEVEN) * 2,
        kind=ScheduleKind.INTERLEAVED,
        num_micro_batches=4,
    ),
    case(
        shares=((2,),) * 4,
        ratios=(EVEN, UNEVEN, UNEVEN, EVEN),
        kind=ScheduleKind.ZERO_BUBBLE_V,
        num_micro_batches=4,
    ),
    case(
        shares=((2,),) * 4, ratios=(UNEVEN,) * 4, kind=ScheduleKind.DUALPIPE_V, num_micro_batches=4
    ),
    case(model="gpt", shares=((2,), (2,)), ratios=(THREE, UNEVEN)),
    case(model="t5", shares=((2,), (2,)), ratios=(THREE, EVEN), kind=ScheduleKind.ZERO_BUBBLE),
    case(model="vit", shares=((3, 1),), ratios=(UNEVEN,), zero=1),
    case(model="hf-gpt2", shares=((2,), (2,)), ratios=(EVEN, UNEVEN), tied=True, single=True),
    case(model="hf-llama", shares=((2,), (2,)), ratios=(UNEVEN, ALONE), single=True),
    case(model="hf-vit", shares=((2,),), ratios=(UNEVEN,), single=True),
    case(model="gpt", work=(0.5, 0.5), shares=((2,), (2,)), ratios=(UNEVEN, EVEN)),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(more, marks=pytest.mark.exhaustive) for more in MORE)], ids=str
)
def test_parts_of_a_sequence_train_as_one_process(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


def test_attention_around_a_ring_is_that_of_the_whole_sequence(ranks: RankPool) -> None:
    assert max(max(errors) for errors in ranks(3, worst_errors)) < 1e-12


@pytest.mark.parametrize(
    ("length", "shares"), [(8, EVEN), (9, UNEVEN), (64, (0.4, 0.3, 0.2, 0.1)), (6, THREE)]
)
def test_parts_cover_a_sequence_and_share_causal_attention_as_their_tokens(
    length: int, shares: tuple[float, ...]
) -> None:
    parts = SequenceParts.by_shares(length, shares)
    assert sorted(parts.order) == list(range(length))
    for pieces, count in zip(parts.pieces, parts.counts, strict=True):
        attended = sum(token + 0.5 for begin, end in pieces for token in range(begin, end))
        assert attended == pytest.approx(count * length / 2, abs=length / 2 if length % 2 else 0)


def source_of(case: Case) -> GraphSource:
    model, loss_fn, batch = built(case)
    plan = plan_of(case)
    layers, device = find_layers(model), torch.device("cpu")
    recipe = Recipe(
        model=model,
        loss_fn=loss_fn,
        optimizer_factory=torch.optim.SGD,
        device=device,
        roster=devices_by_rank(plan),
    )
    forward = capture_forward(model, loss_fn, batch, device=device)
    return GraphSource(
        recipe, Captured(forward, forward, Catalogue(model, layers), layers), plan, None
    )


def test_only_attention_and_the_loss_are_exchanged() -> None:
    source = source_of(case(shares=((2,), (2,)), ratios=(UNEVEN, UNEVEN)))
    first, last = (sharing.steps(2) for sharing in source.sequences.values())
    assert [row.local for row in (*first.rows, *last.rows)].count(RING) == 4
    assert not first.collectives
    assert list(last.collectives) == [source.cut.graph.loss]


def test_parts_of_a_sequence_are_not_compiled() -> None:
    with pytest.raises(
        InputError, match=r"stages\[0\]: found context 2, expected context 1 for compiled stages"
    ):
        check_compilable(plan_of(case(shares=((2,),), ratios=(EVEN,))))


def test_models_without_attention_are_refused() -> None:
    with pytest.raises(InputError, match=r"no attention.*scaled_dot_product_attention"):
        source_of(case(model="cnn", shares=((2,),), ratios=(EVEN,)))
