"""The search for programs is optimal for its costs: an integer programme, Dijkstra and brute force
agree."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.program_oracle import integer_programme
from support.spmd_models import captured, linear_graph
from torch import Tensor, nn

from argosy.cost.group import DeviceGroup
from argosy.errors import InfeasibleError
from argosy.solve.programs import tangled
from argosy.solve.programs.elimination import AssignmentProblem, TangledError, cheapest
from argosy.solve.programs.placement import Pricing, ProgramPlacement
from argosy.solve.programs.ratios import _programme_ratios, closed_form, solve_ratios
from argosy.solve.programs.spmd import find_program, program_at
from argosy.space.operations.rules import StateChoices
from argosy.space.operations.sharding import REPLICATED
from argosy.workload.capture.trace import capture
from argosy.workload.graph import Role


def group(count: int = 3, *, bandwidth: float = 1e9, speed: float = 1e8) -> DeviceGroup:
    return DeviceGroup(
        names=tuple(f"d{i}" for i in range(count)),
        flops=tuple(speed * (2 if i == 0 else 1) for i in range(count)),
        memory_bandwidths=(1e10,) * count,
        bandwidth=bandwidth,
        latency=1e-6,
    )


def random_problem(
    rng: np.random.Generator, count: int, edges: int, *, forbidden: float = 0.2
) -> AssignmentProblem:
    sizes = rng.integers(1, 4, count)
    costs = tuple(rng.uniform(0, 1, size) for size in sizes)
    pairs = []
    for _ in range(edges):
        i, j = (int(x) for x in rng.choice(count, 2, replace=False))
        table = rng.uniform(0, 1, (sizes[i], sizes[j]))
        table[rng.uniform(size=table.shape) < forbidden] = np.inf
        pairs.append((i, j, table))
    return AssignmentProblem(costs=costs, pairs=tuple(pairs))


def brute_force(problem: AssignmentProblem) -> float:
    best = float("inf")
    for choice in itertools.product(*(range(len(cost)) for cost in problem.costs)):
        best = min(best, problem.value(choice))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_elimination_equals_brute_force(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed), 7, 9)
    expected = brute_force(problem)
    if not np.isfinite(expected):
        with pytest.raises(InfeasibleError):
            cheapest(problem)
        return
    found = cheapest(problem)
    assert found.value == found.bound == pytest.approx(expected, rel=1e-12)
    assert problem.value(found.choice) == pytest.approx(expected, rel=1e-12)


def test_a_variable_may_have_many_neighbours_that_have_one_choice() -> None:
    rng = np.random.default_rng(5)
    centre = rng.uniform(0, 1, 3)
    tables = [rng.uniform(0, 1, (3, 1)) for _ in range(70)]
    problem = AssignmentProblem(
        costs=(centre, *[np.ones(1)] * 70),
        pairs=tuple((0, i, table) for i, table in enumerate(tables, 1)),
    )
    least = min(centre + sum(table[:, 0] for table in tables)) + 70
    assert cheapest(problem).value == pytest.approx(least, rel=1e-12)


CASES = [("perceptron", 1e9), ("perceptron", 1e7), ("towers", 1e8), ("plain", 1e9)]


@pytest.mark.parametrize(("name", "bandwidth"), CASES)
def test_programs_equal_the_integer_programme(name: str, bandwidth: float) -> None:
    graph = captured(name)
    pricing = Pricing(group=group(bandwidth=bandwidth))
    placement = ProgramPlacement(graph, StateChoices(graph, 3), pricing, (0.5, 0.25, 0.25))
    found = find_program(graph, pricing, ratios=(0.5, 0.25, 0.25))
    assert found.seconds == pytest.approx(integer_programme(placement.problem), rel=1e-6)
    assert found.bound == pytest.approx(found.seconds, rel=1e-9)


def dijkstra(placement: ProgramPlacement) -> float:
    """Uniform-cost search over instructions in the graph's order; a state is what is delivered and
    still needed."""
    graph = placement.graph
    stored = list(graph.parameters)
    last = {v: max(graph.consumers[v], default=-1) for v in range(len(graph.values))}
    trained = {gradient: parameter for parameter, gradient in graph.gradients}
    whole = [v for role in (Role.INPUT, Role.BUFFER, Role.CONSTANT) for v in graph.with_role(role)]
    heap: list[Any] = []
    ticket = itertools.count()
    for options in itertools.product(*(placement.deliveries[v] for v in stored)):
        cost = sum(
            placement.parameter_seconds(v, option)
            for v, option in zip(stored, options, strict=True)
        )
        state = (
            *zip(stored, options, strict=True),
            *((v, placement.deliveries[v][0]) for v in whole),
        )
        heapq.heappush(heap, (cost, next(ticket), 0, state))
    seen: set[Any] = set()
    while heap:
        cost, _, index, state = heapq.heappop(heap)
        if (index, state) in seen:
            continue
        seen.add((index, state))
        if index == len(graph.nodes):
            return float(cost)
        node, have = graph.nodes[index], dict(state)
        made = [v for v in node.outputs if v is not None]
        for row in placement.rows[index]:
            if not all(have[v].has(need) for v, need in zip(node.inputs, row.inputs, strict=True)):
                continue
            for options in itertools.product(*(placement.deliveries[v] for v in made)):
                extra = placement.row_seconds(index, row)
                for value, option in zip(made, options, strict=True):
                    extra += placement.delivery_seconds(
                        value, row.outputs[node.outputs.index(value)], option
                    )
                    if value in trained and not option.has(have[trained[value]].stored):
                        extra = float("inf")
                if extra < float("inf"):
                    after = {**have, **dict(zip(made, options, strict=True))}
                    keep = tuple(
                        sorted(
                            ((v, d) for v, d in after.items() if last[v] > index or v in stored),
                            key=str,
                        )
                    )
                    heapq.heappush(heap, (cost + extra, next(ticket), index + 1, keep))
    return float("inf")


def test_programs_equal_dijkstra() -> None:
    graph = linear_graph(batch=6, width=8, out=4)
    for bandwidth in (1e6, 1e8, 1e11):
        placement = ProgramPlacement(
            graph, StateChoices(graph, 2), Pricing(group=group(2, bandwidth=bandwidth)), (0.5, 0.5)
        )
        assert cheapest(placement.problem).value == pytest.approx(dijkstra(placement), rel=1e-9)


def test_a_tangled_graph_says_so() -> None:
    rng = np.random.default_rng(0)
    costs = tuple(rng.uniform(size=12) for _ in range(14))
    pairs = tuple((i, j, rng.uniform(size=(12, 12))) for i in range(14) for j in range(i))
    with pytest.raises(TangledError, match="tangled"):
        cheapest(AssignmentProblem(costs=costs, pairs=pairs))


@pytest.mark.parametrize("seed", range(40))
def test_a_tangled_search_is_bounded_by_brute_force(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of three entries at most: almost everything is held in turn."""
    monkeypatch.setattr(tangled, "MOST_ENTRIES", 3 if seed % 2 else 12)
    problem = random_problem(np.random.default_rng(seed), 8, 14, forbidden=0.0)
    found = tangled.cheapest_tangled(
        problem, holds=[[0] * 8, [len(cost) - 1 for cost in problem.costs]]
    )
    expected = brute_force(problem)
    assert problem.value(found.choice) == pytest.approx(found.value, rel=1e-12)
    assert found.bound <= expected * (1 + 1e-9) and expected <= found.value * (1 + 1e-12)


def test_a_tangled_search_without_need_is_exact() -> None:
    problem = random_problem(np.random.default_rng(3), 7, 9, forbidden=0.0)
    found = tangled.cheapest_tangled(problem, holds=[[0] * 7])
    assert found.value == found.bound == pytest.approx(brute_force(problem), rel=1e-12)


def test_a_tangled_program_is_near_what_is_proven() -> None:
    """T5 ties all layers of its decoder to one encoder."""
    graph = captured("t5")
    pricing = Pricing(group=group(3, bandwidth=1e8))
    choices = StateChoices(graph, 3)
    program = program_at(graph, choices, pricing, (0.5, 0.25, 0.25))
    assert choices.tangled and program.bound <= program.seconds <= 1.05 * program.bound


@pytest.mark.parametrize("name", ["language", "experts", "unet"])
def test_equal_nodes_looked_at_once_give_the_program_of_each_by_itself(name: str) -> None:
    graph = captured(name)
    pricing = Pricing(group=group(3))
    folded, apart = (
        program_at(graph, StateChoices(graph, 3, fold=fold), pricing, (0.5, 0.25, 0.25))
        for fold in (True, False)
    )
    assert folded.seconds == pytest.approx(apart.seconds, rel=1e-12)
    assert folded.rows == apart.rows and folded.deliveries == apart.deliveries


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(0.2, 5.0), min_size=2, max_size=7), st.floats(0.01, 5), st.floats(0.01, 5)
)
def test_the_programme_equals_the_closed_form(
    speeds: list[float], work: float, padded: float
) -> None:
    row = np.array([work / speed for speed in speeds])
    alike = np.array([row / 4, 3 * row / 4])
    by_form = solve_ratios(alike, padded, least=0.0)
    by_programme = _programme_ratios(alike, padded, 0.0)

    def value(ratios: tuple[float, ...]) -> float:
        return work * max(b / s for b, s in zip(ratios, speeds, strict=True)) + padded * max(ratios)

    least, same = closed_form(speeds, work, padded)
    assert by_form == pytest.approx(same)
    assert sum(by_form) == pytest.approx(1) == sum(by_programme)
    assert value(by_form) == pytest.approx(least) == value(by_programme)


@pytest.mark.parametrize("seed", range(10))
def test_the_full_programme_is_no_worse_than_any_other_ratios(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work = rng.uniform(0.1, 1.0, (5, 4))

    def cost(ratios: Any) -> float:
        return float((work * ratios).max(1).sum() + 0.5 * max(ratios))

    best = cost(solve_ratios(work, 0.5, least=0.0))
    others = rng.dirichlet(np.ones(4), 4000)
    assert best <= min(cost(other) for other in others) + 1e-9


def test_alternating_never_loses() -> None:
    graph = captured("language")
    for bandwidth in (1e7, 1e9, 1e11):
        pricing = Pricing(group=group(3, bandwidth=bandwidth))
        found = find_program(graph, pricing)
        fixed = [
            find_program(graph, pricing, ratios=r)
            for r in (pricing.group.even, pricing.group.by_speed)
        ]
        assert found.seconds <= min(program.seconds for program in fixed) * (1 + 1e-12)
        assert sum(found.ratios) == pytest.approx(1)


def test_an_operation_without_a_rule_is_done_by_everybody_and_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.special.i0e(self.inner(x))

    graph = capture(lambda: (Odd(), lambda model, x: model(x).sum(), torch.randn(6, 8)), name="odd")
    program = find_program(graph, Pricing(group=group(2)), ratios=(0.5, 0.5))
    assert any("special_i0e" in op for op in program.unknown)
    for node, row in zip(graph.nodes, program.rows, strict=True):
        if node.op in program.unknown:
            assert row.units == 0 and set(row.inputs) | set(row.outputs) == {REPLICATED}


def test_without_rounding_shares_are_the_ratios() -> None:
    """Five rows or columns over two devices: three and two, or half each."""
    graph = linear_graph(batch=5, width=5, out=5)
    devices = replace(group(2), flops=(1e8, 1e8))
    whole, parts = (
        find_program(graph, Pricing(group=devices, rounded=rounded), ratios=(0.5, 0.5))
        for rounded in (True, False)
    )
    work = [
        cost for cost, row in zip(whole.row_seconds, whole.rows, strict=True) if row.units and cost
    ]
    halves = [
        cost for cost, row in zip(parts.row_seconds, parts.rows, strict=True) if row.units and cost
    ]
    assert len(work) == len(halves) > 0
    launch = devices.launch
    for three, half in zip(work, halves, strict=True):
        assert (half - launch) / (three - launch) == pytest.approx((5 / 2) / 3)
