"""The pipeline search against all plans: order, bounds, and the best plan."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import pytest
from support.planning_cases import (
    Case,
    Options,
    Recipe,
    cluster_of,
    complete_plans,
    kind_fields,
    node_fields,
    random_case,
)

from argosy.dtype import Dtype
from argosy.plan.plan import Recompute
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import simulate
from argosy.solve.finalists.judge import Complete
from argosy.solve.search.kinds import PlanKind
from argosy.solve.search.menu import Menu
from argosy.solve.search.pipeline import PlanSearch
from argosy.solve.search.shape import Shape
from argosy.space.rate import throughput_bound
from argosy.workload.chain import Chain, Layer

MOST_PLANS = 6000
FEW = {"recompute": (Recompute.NONE,), "zero": (1,)}
SOME = {"recompute": (Recompute.NONE, Recompute.FULL), "zero": (1, 3)}
LARGE = Recipe(max_devices=8, max_layers=8, batches=(2, 3, 4, 6))
NARROW = Recipe(
    max_devices=6,
    max_layers=5,
    batches=(2, 3, 4),
    outputs=8.0,
    wide=False,
    tight=False,
    per_node=(1, 2),
)
"""What crosses between stages costs as much as what they compute."""


def drawn(seed: int) -> tuple[Case, Shape, Options, list[Complete]] | None:
    """A case, one of its shapes, and all plans of it; None if there are none or too many."""
    random = Random(seed)
    case = random_case(seed, random.choice((LARGE, NARROW)))
    shape = random.choice(case.shapes)
    options = case.options(
        shape.micro_batch_size, case.scope(prune=False, **random.choice((FEW, SOME)))
    )
    plans = list(itertools.islice(complete_plans(case, shape, options), MOST_PLANS + 1))
    return (case, shape, options, plans) if 0 < len(plans) <= MOST_PLANS else None


def found_in_order(search: PlanSearch, upper: float = math.inf) -> list[tuple[float, Complete]]:
    return list(iter(lambda: search.next_plan(upper), None))


def key(plan: Complete) -> tuple[object, ...]:
    return tuple((id(choice.option), choice.first, choice.end) for choice in plan)


@pytest.mark.parametrize("block", range(6))
def test_search_meets_every_plan_once_in_the_order_of_bounds_that_hold(block: int) -> None:
    """Of what comes out, what fits is what enumeration finds; the root bounds them all, and no
    bound exceeds the judged time."""
    compared = 0
    for seed in range(block * 25, block * 25 + 25):
        case_of = drawn(seed)
        if case_of is None:
            continue
        case, shape, options, plans = case_of
        search = case.search(shape, options)
        root, found = search.bound, found_in_order(search)
        bounds = [bound for bound, _ in found]
        judged = case.seconds(shape, [plan for _, plan in found])
        assert root <= bounds[0] * (1 + 1e-12)
        assert all(one <= other * (1 + 1e-12) for one, other in itertools.pairwise(bounds))
        assert len({key(plan) for _, plan in found}) == len(found)
        fitting = {
            key(plan)
            for (_, plan), seconds in zip(found, judged, strict=True)
            if seconds < math.inf
        }
        assert fitting == {key(plan) for plan in plans}
        assert all(
            bound <= seconds * (1 + 1e-9) for bound, seconds in zip(bounds, judged, strict=True)
        )
        compared += 1
    assert compared >= 10


@pytest.mark.parametrize("block", range(4))
def test_stopping_at_the_best_judged_time_misses_nothing(block: int) -> None:
    """A search that stops where the next bound passes its best has the best of all plans."""
    for seed in range(1000 + block * 25, 1025 + block * 25):
        case_of = drawn(seed)
        if case_of is None:
            continue
        case, shape, options, plans = case_of
        search, best = case.search(shape, options), math.inf
        while (following := search.next_plan(best)) is not None:
            best = min(best, case.seconds(shape, [following[1]])[0])
        assert best == pytest.approx(min(case.seconds(shape, plans)), rel=1e-9)
        upper = best * 1.01
        bounded = PlanSearch(
            case.menu(shape, options), case.counts, sum(case.counts), upper, only_kind=False
        )
        assert min(
            case.seconds(shape, [plan for _, plan in found_in_order(bounded, upper)])
        ) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(40))
def test_one_search_over_several_schedules_bounds_the_best_of_them(seed: int) -> None:
    case = random_case(seed, NARROW)
    shape = case.shapes[-1]
    several = replace(
        shape, schedules=case.schedules if shape.num_micro_batches >= 4 else case.schedules[:1]
    )
    options = case.options(shape.micro_batch_size, case.scope(prune=False, **FEW))
    alone = [replace(several, schedules=(schedule,)) for schedule in several.schedules]
    plans = [
        list(itertools.islice(complete_plans(case, one, options), MOST_PLANS)) for one in alone
    ]
    best = min(min(case.seconds(one, some)) for one, some in zip(alone, plans, strict=True) if some)
    search = case.search(several, options)
    assert search.bound <= best * (1 + 1e-9)
    found = [plan for _, plan in found_in_order(search, best * (1 + 1e-9))]
    assert min(case.seconds(several, found)) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("block", range(4))
def test_descending_finds_a_plan_wherever_there_is_one(block: int) -> None:
    """Under one forward, one backward, whose memory the tables describe exactly."""
    for seed in range(2000 + block * 25, 2025 + block * 25):
        case = random_case(seed, LARGE)
        shape = replace(case.shapes[0], schedules=(ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),))
        options = case.options(shape.micro_batch_size, case.scope(prune=False, **FEW))
        exists = next(complete_plans(case, shape, options), None) is not None
        plans = list(case.search(shape, options).descend(math.inf)) if options else []
        assert any(seconds < math.inf for seconds in case.seconds(shape, plans)) == exists


def test_bound_holds_where_layers_differ_in_the_share_of_their_forward() -> None:
    """The drain of (2) counts forwards: a stage of layers with longer forwards than the model's
    average has more."""
    layers = [
        Layer(
            name="layer",
            kind="block",
            forward_flop=forward * 0.78e12,
            backward_flop=backward * 0.70e12,
            parameters=0,
            activation_bytes=0.0,
            output_bytes=1.0,
        )
        for forward, backward in ((1.0, 1.0), (0.08, 0.72))
    ]
    kinds, nodes = [kind_fields("a", flops=1, memory=1e9)], [node_fields("a", per_node=2)]
    case = Case(
        chain=Chain(name="uneven", layers=tuple(layers), sequence_length=1, dtype=Dtype.BF16),
        cluster=cluster_of({"name": "pair", "kinds": kinds, "nodes": nodes}),
        global_batch=2,
    )
    shape = next(shape for shape in case.shapes if shape.num_micro_batches == 2)
    search = case.search(shape, case.options(1, case.scope(**FEW)))
    for bound, plan in found_in_order(search):
        assert bound <= case.seconds(shape, [plan])[0] * (1 + 1e-9)


def test_bound_holds_where_tied_layers_share_a_stage() -> None:
    """Their weights are updated once."""
    random = Random(0)
    case = random_case(0, Recipe(max_devices=1, max_layers=1, tight=False, batches=(1,)))
    (layer,) = case.chain.layers
    tied = replace(layer, parameters=0, tied_to=0, tied_parameters=layer.parameters)
    case = replace(case, chain=replace(case.chain, layers=(layer, tied)))
    shape = random.choice(case.shapes)
    for bound, plan in found_in_order(case.search(shape, case.options(1, case.scope()))):
        (end,) = simulate(
            case.placed(shape, plan), case.chain, case.cluster, model=case.model
        ).iteration_ends
        assert bound <= end * (1 + 1e-9)


def test_bound_holds_where_stages_share_nodes_of_two_kinds() -> None:
    """All devices of one kind hand on to all of the other inside their nodes, however narrow the
    NICs are."""
    nodes = {
        **node_fields("a", count=2, nic=0.01),
        "devices": [{"kind": f"kind-{n}", "count": 2} for n in "ab"],
    }
    kinds = [kind_fields(name, flops=1, memory=1e12) for name in "ab"]
    chain = random_case(0, Recipe(max_layers=2, wide=False)).chain
    layer = replace(chain.layers[0], parameters=1)
    layers = (layer, replace(layer, name="other"))
    cluster = cluster_of({"name": "mixed", "kinds": kinds, "nodes": [nodes]})
    case = Case(chain=replace(chain, layers=layers), cluster=cluster, global_batch=4)
    shape = next(shape for shape in case.shapes if shape.num_micro_batches == 1)
    options = case.options(4, case.scope(mixed=False, **FEW))
    whole = {vector: row for vector, row in options.items() if vector in ((4, 0), (0, 4))}
    for bound, plan in found_in_order(case.search(shape, whole)):
        (end,) = simulate(
            case.placed(shape, plan), case.chain, case.cluster, model=case.model
        ).iteration_ends
        assert bound <= end * (1 + 1e-9)


@pytest.mark.parametrize("block", range(4))
def test_bounds_hold_in_the_exact_engine(block: int) -> None:
    """Also for plans on devices, where stages share NICs and replicas hand on at different
    moments."""
    played = 0
    for seed in range(3000 + block * 15, 3015 + block * 15):
        case_of = drawn(seed)
        if case_of is None:
            continue
        case, shape, options, _ = case_of
        least = shape.num_micro_batches * throughput_bound(case.prices, shape.micro_batch_size)
        for bound, plan in found_in_order(case.search(shape, options))[:200:20]:
            if math.isinf(case.seconds(shape, [plan])[0]):
                continue
            placed = case.placed(shape, plan)
            (end,) = simulate(placed, case.chain, case.cluster, model=case.model).iteration_ends
            assert least <= end * (1 + 1e-9)
            assert bound <= end * (1 + 1e-9)
            played += 1
    assert played >= 15


@pytest.mark.parametrize("kind", [ScheduleKind.ZERO_BUBBLE, ScheduleKind.GPIPE])
def test_bounds_hold_under_schedules_outside_the_usual_ones(kind: ScheduleKind) -> None:
    """Half a backward is waited for, or all forwards come first: every plan that fits comes out, in
    the order of bounds that neither the judge nor the exact engine is below."""
    compared = played = 0
    for seed in range(4000, 4060):
        case = replace(
            random_case(seed, NARROW if seed % 2 else LARGE), schedules=(ScheduleSpec(kind=kind),)
        )
        shape = case.shapes[seed % len(case.shapes)]
        options = case.options(shape.micro_batch_size, case.scope(prune=False, **FEW))
        plans = list(itertools.islice(complete_plans(case, shape, options), MOST_PLANS // 4 + 1))
        if not 0 < len(plans) <= MOST_PLANS // 4:
            continue
        found = found_in_order(case.search(shape, options))
        judged = case.seconds(shape, [plan for _, plan in found])
        fitting = {
            key(plan)
            for (_, plan), seconds in zip(found, judged, strict=True)
            if seconds < math.inf
        }
        assert fitting == {key(plan) for plan in plans}, seed
        assert all(
            bound <= seconds * (1 + 1e-9) for (bound, _), seconds in zip(found, judged, strict=True)
        ), seed
        for (bound, plan), seconds in list(zip(found, judged, strict=True))[
            :: max(1, len(found) // 4)
        ]:
            if seconds < math.inf:
                (end,) = simulate(
                    case.placed(shape, plan), case.chain, case.cluster, model=case.model
                ).iteration_ends
                assert bound <= end * (1 + 1e-9), seed
                played += 1
        compared += 1
    assert compared >= 15
    assert played >= 30


@pytest.mark.parametrize("seed", range(5000, 5030))
def test_kinds_divide_all_plans_and_their_bounds_hold(seed: int) -> None:
    """Every plan comes out of the menu of its own kind only; bounds hold for the exact engine, on
    whole nodes too."""
    recipe = Recipe(
        max_devices=6,
        max_layers=4,
        batches=(2, 4),
        per_node=(1, 2),
        wide=seed % 2 == 0,
        tight=False,
    )
    case = random_case(seed, recipe)
    shape = case.shapes[seed % len(case.shapes)]
    options = case.options(shape.micro_batch_size, case.scope(prune=False, **FEW))
    plans = list(itertools.islice(complete_plans(case, shape, options), MOST_PLANS // 4))
    if not options or len(plans) == MOST_PLANS // 4:
        return
    found = []
    for menu in case.menu(shape, options).by_kind():
        found += found_in_order(
            PlanSearch(menu, case.counts, sum(case.counts), math.inf, slack=None)
        )
    judged = case.seconds(shape, [plan for _, plan in found])
    fitting = [
        key(plan) for (_, plan), seconds in zip(found, judged, strict=True) if seconds < math.inf
    ]
    assert len(fitting) == len(set(fitting))
    assert set(fitting) == {key(plan) for plan in plans}
    for (bound, plan), seconds in list(zip(found, judged, strict=True))[:: max(1, len(found) // 6)]:
        if seconds < math.inf:
            (end,) = simulate(
                case.placed(shape, plan), case.chain, case.cluster, model=case.model
            ).iteration_ends
            assert bound <= end * (1 + 1e-9)


def test_transfers_between_fixed_stages_count_all_samples_that_both_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan with one stage of several replicas still hands whole micro-batches from single device
    to single device: bounds rise by that, and stay below the exact engine."""
    raised = 0
    for seed in range(5000, 5060):
        recipe = replace(NARROW, batches=(4, 6), per_node=(1,))
        case = random_case(seed, recipe)
        shape = case.shapes[seed % 2]
        options = case.options(shape.micro_batch_size, case.scope(prune=False, mixed=False, **FEW))
        if not options:
            continue
        menu = next(
            (m for m in case.menu(shape, options).by_kind() if m.kind is PlanKind.ALIKE), None
        )
        if menu is None:
            continue
        arguments = (menu, case.counts, sum(case.counts), math.inf)
        found = found_in_order(PlanSearch(*arguments, slack=None))[:400]
        with monkeypatch.context() as patch:
            patch.setattr(Menu, "paired", lambda self, row, rows, cut, outside: 0.0 * rows)
            before = {
                key(plan): bound
                for bound, plan in found_in_order(PlanSearch(*arguments, slack=None))
            }
        assert all(bound >= before[key(plan)] * (1 - 1e-9) for bound, plan in found)
        higher = [(bound, plan) for bound, plan in found if bound > before[key(plan)] * (1 + 1e-6)]
        for bound, plan in higher[:: max(1, len(higher) // 8)]:
            (end,) = simulate(
                case.placed(shape, plan), case.chain, case.cluster, model=case.model
            ).iteration_ends
            assert bound <= end * (1 + 1e-9)
            raised += 1
    assert raised >= 20
