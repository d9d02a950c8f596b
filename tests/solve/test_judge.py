"""The judge against the engines, and the recurrence that it stands on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracles import recurrence_end
from support.planning_cases import (
    Case,
    Recipe,
    cluster_of,
    complete_plans,
    kind_fields,
    node_fields,
    random_case,
)
from support.strategies import full_mesh, schedules

from argosy.cluster.trace import Trace
from argosy.dtype import Dtype
from argosy.plan.plan import Recompute
from argosy.schedule import ScheduleKind, ScheduleSpec, build_schedule
from argosy.schedule.generate import default_depth, group_size, usual_depth
from argosy.sim.constant import pipeline_seconds
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.fold import fold_plan
from argosy.sim.folded import folded_seconds
from argosy.sim.simulate import simulate
from argosy.solve.finalists.judge import Complete, Judge
from argosy.solve.search.pipeline import Choice
from argosy.solve.search.shape import Shape
from argosy.space.option import Option
from argosy.space.shares import share_samples
from argosy.workload.chain import Chain, Layer
from benchmarks.bare_pipeline import StageCost, pipeline_graph

FAMILY = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.EAGER, ScheduleKind.KFKB)
seconds = st.floats(0.125, 8)


@settings(max_examples=60, deadline=None)
@given(schedule=schedules(kinds=FAMILY, max_stages=5, max_micro_batches=9), data=st.data())
def test_the_recurrence_equals_the_exact_engine_and_the_oracle_on_dedicated_links(
    schedule, data
) -> None:
    """For every schedule of the family, depths given or not, with links that take no latency."""
    count, num_stages = schedule.num_micro_batches, schedule.num_stages
    costs = [
        StageCost(
            forward=data.draw(seconds), backward=data.draw(seconds), output_bytes=data.draw(seconds)
        )
        for _ in range(num_stages)
    ]
    mesh = full_mesh(num_stages, bandwidths=(Trace.constant(2.0),))
    graph = pipeline_graph(schedule, costs, [device.name for device in mesh.devices])
    ours = pipeline_seconds(
        _spec(schedule),
        count,
        forward=np.array([[cost.forward] for cost in costs]),
        backward=np.array([[cost.backward] for cost in costs]),
        transfer=np.array([[cost.output_bytes / 2.0] for cost in costs]),
        latency=np.zeros((num_stages, 1)),
        tail=np.zeros((num_stages, 1)),
    )
    (end,) = simulate_exact(graph, mesh).iteration_ends
    assert ours[0] == pytest.approx(end, rel=1e-9)
    assert recurrence_end(graph, mesh) == pytest.approx(end, rel=1e-9)


def _spec(schedule) -> ScheduleSpec:
    """What a schedule of the family was made from."""
    depths = [
        sum(1 for _ in itertools.takewhile(lambda a: a.kind.name == "FORWARD", row))
        for row in schedule.rows
    ]
    count = schedule.num_micro_batches
    group = max(_group(row, depth, count) for row, depth in zip(schedule.rows, depths, strict=True))
    return ScheduleSpec(kind=ScheduleKind.KFKB, k=group, depth=tuple(depths))


def _group(row, depth: int, count: int) -> int:
    """Backwards in a row after the warm-up; all of them where nothing follows."""
    if depth == count:
        return 1
    return sum(
        1 for _ in itertools.takewhile(lambda action: action.kind.name == "BACKWARD", row[depth:])
    )


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [ScheduleKind.ONE_F_ONE_B, ScheduleKind.EAGER, ScheduleKind.KFKB])
def test_micro_batches_in_flight_are_those_of_the_schedule(kind: ScheduleKind, k: int) -> None:
    spec = ScheduleSpec(kind=kind, k=k)
    for num_stages, count in itertools.product(range(1, 6), (k, 7, 12)):
        depths = tuple(usual_depth(spec, left, count) for left in range(num_stages, 0, -1))
        assert depths == default_depth(spec, num_stages, count)
        row = build_schedule(spec, num_stages, count).rows[0]
        if depths[0] + group_size(spec, count) < count:
            assert _group(row, depths[0], count) == group_size(spec, count)


@pytest.mark.parametrize(
    "spec",
    [
        ScheduleSpec(kind=ScheduleKind.KFKB, k=2, depth=(6, 4, 4, 2)),
        ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE),
        ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2),
    ],
)
def test_few_candidates_and_many_are_timed_alike(spec: ScheduleSpec) -> None:
    random = np.random.default_rng(0)
    names = ("forward", "backward", "transfer", "latency", "tail")
    arrays = dict(zip(names, random.uniform(0.1, 2, (5, 4, 50)), strict=True))
    many = pipeline_seconds(spec, 8, **arrays)
    for column in range(50):
        one = pipeline_seconds(
            spec, 8, **{name: values[:, column : column + 1] for name, values in arrays.items()}
        )
        assert one[0] == many[column]


def test_the_tail_of_a_stage_counts_from_its_own_last_backward() -> None:
    """Two stages, one micro-batch: F0 0..1, F1 1..2, B1 2..4, B0 4..6."""

    def end(first_tail: float, last_tail: float) -> float:
        ones, twos, zeros = np.ones((2, 1)), np.full((2, 1), 2.0), np.zeros((2, 1))
        tail = np.array([[first_tail], [last_tail]])
        times = {
            "forward": ones,
            "backward": twos,
            "transfer": zeros,
            "latency": zeros,
            "tail": tail,
        }
        return float(pipeline_seconds(ScheduleSpec(), 1, **times)[0])

    assert end(0, 0) == 6
    assert end(0, 1.5) == 6
    assert end(0, 3) == 7
    assert end(0.5, 2) == 6.5


def some_plans(
    seed: int, recipe: Recipe, zero: tuple[int, ...]
) -> tuple[Case, Shape, list[Complete]]:
    """Up to six plans of a random case."""
    random = Random(seed)
    case = random_case(seed, recipe)
    shape = random.choice(case.shapes)
    scope = case.scope(prune=False, zero=zero, recompute=(Recompute.NONE,))
    plans = list(
        itertools.islice(
            complete_plans(case, shape, case.options(shape.micro_batch_size, scope)), 2000
        )
    )
    return case, shape, random.sample(plans, min(6, len(plans)))


def exact(case: Case, shape: Shape, plan: Complete) -> float:
    (end,) = simulate(
        case.placed(shape, plan), case.chain, case.cluster, model=case.model
    ).iteration_ends
    return end


@pytest.mark.parametrize("seed", range(40))
def test_up_to_two_stages_of_one_device_are_judged_exactly(seed: int) -> None:
    """Nothing is shared where each direction between two devices has one message at a time."""
    recipe = Recipe(max_devices=2, max_layers=4, wide=False, per_node=(1,), tight=False)
    case, shape, plans = some_plans(seed, recipe, zero=(1,))
    for plan in plans:
        if all(choice.option.replicas == 1 for choice in plan):
            assert case.seconds(shape, [plan])[0] == pytest.approx(
                exact(case, shape, plan), rel=1e-9
            )


def folded(case: Case, shape: Shape, plan: Complete) -> float:
    """The exact engine's time of the folded plan."""
    graph, cluster = fold_plan(case.placed(shape, plan), case.chain, case.cluster, case.model)
    (end,) = simulate_exact(graph, cluster, record=0).iteration_ends
    return end


@pytest.mark.parametrize("zero", [1, 3])
def test_the_judge_is_within_a_twentieth_of_the_exact_engine(zero: int) -> None:
    """At the 95th percentile over random cases."""
    errors = []
    for seed in range(60):
        case, shape, plans = some_plans(seed, Recipe(max_devices=8, max_layers=5), zero=(zero,))
        for plan, judged in zip(plans, case.seconds(shape, plans), strict=True):
            errors.append(abs(judged / folded(case, shape, plan) - 1))
    errors.sort()
    assert len(errors) > 100
    assert errors[int(0.95 * len(errors))] <= 0.05


@pytest.mark.parametrize("seed", range(30))
def test_folded_plans_take_what_they_take_in_the_exact_engine(seed: int) -> None:
    recipe = Recipe(max_devices=8, max_layers=5, outputs=4.0)
    for zero in (1, 2, 3):
        case, shape, plans = some_plans(seed, recipe, zero=(zero,))
        for plan in plans[:3]:
            seconds = folded_seconds(case.placed(shape, plan), case.chain, case.cluster, case.model)
            assert seconds == pytest.approx(folded(case, shape, plan), rel=1e-9)


def pipeline_on(
    nodes: list[dict[str, object]], lengths: Sequence[int], shape: Shape
) -> tuple[Case, Complete]:
    """Stages of one device each, in the order of the nodes, with outputs that matter."""
    layer = Layer(
        name="layer",
        kind="block",
        forward_flop=1e11,
        backward_flop=2e11,
        parameters=10**6,
        activation_bytes=1e6,
        output_bytes=1e8,
    )
    chain = Chain(name="drawn", layers=(layer,) * sum(lengths), sequence_length=1, dtype=Dtype.BF16)
    content = {"name": "drawn", "kinds": [kind_fields("a", flops=1.0, memory=1e12)], "nodes": nodes}
    batch = shape.num_micro_batches * shape.micro_batch_size
    case = Case(chain=chain, cluster=cluster_of(content), global_batch=batch)
    parts = share_samples(case.prices, [(0, 1, 1)], shape.micro_batch_size, Recompute.NONE)
    assert parts is not None
    option = Option(prices=case.prices, vector=(1,), parts=parts, recompute=Recompute.NONE, zero=0)
    ends = list(itertools.accumulate(lengths))
    return case, tuple(
        Choice(option, end - size, end) for size, end in zip(lengths, ends, strict=True)
    )


SLOW = node_fields("a", count=3, per_node=2, intra=20.0, nic=0.2)
BUS = node_fields("a", per_node=3, intra=0.5)
BUS["intra"][0]["shared"] = True
PAIRS = node_fields("a", count=3, per_node=2, intra=20.0, nic=0.6)


@pytest.mark.parametrize(
    ("nodes", "lengths", "count", "schedule"),
    [
        pytest.param(
            [SLOW], [2, 2, 2, 2, 2, 2], 8, ScheduleSpec(), id="neighbours that do not share a node"
        ),
        pytest.param([BUS], [2, 2, 2], 12, ScheduleSpec(), id="both directions over one bus"),
        pytest.param(
            [PAIRS], [1] * 6, 24, ScheduleSpec(kind=ScheduleKind.KFKB, k=4), id="long kfkb"
        ),
    ],
)
def test_shared_links_are_judged(
    nodes: list[dict[str, object]], lengths: list[int], count: int, schedule: ScheduleSpec
) -> None:
    shape = Shape(num_micro_batches=count, micro_batch_size=1, schedules=(schedule,))
    case, plan = pipeline_on(nodes, lengths, shape)
    assert case.seconds(shape, [plan])[0] == pytest.approx(folded(case, shape, plan), rel=0.05)


def stage_alone(case: Case, micro_batch: int, zero: int) -> Complete:
    """All devices of the first pool as replicas of one stage."""
    count = case.pools[0].count
    parts = share_samples(case.prices, [(0, 1, count)], micro_batch, Recompute.NONE)
    assert parts is not None
    vector = (count, *(0,) * (len(case.pools) - 1))
    option = Option(
        prices=case.prices, vector=vector, parts=parts, recompute=Recompute.NONE, zero=zero
    )
    return (Choice(option, 0, len(case.chain.layers)),)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_replicas_of_one_stage_are_judged_exactly(seed: int, zero: int) -> None:
    """Compute, gradient exchange and update of one stage on a node for every replica."""
    recipe = Recipe(
        max_devices=4,
        max_pools=1,
        max_layers=3,
        wide=False,
        per_node=(1,),
        tight=False,
        batches=(4,),
    )
    case = random_case(seed, replace(recipe, min_devices=2))
    assert case.counts[0] > 1
    shape = next(shape for shape in case.shapes if shape.num_micro_batches == 1)
    plan = stage_alone(case, 4, zero)
    judged = case.seconds(shape, [plan])[0]
    assert judged < math.inf
    assert judged == pytest.approx(exact(case, shape, plan), rel=1e-6)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_replicas_under_heavier_zero_are_judged_closely(seed: int, zero: int) -> None:
    """The judge lets the traffic of ZeRO 2 and 3 hide behind forward and backward alike; the engine
    hides each exchange behind the action before it."""
    recipe = Recipe(
        max_devices=4,
        max_pools=1,
        max_layers=3,
        wide=False,
        per_node=(1,),
        tight=False,
        batches=(4,),
    )
    case = random_case(seed, replace(recipe, min_devices=2))
    for shape in case.shapes:
        if case.counts[0] <= shape.micro_batch_size:
            plan = stage_alone(case, shape.micro_batch_size, zero)
            assert 0.7 < case.seconds(shape, [plan])[0] / exact(case, shape, plan) < 1.4


def test_the_judge_tells_options_apart_that_come_and_go() -> None:
    """Options are judged by what they are, also where one takes the place in memory of another that
    is gone."""
    recipe = Recipe(
        max_devices=8, max_layers=4, max_pools=2, outputs=8.0, tight=False, per_node=(1, 2)
    )
    case = next(
        case
        for case in (random_case(seed, recipe) for seed in range(100))
        if len(case.counts) == len(case.chain.layers) == 2
    )
    shape = next(shape for shape in case.shapes if shape.num_micro_batches == 1)
    judge = Judge(case.prices, case.cluster)
    vectors = [(1, 0), (0, 1)] * 50
    Random(0).shuffle(vectors)
    for one, other in itertools.pairwise(vectors):
        options = []
        for vector in (one, other):
            parts = share_samples(
                case.prices, [(vector.index(1), 1, 1)], case.global_batch, Recompute.NONE
            )
            assert parts is not None
            options.append(
                Option(
                    prices=case.prices, vector=vector, parts=parts, recompute=Recompute.NONE, zero=0
                )
            )
        plan = tuple(
            Choice(option, first, end)
            for option, first, end in zip(options, (0, 1), (1, 2), strict=True)
        )
        fresh = Judge(case.prices, case.cluster).seconds(shape, [plan])[0]
        assert judge.seconds(shape, [plan])[0] == fresh
