"""Stages that tensor-parallel groups share train as one process does."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from runtime.rank_pool import RankPool
from runtime.small_models import LENGTH
from runtime.training_cases import Case, built, differences, plan_of, train_in_parallel

from argosy.cost.group import GroupCollective
from argosy.plan.plan import Recompute
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.sources.maker import StageMaker
from argosy.runtime.sources.operations import GraphSource
from argosy.runtime.sources.recipe import Recipe
from argosy.schedule import ScheduleKind
from argosy.space.operations.sharding import REPLICATED, sharded

ALONE, EVEN, UNEVEN, THREE = (1.0,), (0.5, 0.5), (0.7, 0.3), (0.5, 0.3, 0.2)
THIRDS = (1 / 3,) * 3
CASES = [
    Case(
        shares=((1, 1), (2,)),
        ratios=((UNEVEN, EVEN), ALONE),
        num_micro_batches=3,
        zero=2,
        clip=True,
    ),
    Case(
        shares=((1, 2), (3,)),
        ratios=((ALONE, EVEN), EVEN),
        num_micro_batches=2,
        tied=True,
        recompute=Recompute.FULL,
        sequence=True,
    ),
    Case(
        model="t5",
        shares=((2,), (2,)),
        ratios=(THREE, EVEN),
        kind=ScheduleKind.ZERO_BUBBLE,
        num_micro_batches=3,
    ),
]
POSITIONS = [
    Case(
        shares=((2,), (2,)),
        ratios=(THIRDS, EVEN),
        num_micro_batches=2,
        recompute=recompute,
        sequence=True,
        tied=tied,
    )
    for recompute, tied in ((Recompute.FULL, True), (Recompute.SELECTIVE, False))
] + [
    Case(model="vit", shares=((3, 1),), ratios=((ALONE, THIRDS),), zero=3, sequence=True),
    Case(model="t5", shares=((2,), (2,)), ratios=(THIRDS, EVEN), tied=True, sequence=True),
    Case(shares=((2,), (2,)), ratios=(EVEN, EVEN), kind=ScheduleKind.ZERO_BUBBLE, sequence=True),
    *(
        Case(model=model, shares=((2,), (2,)), ratios=(EVEN, EVEN), single=True, sequence=True)
        for model in ("hf-gpt2", "hf-llama", "hf-t5")
    ),
]
MORE = [
    *POSITIONS,
    Case(shares=((1, 1), (2,)), ratios=(UNEVEN, ALONE), num_micro_batches=3, zero=2, clip=True),
    Case(
        shares=((2,), (2,)),
        ratios=(EVEN, THREE),
        num_micro_batches=2,
        tied=True,
        recompute=Recompute.FULL,
    ),
    Case(shares=((2, 1),), ratios=((THREE, EVEN),), num_micro_batches=2, zero=3, tied=True),
    Case(
        shares=((2, 1, 1),),
        ratios=((UNEVEN, ALONE, ALONE),),
        num_micro_batches=2,
        zero=1,
        clip=True,
    ),
    Case(
        shares=((2, 1), (3,)), ratios=((UNEVEN, ALONE), EVEN), zero=3, kind=ScheduleKind.ZERO_BUBBLE
    ),
    Case(
        model="t5",
        shares=((2, 1), (3,)),
        ratios=((THREE, ALONE), ALONE),
        tied=True,
        num_micro_batches=2,
        clip=True,
    ),
    Case(model="vit", shares=((3, 1),), ratios=((ALONE, THREE),), zero=2, num_micro_batches=2),
    Case(model="cnn", shares=((2, 2),), ratios=((EVEN, UNEVEN),), num_micro_batches=2),
    Case(
        shares=((2,),) * 4,
        ratios=(EVEN, UNEVEN) * 2,
        kind=ScheduleKind.INTERLEAVED,
        num_micro_batches=4,
    ),
    Case(
        shares=((1, 1), (2,)),
        ratios=(UNEVEN, ALONE),
        kind=ScheduleKind.ZERO_BUBBLE,
        tied=True,
        num_micro_batches=3,
    ),
    Case(
        shares=((1, 1), (2,)),
        ratios=(EVEN, ALONE),
        zero=3,
        recompute=Recompute.SELECTIVE,
        num_micro_batches=3,
    ),
    Case(
        shares=((2, 1), (3,)),
        ratios=(UNEVEN, ALONE),
        zero=1,
        kind=ScheduleKind.GPIPE,
        num_micro_batches=2,
    ),
    Case(model="vit", shares=((3, 1),), ratios=(UNEVEN,), zero=1, clip=True, num_micro_batches=3),
    Case(
        model="cnn",
        shares=((2,), (2,)),
        ratios=(EVEN, UNEVEN),
        kind=ScheduleKind.ZERO_BUBBLE,
        num_micro_batches=3,
    ),
    Case(
        model="unet",
        shares=((2,), (2,)),
        ratios=(EVEN, ALONE),
        kind=ScheduleKind.KFKB,
        k=2,
        num_micro_batches=3,
    ),
    Case(model="forked", shares=((2,), (2,)), ratios=(UNEVEN, EVEN), num_micro_batches=3),
    Case(model="residual", shares=((4,), (4,)), ratios=(EVEN, ALONE), num_micro_batches=1),
    Case(
        model="hf-gpt2",
        shares=((2,), (2,)),
        ratios=(EVEN, UNEVEN),
        tied=True,
        single=True,
        num_micro_batches=2,
    ),
    Case(
        model="hf-llama",
        shares=((2,), (2,)),
        ratios=(UNEVEN, ALONE),
        single=True,
        num_micro_batches=2,
    ),
    Case(
        model="hf-t5",
        work=(0.5, 0.5),
        shares=((2,), (2,)),
        ratios=(EVEN, ALONE),
        single=True,
        num_micro_batches=2,
    ),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in MORE)], ids=str
)
def test_groups_train_as_one_process(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


def source_of(case: Case) -> GraphSource:
    model, loss_fn, batch = built(case)
    plan = plan_of(case)
    recipe = Recipe(
        model=model,
        loss_fn=loss_fn,
        optimizer_factory=torch.optim.SGD,
        device=torch.device("cpu"),
        roster=devices_by_rank(plan),
    )
    maker = StageMaker(recipe, plan, batch, None, None)
    with mock.patch.object(GraphSource, "check_agreed"):
        source = maker.source(plan, None)
    assert isinstance(source, GraphSource)
    return source


def test_norms_are_divided_by_positions_between_products() -> None:
    """Sequence parallelism, as Megatron-LM does it: sums are scattered, norms gathered."""
    case = Case(shares=((2,), (2,)), ratios=(EVEN, ALONE), sequence=True)
    program = source_of(case).shared[0, 0].steps(2)
    norms = [
        row.inputs[0]
        for node, row in zip(program.graph.nodes, program.rows, strict=True)
        if node.op == "aten.native_layer_norm.default"
    ]
    assert sharded(1, LENGTH) in norms
    kinds = {step.kind for steps in program.collectives.values() for step, _ in steps}
    assert {GroupCollective.REDUCE_SCATTER, GroupCollective.ALL_GATHER} <= kinds
    assert not any(program.deliveries[value].is_gathered for value in program.graph.parameters)


def test_matrices_are_cut_into_columns_then_rows_and_samples_never() -> None:
    source = source_of(Case(shares=((2,), (2,)), ratios=(UNEVEN, ALONE)))
    cut = {weight.name: source.stored(weight, weight.stages[0]) for weight in source.weights}
    assert cut["blocks.1.feed_forward.0.weight"] == sharded(0, 32)
    assert cut["blocks.1.feed_forward.2.weight"] == sharded(1, 32)
    assert cut["blocks.1.attention.keys_and_values.weight"].outer == 2, "keys and values by heads"
    assert cut["blocks.1.norms.0.weight"] == cut["head.output.weight"] == REPLICATED
    program = source.shared[0, 0].steps(2)
    whole = [
        value
        for value in program.graph.parameters
        if program.deliveries[value].stored == REPLICATED
    ]
    assert all(
        len(program.graph.values[value].shape) == 1 or "places" in program.graph.values[value].name
        for value in whole
        if program.graph.consumers[value]
    )
