"""Tensor-parallel groups that fill several nodes: their prices, their bounds, and what they gain."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from support.planning_cases import (
    FOLDED,
    Case,
    Recipe,
    best_of_all,
    cluster_of,
    complete_plans,
    found_best,
    kind_fields,
    node_fields,
    plan_of,
    random_case,
)

from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan
from argosy.planner import Settings, find_plan
from argosy.solve.spanning import inside_nodes, spanning_options
from argosy.space.enumerate import spanning_parts, stage_parts
from argosy.space.prune import Counters
from argosy.space.rate import width_bound

SAME = 1e-9


def wide(seed: int, nic: float = 10.0, **changes: object) -> Case:
    """Return a random case of one kind of nodes, of one or two devices, with fast NICs and layers
    that groups of four can share."""
    recipe = Recipe(
        max_devices=4, min_devices=2, max_pools=1, max_layers=3, batches=(1, 2), per_node=(1, 2)
    )
    case = random_case(seed, replace(recipe, **changes))
    layers = tuple(replace(layer, max_tensor_width=4) for layer in case.chain.layers)
    (pool,) = case.pools
    kind = kind_fields("a", flops=2.0, memory=pool.device.kind.memory)
    nodes = node_fields(
        "a", count=len(pool.nodes), per_node=pool.per_node, nic=nic, latency=seed % 3
    )
    cluster = cluster_of({"name": "fast", "kinds": [kind], "nodes": [nodes]})
    return replace(case, chain=replace(case.chain, layers=layers), cluster=cluster)


def has_spanning_group(plan: Plan) -> bool:
    groups = (
        group
        for stage in plan.stages
        for replica in stage.replicas
        for group in replica.parts(stage.context)
    )
    return any(len({name.partition(".")[0] for name in group}) > 1 for group in groups)


@pytest.mark.parametrize("per_node", [1, 2, 3, 4])
@pytest.mark.parametrize("is_shared", [False, True])
def test_reductions_are_priced_as_the_exact_engine_plays_them(
    per_node: int, *, is_shared: bool
) -> None:
    """A replica that has the cluster to itself: its price is that of the fastest algorithm, less
    some latencies."""
    for nodes, nic, latency, intra in itertools.product(
        (2, 3, 4), (0.5, 40.0), (0.0, 3.0), (1, 30)
    ):
        case = random_case(3, Recipe(max_devices=2, max_pools=1, max_layers=3, tight=False))
        layers = tuple(replace(layer, max_tensor_width=16) for layer in case.chain.layers)
        fields = node_fields(
            "a", count=nodes, per_node=per_node, intra=intra, nic=nic, latency=latency
        )
        fields["intra"] = [{**fields["intra"][0], "shared": is_shared}]
        kind = kind_fields("a", flops=2.0, memory=1e13)
        content = {"name": "alone", "kinds": [kind], "nodes": [fields]}
        cluster = cluster_of(content)
        case = replace(
            case, chain=replace(case.chain, layers=layers), cluster=cluster, global_batch=2
        )
        shape = next(shape for shape in case.shapes if shape.num_micro_batches == 1)
        everything = (nodes * per_node,)
        options = case.options(2, case.scope(widths=everything, prune=False))[everything]
        (plan,) = (
            plan
            for plan in complete_plans(case, shape, {everything: options})
            if str(plan[0].option.recompute) == "none" and len(plan) == 1
        )
        placed = case.placed(shape, plan)
        priced = sum(plan[0].option.seconds(0, case.prices.num_layers))
        priced += plan[0].option.tail(0, case.prices.num_layers)
        assert has_spanning_group(placed)
        played = case.played(placed)
        assert priced <= played * (1 + SAME)
        if not latency:
            assert priced == pytest.approx(played, rel=SAME)


@pytest.mark.parametrize("block", range(3))
def test_no_plan_of_an_enumeration_is_faster(block: int) -> None:
    """Level 2 with a gap of 0 finds the best of all plans, some with a group across nodes, and its
    certificate holds for all of them."""
    spanning = compared = 0
    for seed in range(block * 8, block * 8 + 8):
        case = wide(seed)
        best = best_of_all(case, case.scope(), 30_000)
        if best is None or best[0] == math.inf:
            continue
        compared += 1
        plan, seconds = found_best(
            case, Settings(level=2, gap=0.0, schedules=case.schedules, spanning=True)
        )
        assert plan is not None and plan.certificate is not None
        assert seconds <= best[0] * (1 + FOLDED)
        assert plan.certificate.lower_bound_seconds <= best[0] * (1 + SAME)
        spanning += has_spanning_group(plan)
    assert compared > 3 and spanning > 0


@pytest.mark.parametrize("seed", range(12))
def test_more_freedom_makes_no_plan_slower(seed: int) -> None:
    """A plan with groups across nodes is only returned if it is faster, and level 2 is no slower
    than level 1."""
    case = wide(seed, nic=(0.5, 3.0, 20.0)[seed % 3], max_devices=6, max_layers=4)
    settings = Settings(schedules=case.schedules, spanning=True)
    _, inside = found_best(case, replace(settings, spanning=False))
    _, first = found_best(case, settings)
    _, second = found_best(case, replace(settings, level=2))
    assert first <= inside * (1 + SAME)
    assert second <= first * (1 + SAME)


@pytest.mark.parametrize("seed", range(16))
def test_options_out_of_reach_are_in_no_plan_that_is_as_fast(seed: int) -> None:
    """What level 1 drops before it looks at plans would not have been in a plan below the time."""
    case = wide(seed, nic=(0.5, 5.0)[seed % 2])
    scope = case.scope()
    for shape in case.shapes[:2]:
        size = shape.micro_batch_size
        plans = list(complete_plans(case, shape, case.options(size, scope)))[:4000]
        times = case.seconds(shape, plans) if plans else []
        for limit in sorted(times)[:: max(1, len(times) // 4)]:
            kept = spanning_options(case.prices, shape, scope, Counters(), {}, limit + SAME)
            ways = {option.parts for row in kept.values() for option in row}
            for plan, seconds in zip(plans, times, strict=True):
                if seconds <= limit < math.inf:
                    spanning = [c.option.parts for c in plan if c.option.has_spanning_group]
                    assert ways.issuperset(spanning)


def test_parts_with_a_group_across_nodes_are_those_that_a_scope_without_them_lacks() -> None:
    case = wide(1, max_devices=4, per_node=(2,), min_devices=4)
    scope = case.scope()
    inside = stage_parts(case.prices, 2, inside_nodes(scope), Counters())
    both = stage_parts(case.prices, 2, scope, Counters())
    rare = spanning_parts(case.prices, 2, scope, Counters())
    assert rare
    for vector, ways in both.items():
        expected = [way for way in ways if way not in inside.get(vector, [])]
        assert rare.get(vector, []) == expected


@pytest.mark.parametrize("count", [4, 24])
def test_a_layer_that_fits_in_no_node_is_shared_across_nodes(count: int) -> None:
    """One sample of one layer needs two devices; on more than 16 devices groups across nodes are
    the second try."""
    case = wide(0, max_layers=1, per_node=(1,), max_devices=2)
    (layer,) = case.chain.layers
    needed = 16 * layer.parameters + layer.activation_bytes
    kind = kind_fields("a", flops=2.0, memory=0.8 * needed)
    nodes = node_fields("a", count=count, per_node=1, nic=10.0)
    cluster = cluster_of({"name": "small", "kinds": [kind], "nodes": [nodes]})
    case = replace(case, cluster=cluster, global_batch=1)
    with pytest.raises(InfeasibleError):
        plan_of(case, Settings(spanning=False))
    plan = plan_of(case, Settings())
    assert has_spanning_group(plan)
    assert plan.certificate is not None
    assert "groups also across nodes" in plan.certificate.scope


def default_plan(case: Case, **changes: object) -> tuple[Plan | None, float]:
    """Return the plan under default settings or some changes of them, and its exact time."""
    settings = replace(Settings(schedules=case.schedules), **changes)
    job = {"global_batch": case.global_batch, "settings": settings, "model": case.model}
    try:
        plan = find_plan(case.chain, case.cluster, **job)
    except InfeasibleError:
        return None, math.inf
    return plan, case.played(plan)


def check_requested_widths(case: Case, level: int) -> bool:
    """Check that no requested width gives a faster plan than the defaults and that certificates
    hold; return whether the best plan has a group across nodes, though one inside fits."""
    plan, seconds = default_plan(case, level=level)
    inside = default_plan(case, level=level, spanning=False)[1]
    times = {
        width: min(default_plan(case, level=least, width=width)[1] for least in {1, level})
        for width in (1, 2, 3, 4)
    }
    assert seconds <= min(inside, *times.values()) * (1 + SAME), times
    if plan is None:
        return False
    assert plan.certificate is not None
    bound = plan.certificate.lower_bound_seconds
    assert bound <= inside * (1 + SAME)
    assert plan.certificate.gap == pytest.approx(seconds / bound - 1, abs=SAME)
    covered = [width for width in times if f"tensor width {width}," in plan.certificate.scope]
    for width in covered:
        assert bound <= times[width] * (1 + SAME)
    is_stated = bool(covered) or "groups also across nodes" in plan.certificate.scope
    assert is_stated or not has_spanning_group(plan)
    return has_spanning_group(plan) and inside < math.inf


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 9))]
)
def test_no_requested_width_gives_a_faster_plan(block: int, level: int) -> None:
    faster = 0
    for seed in range(block * 4, block * 4 + 4):
        changes = {"batches": (1, 2, 4), "tight": seed % 3 == 0}
        case = wide(seed, nic=(3.0, 40.0)[seed % 2], **changes)
        faster += check_requested_widths(case, level)
    assert faster > 0 or block > 0


def test_the_bound_of_a_width_bounds_every_plan_of_it() -> None:
    recipe = Recipe(
        min_devices=2, max_devices=4, max_pools=2, max_layers=3, batches=(1, 2), tight=False
    )
    ratios: dict[int, float] = {}
    for seed in range(10):
        case = random_case(seed, recipe)
        for width, shape in itertools.product((1, 2, 4), case.shapes[:2]):
            size = shape.micro_batch_size
            bound = width_bound(case.prices, size, shape.num_micro_batches, width)
            options = case.options(size, case.scope(widths=(width,)))
            plans = list(itertools.islice(complete_plans(case, shape, options), 300))
            for seconds in case.seconds(shape, plans) if plans else ():
                assert bound <= seconds * (1 + SAME)
                ratios[width] = max(bound / seconds, ratios.get(width, 0.0))
    assert all(ratios[width] > 0.7 for width in (1, 2)), ratios


@pytest.mark.parametrize("nodes", [4, 5])
def test_one_node_more_than_a_group_fills_makes_no_plan_slower(nodes: int) -> None:
    """A layer that three devices share: a group may fill three of more nodes."""
    case = wide(0, max_layers=1, per_node=(1,), tight=False)
    layers = tuple(replace(layer, max_tensor_width=3) for layer in case.chain.layers)
    case = replace(case, chain=replace(case.chain, layers=layers), global_batch=1)

    def on(count: int) -> float:
        kind = kind_fields("a", flops=2.0, memory=1e13)
        fields = node_fields("a", count=count, per_node=1, nic=1e3)
        cluster = cluster_of({"name": "some", "kinds": [kind], "nodes": [fields]})
        plan, seconds = default_plan(replace(case, cluster=cluster))
        assert plan is not None and len(plan.devices) == 3
        return seconds

    assert on(nodes) <= on(3) * (1 + SAME)


def test_a_width_may_be_requested_that_no_node_has() -> None:
    case = wide(0, per_node=(1,), min_devices=4, tight=False)
    plan = plan_of(case, Settings(width=4))
    assert {replica.width for stage in plan.stages for replica in stage.replicas} == {4}
    with pytest.raises(InfeasibleError):
        plan_of(case, Settings(width=4, spanning=False))
