"""Stages whose replicas cut the sequence train as one process does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runtime.llama_models import LENGTH
from runtime.parts_cases import (
    TOKENS,
    WIDTH,
    captured,
    cores,
    pairs_of_cores,
    planned,
    train_alone,
    train_by,
)
from runtime.rank_pool import RankPool
from runtime.ring_cases import worst_errors
from runtime.small_models import cnn
from runtime.training_cases import Case, built, differences, plan_of, train_in_parallel

from argosy.errors import InputError
from argosy.plan.check import check_plan
from argosy.plan.file import dumps_plan, loads_plan
from argosy.plan.model import planned_chain
from argosy.plan.plan import Recompute
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.sources.operations import Captured, GraphSource, capture_program
from argosy.runtime.sources.recipe import Recipe
from argosy.runtime.stages.compiling import check_compilable
from argosy.runtime.stages.grid_stage import GridSharing
from argosy.runtime.stages.layers import find_layers
from argosy.runtime.stages.parameters import Catalogue
from argosy.schedule import ScheduleKind
from argosy.solve.programs.sequence import ATTENTION, RING
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
GRID, WIDE_GRID = (0.25,) * 4, (0.42, 0.18, 0.28, 0.12)
"""Two parts of two devices; one part is larger, and one device of each."""
GRIDS = [
    case(shares=((2,),), ratios=(WIDE_GRID,), members=2, clip=True),
    case(shares=((2,),), ratios=(GRID,), members=2, zero=2, recompute=Recompute.FULL),
    case(model="gpt", shares=((2,), (2,)), ratios=(GRID, ALONE), members=2, zero=1),
    case(
        shares=((2,), (2,)),
        ratios=(ALONE, WIDE_GRID),
        members=2,
        kind=ScheduleKind.ZERO_BUBBLE,
        tied=True,
    ),
    case(model="gpt", work=(0.5, 0.5), shares=((2,), (2,)), ratios=(ALONE, GRID), members=2),
    case(model="hf-llama", shares=((2,),), ratios=(WIDE_GRID,), members=2, single=True),
    case(model="hf-gpt2", shares=((2,),), ratios=(GRID,), members=2, single=True, zero=3),
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
    "case",
    [
        *CASES,
        GRIDS[0],
        *(pytest.param(more, marks=pytest.mark.exhaustive) for more in (*GRIDS[1:], *MORE)),
    ],
    ids=str,
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
    catalogue = Catalogue(model, layers)
    forward = capture_forward(model, loss_fn, batch, device=device)
    return GraphSource(recipe, Captured(forward, forward, catalogue, layers), plan, None)


def test_only_attention_and_the_loss_are_exchanged() -> None:
    source = source_of(case(shares=((2,), (2,)), ratios=(UNEVEN, UNEVEN)))
    first, last = (sharing.steps(2) for sharing in source.sequences.values())
    assert [row.local for row in (*first.rows, *last.rows)].count(RING) == 4
    assert not first.collectives
    assert list(last.collectives) == [source.cut.graph.loss]


def test_the_group_of_each_part_divides_its_weights_and_sends_keys_to_its_like() -> None:
    source = source_of(GRIDS[0])
    weights = {weight.name: source.held(weight) for weight in source.weights}
    cut = [name for name, held in weights.items() if len(set(held.values())) == 2]
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in cut} >= {"q", "k", "v", "out"}
    assert weights[cut[0]][0] == weights[cut[0]][2] != weights[cut[0]][1]
    (sharing,) = source.shared.values()
    assert isinstance(sharing, GridSharing)
    tokens = [
        next(node for node in sharing.part(2, part).graph.nodes if node.op == ATTENTION)
        for part in range(2)
    ]
    counts = [
        sharing.part(2, part).graph.values[node.inputs[0]].shape[2]
        for part, node in enumerate(tokens)
    ]
    assert sorted(counts) == [LENGTH // 2, LENGTH - LENGTH // 2]


def test_parts_of_a_sequence_are_not_compiled() -> None:
    with pytest.raises(
        InputError, match=r"stages\[0\]: found context 2, expected context 1 for compiled stages"
    ):
        check_compilable(plan_of(case(shares=((2,),), ratios=(EVEN,))))


def test_models_without_attention_are_refused() -> None:
    with pytest.raises(InputError, match=r"no attention.*scaled_dot_product_attention"):
        source_of(case(model="cnn", shares=((2,),), ratios=(EVEN,)))


@pytest.mark.parametrize(
    "speeds", [(1.0, 0.6), pytest.param((1.0, 1.0, 0.5), marks=pytest.mark.exhaustive)], ids=str
)
def test_a_program_is_planned_with_unequal_parts_and_trains_as_one_process(
    ranks: RankPool, speeds: tuple[float, ...]
) -> None:
    """One sequence is all there is; whole samples and layers use one device at a time."""
    program, cluster = captured(1), cores(*speeds)
    plan = planned(program, cluster, max_context=2)
    (stage,) = plan.stages
    assert stage.context == len(speeds)
    assert len(set(stage.replicas[0].ratios)) == len(speeds)
    without = planned(program, cluster, max_context=1, max_width=1)
    assert plan.predicted is not None and without.predicted is not None
    assert plan.predicted.iteration_seconds < 0.7 * without.predicted.iteration_seconds
    read = loads_plan(dumps_plan(plan))
    check_plan(read, planned_chain(read.model), cluster)
    for losses in ranks(len(speeds), train_by, read):
        assert losses == pytest.approx(train_alone(1), rel=1e-12)


@pytest.mark.exhaustive
def test_a_program_with_parts_on_groups_trains_as_one_process(ranks: RankPool) -> None:
    """Four equal cores get a part each; here two of them share a part."""
    plan = planned(captured(1), pairs_of_cores(), max_context=4)
    (stage,) = plan.stages
    assert (stage.context, stage.replicas[0].width) == (4, 4)
    grid = replace(plan, stages=(replace(stage, context=2),))
    for losses in ranks(4, train_by, loads_plan(dumps_plan(grid))):
        assert losses == pytest.approx(train_alone(1), rel=1e-12)


def test_the_chain_of_a_program_states_what_its_parts_send() -> None:
    """Keys and values of two of four heads, sequence by sequence."""
    chain = captured(1).chain
    assert chain.sequence_length == TOKENS
    assert {layer.max_context for layer in chain.layers} == {TOKENS // 2}
    sent = [layer.key_value_bytes for layer in chain.layers if layer.key_value_bytes]
    assert sent == [2 * TOKENS * WIDTH / 2 * 8] * 4
    attending = [layer.key_value_bytes > 0 for layer in chain.layers]
    assert attending == [layer.attention_flop > 0 for layer in chain.layers]


def test_a_program_without_attention_keeps_its_sequences_whole() -> None:
    chain = capture_program(lambda: cnn(2), name="cnn").chain
    assert chain.sequence_length == 1
    assert {layer.max_context for layer in chain.layers} == {1}
