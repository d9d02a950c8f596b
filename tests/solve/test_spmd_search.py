"""The search for programs is optimal for its costs: an integer programme, Dijkstra and brute force
agree."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from program_oracle import integer_programme
from spmd_models import captured, linear_graph
from torch import Tensor, nn

from argosy.cost.group import DeviceGroup, GroupCollective
from argosy.errors import InfeasibleError
from argosy.solve.programs import tangled
from argosy.solve.programs.capped import cheapest
from argosy.solve.programs.elimination import AssignmentProblem, TangledError, eliminate
from argosy.solve.programs.placement import Pricing, ProgramPlacement
from argosy.solve.programs.ratios import SegmentLoad, closed_form, solve_ratios
from argosy.solve.programs.spmd import alternatives, find_program, program_at
from argosy.space.operations.rules import CutKind, StateChoices
from argosy.space.operations.sharding import REPLICATED
from argosy.workload.capture.trace import capture
from argosy.workload.graph import Role


def group(
    count: int = 3, *, bandwidth: float = 1e9, memory: float = 1e12, speed: float = 1e8
) -> DeviceGroup:
    return DeviceGroup(
        names=tuple(f"d{i}" for i in range(count)),
        flops=tuple(speed * (2 if i == 0 else 1) for i in range(count)),
        memory_bandwidths=(1e10,) * count,
        memory=(memory,) * count,
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


def brute_force(problem: AssignmentProblem, weights: Any = None) -> float:
    best = float("inf")
    for choice in itertools.product(*(range(len(cost)) for cost in problem.costs)):
        if weights is None or sum(w[x] for w, x in zip(weights, choice, strict=True)) <= 1:
            best = min(best, problem.value(choice))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_elimination_equals_brute_force(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed), 7, 9)
    found = eliminate(problem)
    expected = brute_force(problem)
    if np.isfinite(expected):
        assert found.value == pytest.approx(expected, rel=1e-12)
        assert problem.value(found.choice) == pytest.approx(expected, rel=1e-12)
    else:
        assert found.value == expected


@pytest.mark.parametrize("seed", range(40))
def test_the_capped_search_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 8, 10, forbidden=0.1)
    weights = [rng.uniform(0, 0.4, len(cost)) for cost in problem.costs]
    expected = brute_force(problem, weights)
    if not np.isfinite(expected):
        with pytest.raises(InfeasibleError):
            cheapest(problem, weights)
        return
    found = cheapest(problem, weights)
    assert found.value == pytest.approx(expected, rel=1e-9)
    assert found.bound == pytest.approx(expected, rel=1e-6), "the optimum is proven"
    assert sum(w[x] for w, x in zip(weights, found.choice, strict=True)) <= 1


CASES = [("perceptron", 1e9), ("perceptron", 1e7), ("towers", 1e8), ("plain", 1e9)]


@pytest.mark.parametrize(("name", "bandwidth"), CASES)
def test_programs_equal_the_integer_programme(name: str, bandwidth: float) -> None:
    graph = captured(name)
    pricing = Pricing(group=group(bandwidth=bandwidth))
    placement = ProgramPlacement(graph, StateChoices(graph, 3), pricing, (0.5, 0.25, 0.25))
    found = find_program(graph, pricing, ratios=(0.5, 0.25, 0.25))
    assert found.seconds == pytest.approx(integer_programme(placement.problem), rel=1e-6)
    assert found.bound == pytest.approx(found.seconds, rel=1e-9)


def test_programs_under_a_memory_cap_equal_the_integer_programme() -> None:
    graph = captured("perceptron")
    free = find_program(graph, Pricing(group=group(bandwidth=1e6)), ratios=(0.5, 0.25, 0.25))
    for share in (0.95, 0.8, 0.65):
        pricing = Pricing(group=group(bandwidth=1e6, memory=share * max(free.device_bytes)))
        placement = ProgramPlacement(graph, StateChoices(graph, 3), pricing, (0.5, 0.25, 0.25))
        expected = integer_programme(placement.problem, placement.memory)
        found = find_program(graph, pricing, ratios=(0.5, 0.25, 0.25))
        assert max(found.device_bytes) <= pricing.group.memory[0] * (1 + 1e-9)
        assert found.seconds == pytest.approx(expected, rel=1e-6) and found.seconds > free.seconds


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
        eliminate(AssignmentProblem(costs=costs, pairs=pairs))


@pytest.mark.parametrize("seed", range(40))
def test_a_tangled_search_is_bounded_by_brute_force(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of three entries at most: almost everything is held in turn."""
    monkeypatch.setattr(tangled, "MOST_ENTRIES", 3 if seed % 2 else 12)
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 8, 14, forbidden=0.0)
    weights, lightest = None, [0] * 8
    if seed % 3 == 0:
        raw = [rng.uniform(0.1, 1, len(cost)) for cost in problem.costs]
        weights = [0.9 * w / sum(w.min() for w in raw) for w in raw]
        lightest = [int(w.argmin()) for w in weights]
    found = tangled.cheapest_tangled(
        problem, weights, holds=[lightest, [len(cost) - 1 for cost in problem.costs]]
    )
    expected = brute_force(problem, weights)
    assert problem.value(found.choice) == pytest.approx(found.value, rel=1e-12)
    assert found.bound <= expected * (1 + 1e-9) and expected <= found.value * (1 + 1e-12)
    if weights is not None:
        assert sum(w[x] for w, x in zip(weights, found.choice, strict=True)) <= 1


def test_a_tangled_search_without_need_is_exact() -> None:
    problem = random_problem(np.random.default_rng(3), 7, 9, forbidden=0.0)
    found = tangled.cheapest_tangled(problem, holds=[[0] * 7])
    assert found.value == found.bound == pytest.approx(brute_force(problem), rel=1e-12)


def test_a_tangled_program_is_near_what_is_proven_and_explained() -> None:
    """T5 ties all layers of its decoder to one encoder."""
    graph = captured("t5")
    pricing = Pricing(group=group(3, bandwidth=1e8))
    choices = StateChoices(graph, 3)
    program = program_at(graph, choices, pricing, (0.5, 0.25, 0.25))
    assert choices.tangled and program.bound <= program.seconds <= 1.05 * program.bound
    largest = max(graph.parameters, key=lambda value: graph.values[value].elements)
    others = alternatives(program, pricing, largest)
    assert others[0].seconds == pytest.approx(program.seconds, rel=1e-6) and len(others) > 2


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
    st.lists(st.floats(0.2, 5.0), min_size=2, max_size=7),
    st.floats(0.01, 5),
    st.floats(0.01, 5),
    st.integers(0, 2**31),
)
def test_the_programme_equals_the_closed_form(
    speeds: list[float], work: float, padded: float, seed: int
) -> None:
    caps = np.random.default_rng(seed).uniform(1.2 / len(speeds), 1.0, len(speeds)).tolist()
    row = np.array([work / speed for speed in speeds])
    alike = SegmentLoad(work=np.array([row / 4, 3 * row / 4]), padded=padded, num_bytes=1e9)
    nothing = SegmentLoad(work=np.zeros((0, len(speeds))))
    memory = [1e9 * cap for cap in caps]
    by_form = solve_ratios([alike], memory=memory, least=0.0)[0]
    by_programme = solve_ratios([alike, nothing], memory=memory, least=0.0)[
        0
    ]  # two segments have no closed form

    def value(ratios: tuple[float, ...]) -> float:
        return work * max(b / s for b, s in zip(ratios, speeds, strict=True)) + padded * max(ratios)

    least, same = closed_form(speeds, work, padded, caps)
    assert by_form == pytest.approx(same)
    assert sum(by_form) == pytest.approx(1) == sum(by_programme)
    assert all(ratio <= cap + 1e-9 for ratio, cap in zip(by_form, caps, strict=True))
    assert value(by_form) == pytest.approx(least) == value(by_programme)


@pytest.mark.parametrize("seed", range(10))
def test_the_full_programme_is_no_worse_than_any_other_ratios(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work = rng.uniform(0.1, 1.0, (5, 4))

    def cost(ratios: Any) -> float:
        return float((work * ratios).max(1).sum() + 0.5 * max(ratios))

    best = cost(*solve_ratios([SegmentLoad(work=work, padded=0.5)], least=0.0))
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


def test_a_placement_is_explained_by_what_else_would_cost() -> None:
    graph = captured("plain")
    pricing = Pricing(group=group(2))
    program = find_program(graph, pricing, ratios=(0.6, 0.4))
    value = graph.parameters[4]
    others = alternatives(program, pricing, value)
    assert (
        others[0].seconds == pytest.approx(program.seconds)
        and others[0].delivery == program.deliveries[value]
    )
    assert len(others) > 2 and others[1].seconds >= others[0].seconds
    assert REPLICATED in {other.delivery.stored for other in others}


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


def test_zero_stores_shards_and_gathers_what_it_uses() -> None:
    """Of 24 x 48 matrices a half each, gathered and their gradients scattered at the prices of a
    ring."""
    graph, devices = captured("perceptron"), group(2)
    program = find_program(
        graph, Pricing(group=devices), kind=CutKind.STORED, ratios=devices.even, capped=False
    )
    plain = find_program(
        graph, Pricing(group=devices), kind=CutKind.SAMPLES, ratios=devices.even, capped=False
    )
    for value in graph.parameters:
        stored, used = program.deliveries[value].stored, program.deliveries[value].states
        assert (
            stored is not None and stored.is_sharded and stored.dim == 0 and used == (REPLICATED,)
        )
    kinds = Counter(move.step.kind for move in program.moves if move.value in graph.parameters)
    assert kinds == {GroupCollective.ALL_GATHER: len(graph.parameters)}
    scattered = [move for move in program.moves if move.step.kind is GroupCollective.REDUCE_SCATTER]
    assert len(scattered) == len(graph.gradients)
    assert max(program.device_bytes) < max(plain.device_bytes)


def test_without_rounding_shares_are_the_ratios() -> None:
    """Five rows over two devices: three and two, or half each."""
    graph = linear_graph(batch=5, width=8, out=4)
    devices = replace(group(2), flops=(1e8, 1e8))
    whole, parts = (
        find_program(
            graph, Pricing(group=devices, rounded=rounded), kind=CutKind.SAMPLES, ratios=(0.5, 0.5)
        )
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


def test_places_that_do_not_fit_are_no_alternatives() -> None:
    """Where memory holds what is found and little more, a whole copy of the matrix is out of the
    question."""
    graph = linear_graph(batch=6, width=8, out=4)

    def places(memory: float) -> set[object]:
        pricing = Pricing(group=group(2, memory=memory, bandwidth=1e12))
        program = find_program(graph, pricing, ratios=(0.5, 0.5))
        return {
            other.delivery.stored for other in alternatives(program, pricing, graph.parameters[0])
        }

    free = find_program(graph, Pricing(group=group(2)), ratios=(0.5, 0.5), capped=False)
    assert REPLICATED in places(1e12)
    assert REPLICATED not in places(1.02 * max(free.device_bytes))


def test_where_memory_allows_no_ratios_shares_follow_it() -> None:
    """10 GB on devices of 3 and 1: nothing fits, and the next search says so; until then in
    proportion."""
    loads = [
        SegmentLoad(work=np.array([[1.0, 1.0]]), num_bytes=5e9),
        SegmentLoad(work=np.array([[1.0, 2.0]]), num_bytes=5e9),
    ]
    assert solve_ratios(loads, memory=[3e9, 1e9], least=0.0) == ((0.75, 0.25), (0.75, 0.25))
    assert solve_ratios(loads, memory=[0.0, -1.0], least=0.0) == ((0.5, 0.5), (0.5, 0.5))
