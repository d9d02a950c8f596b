"""Segments with ratios of their own: exact at given ratios, the best ratios, and never slower than
one vector."""

from __future__ import annotations

import numpy as np
import pytest
from program_oracle import integer_programme
from spmd_models import captured

from argosy.cost.group import DeviceGroup, passed_on
from argosy.solve.programs.placement import Pricing, ProgramPlacement
from argosy.solve.programs.ratios import SegmentLoad, solve_ratios
from argosy.solve.programs.segments import boundaries, find_segmented, segments_at
from argosy.solve.programs.spmd import find_program
from argosy.space.operations.rules import StateChoices
from argosy.space.operations.sharding import Segments


def group(bandwidth: float = 1e9) -> DeviceGroup:
    """Devices whose order by matrix products is not that by memory traffic."""
    return DeviceGroup(
        names=("a", "b", "c"),
        flops=(4e8, 1e8, 1e8),
        memory_bandwidths=(2e8, 1.5e8, 1e8),
        memory=(1e12,) * 3,
        bandwidth=bandwidth,
        latency=0.0,
        launch=0.0,
    )


TWO = ((0.6, 0.2, 0.2), (0.4, 0.35, 0.25))


@pytest.mark.parametrize(
    ("name", "bandwidth"), [("perceptron", 1e9), ("perceptron", 1e7), ("plain", 1e9)]
)
def test_programs_with_segments_equal_the_integer_programme(name: str, bandwidth: float) -> None:
    graph, pricing = captured(name), Pricing(group=group(bandwidth))
    ends = boundaries(graph)
    segments = Segments(TWO, segments_at(graph, ends[len(ends) // 2 :][:1], TWO[0]).of_node)
    placement = ProgramPlacement(graph, StateChoices(graph, 3), pricing, segments)
    found = find_program(graph, pricing, ratios=segments)
    assert found.seconds == pytest.approx(integer_programme(placement.problem), rel=1e-6)


def cost(loads: list[SegmentLoad], between: float, ratios: tuple[tuple[float, ...], ...]) -> float:
    own = sum(
        float((load.work * np.array(r)).max(1).sum()) + load.padded * max(r)
        for load, r in zip(loads, ratios, strict=True)
    )
    rows = passed_on(*ratios)
    return own + between * max(*map(sum, rows), *map(sum, zip(*rows, strict=True)))


@pytest.mark.parametrize("seed", range(6))
def test_no_other_ratios_are_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loads = [
        SegmentLoad(work=rng.uniform(0.1, 1.0, (3, 3)), padded=float(rng.uniform(0, 0.5)))
        for _ in range(2)
    ]
    for seconds in (0.0, 0.2, 100.0):
        best = cost(loads, seconds, solve_ratios(loads, between={(0, 1): seconds}, least=0.0))
        others = rng.dirichlet(np.ones(3), (2000, 2))
        assert (
            best <= min(cost(loads, seconds, tuple(map(tuple, other))) for other in others) + 1e-9
        )


def test_dear_resharding_makes_segments_equal_and_free_one_lets_them_be() -> None:
    loads = [SegmentLoad(work=np.array([[1.0, 3.0]])), SegmentLoad(work=np.array([[3.0, 1.0]]))]
    one, other = solve_ratios(loads, between={(0, 1): 1e3}, least=0.0)
    assert one == pytest.approx(other)
    one, other = solve_ratios(loads, between={(0, 1): 0.0}, least=0.0)
    assert one == pytest.approx((0.75, 0.25)) and other == pytest.approx((0.25, 0.75))


def test_memory_counts_all_segments_together() -> None:
    loads = [
        SegmentLoad(work=np.array([[1.0, 3.0]]), num_bytes=8e9),
        SegmentLoad(work=np.array([[1.0, 3.0]]), num_bytes=4e9),
    ]
    one, other = solve_ratios(loads, memory=[6e9, 1e12], least=0.0)
    assert 8 * one[0] + 4 * other[0] <= 6 * (1 + 1e-6)


def test_segments_are_found_where_operations_want_different_ratios() -> None:
    graph, pricing = captured("plain"), Pricing(group=group())
    one = find_program(graph, pricing)
    several = find_segmented(graph, pricing, program=one)
    assert several.seconds < 0.99 * one.seconds and len(several.segments.ratios) > 1
    shares = several.segments.ratios
    assert max(abs(a - b) for a, b in zip(shares[0], shares[1], strict=True)) > 0.03


@pytest.mark.parametrize("name", ["unet", "towers"])
def test_segments_never_lose(name: str) -> None:
    graph = captured(name)
    for bandwidth in (1e7, 1e9):
        pricing = Pricing(group=group(bandwidth))
        one = find_program(graph, pricing)
        assert find_segmented(graph, pricing, program=one).seconds <= one.seconds


def test_one_device_has_no_segments() -> None:
    alone = DeviceGroup(
        names=("a",),
        flops=(4e8,),
        memory_bandwidths=(2e8,),
        memory=(1e12,),
        bandwidth=1e9,
        latency=0.0,
        launch=0.0,
    )
    program = find_segmented(captured("perceptron"), Pricing(group=alone))
    assert program.segments.ratios == ((1.0,),) and not program.moves
