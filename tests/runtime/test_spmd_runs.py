"""Distributed programs on real processes: losses, gradients and trained parameters are those of one
process."""

from __future__ import annotations

import pytest
import torch
import torch.fx
from rank_pool import RankPool
from spmd_cases import in_segments, program_for, random_program, slow_group, start, train
from spmd_models import BUILDS, built, captured

from argosy.cost.group import GroupCollective
from argosy.runtime.communication.exchange import GroupExchange
from argosy.runtime.graphs.local import MaskClock
from argosy.runtime.step.spmd import lower
from argosy.solve.programs.placement import Pricing
from argosy.solve.programs.spmd import find_program
from argosy.space.operations.rules import CutKind

INNER_FLOATS = {"llama", "mixtral"}
"""Models that compute parts in fp32 whatever their parameters are."""
EXACT, SINGLE = 1e-9, 1e-4
RATIOS = {2: (0.7, 0.3), 3: (0.5, 0.3, 0.2), 4: (0.4, 0.3, 0.2, 0.1)}


def check(
    ranks: RankPool, programs: list[object], dtype: torch.dtype, tolerance: float, num_ranks: int
) -> None:
    for results in ranks(num_ranks, train, programs, dtype, 3):
        for program, (worst, _) in zip(programs, results, strict=True):
            loss, gradient, parameter = worst
            assert loss < tolerance and gradient < tolerance, f"{program}: {worst}"
            assert parameter < 100 * tolerance, (
                f"{program}: {worst}"
            )  # Adam divides by small gradients


@pytest.mark.parametrize("name", list(BUILDS))
def test_found_programs_train_as_one_process_does(name: str, ranks: RankPool) -> None:
    count = 2 + list(BUILDS).index(name) % 3
    program = program_for(name, RATIOS[count], 1e9, torch.float64)
    assert program.ratios == RATIOS[count] and program.moves
    check(ranks, [program], torch.float64, 1e-5 if name in INNER_FLOATS else EXACT, count)


@pytest.mark.parametrize("name", ["language", "experts", "plain"])
def test_in_single_precision(name: str, ranks: RankPool) -> None:
    check(ranks, [program_for(name, RATIOS[3], 1e9, torch.float32)], torch.float32, SINGLE, 3)


@pytest.mark.parametrize("name", ["perceptron", "language", "residual", "unet", "vision"])
def test_any_program_is_right(name: str, ranks: RankPool) -> None:
    """Random choices reach rows and collectives that no cost would choose."""
    programs = [random_program(name, RATIOS[3], seed, torch.float64) for seed in range(3)]
    assert {move.step.kind for program in programs for move in program.moves} >= {
        GroupCollective.ALL_GATHER
    }
    check(ranks, programs, torch.float64, EXACT, 3)


SEVERAL = ((0.5, 0.3, 0.2), (0.2, 0.2, 0.6), (0.34, 0.33, 0.33))


@pytest.mark.parametrize("name", ["perceptron", "language", "unet"])
def test_segments_with_ratios_of_their_own_train_as_one_process_does(
    name: str, ranks: RankPool
) -> None:
    """Found and random programs: what crosses is re-sharded."""
    segments = in_segments(name, SEVERAL if name == "language" else SEVERAL[:2], torch.float64)
    pricing = Pricing(group=slow_group(3, bandwidth=1e9))
    programs = [
        find_program(captured(name), pricing, ratios=segments, kind=kind)
        for kind in (CutKind.ANY, CutKind.SAMPLES)
    ]
    programs += [random_program(name, segments, seed, torch.float64) for seed in range(2)]
    kinds = {move.step.kind for program in programs for move in program.moves}
    assert GroupCollective.RESHARD in kinds
    check(ranks, programs, torch.float64, EXACT, 3)


def test_parameters_are_born_in_shards(ranks: RankPool) -> None:
    program = random_program("perceptron", RATIOS[2], 3, torch.float64)
    assert any(program.deliveries[p].stored.is_sharded for p in program.graph.parameters)
    found = ranks(2, start, "perceptron", program, 9)
    assert min(share for share, _ in found) < 1
    torch.manual_seed(5)
    _, loss, batch = built("perceptron")()
    torch.manual_seed(9)
    model, _, _ = built("perceptron")()
    assert all(abs(first - float(loss(model, batch).detach())) < 1e-12 for _, first in found)


def test_the_module_of_a_rank_reads_as_a_program() -> None:
    program = program_for("perceptron", RATIOS[2], 1e9, torch.float64)
    exchange = GroupExchange.__new__(GroupExchange)
    exchange.segments, exchange.group, exchange.rank = program.segments, None, 0
    module = lower(program, exchange, clock=MaskClock(), device=torch.device("cpu"))
    assert isinstance(module, torch.fx.GraphModule) and "torch.ops.aten.mm.default" in module.code
    assert sum(name in module.code for name in ("all_gather", "reduce_scatter", "all_reduce")) > 0
