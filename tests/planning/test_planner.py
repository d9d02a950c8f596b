"""The planner against all plans, and the laws of what it returns."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from support.planning_cases import (
    FOLDED,
    LONG_FLOORS,
    NO_FLOORS,
    Case,
    Recipe,
    best_of_all,
    cluster_of,
    found_best,
    kind_fields,
    node_fields,
    plan_of,
    random_case,
)

from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.errors import InfeasibleError, InputError
from argosy.plan.check import check_plan
from argosy.plan.file import dumps_plan, loads_plan
from argosy.plan.plan import Plan
from argosy.planner import SearchProgress, Settings, find_plan, search_scope
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import simulate
from argosy.space.pool import able_pools
from argosy.workload.chain import Chain, Layer
from argosy.workload.load import load_model

MOST_PLANS = 10_000
SMALL = Recipe(max_devices=8, max_layers=8)
NARROW = Recipe(
    max_devices=6,
    max_pools=2,
    max_layers=5,
    batches=(2, 3, 4, 6),
    outputs=8.0,
    wide=False,
    tight=False,
    per_node=(1, 2),
)
"""What crosses between stages costs as much as what they compute."""
CROWDED = Recipe(
    min_devices=5, max_layers=2, min_pools=2, batches=(2, 3), wide=False, per_node=(1, 2)
)
"""Many devices of two or three kinds."""
RECIPES = (SMALL, NARROW, CROWDED, CROWDED)


def exact_settings(case: Case, **changes: Any) -> Settings:
    """Level 2 to the very end, device by device."""
    settings = Settings(level=2, gap=0, units=case.ones, schedules=case.schedules)
    return replace(settings, **changes)


@pytest.mark.parametrize(
    "block",
    [*range(4), *(pytest.param(block, marks=pytest.mark.exhaustive) for block in range(4, 10))],
)
def test_no_plan_is_faster_than_the_planner_says(block: int) -> None:
    """On up to 8 devices of 3 pools: the best of all plans, and the bound is not above it."""
    compared = larger = 0
    for seed in range(block * 20, block * 20 + 20):
        case = random_case(seed, RECIPES[seed % len(RECIPES)])
        everything = best_of_all(case, case.scope(prune=False), MOST_PLANS)
        if everything is None:
            larger += 1
            continue
        best, _ = everything
        plan, ours = found_best(case, exact_settings(case))
        assert ours == pytest.approx(best, rel=FOLDED), seed
        if plan is None:
            continue
        assert plan.certificate is not None
        assert plan.certificate.lower_bound_seconds <= best * (1 + 1e-8)
        compared += 1
    assert compared >= 8
    assert larger <= 10


@pytest.mark.parametrize("seed", [*range(500, 530), 1042, 1086, 1211, 1263, 1269, 1296, 1382])
def test_pruned_and_unpruned_searches_agree(seed: int) -> None:
    """The last ones have no plan near their throughput bound."""
    case = random_case(seed, Recipe(max_devices=6, max_layers=5, batches=(2, 3, 4, 6)))
    times = [found_best(case, exact_settings(case, prune=prune))[1] for prune in (True, False)]
    assert times[0] == pytest.approx(times[1], rel=FOLDED)


@pytest.mark.parametrize("seed", range(600, 640))
def test_level_1_finds_a_plan_wherever_there_is_one(seed: int) -> None:
    case = random_case(seed, Recipe(max_devices=6, max_layers=5))
    everything = best_of_all(case, case.scope(prune=False), MOST_PLANS)
    settings = Settings(level=1, schedules=case.schedules)
    if everything is not None and math.isinf(everything[0]):
        with pytest.raises(InfeasibleError):
            plan_of(case, settings)
        return
    if everything is not None:
        plan = plan_of(case, settings)
        assert case.judged(plan) >= everything[0] * (1 - 1e-9)
        check_result(case, plan)


FOLDING = 0.25
"""How far a folded simulation, which predicts, was seen from the whole plan's: where rings cross
nodes unevenly."""


def check_result(case: Case, plan: Plan) -> None:
    """What every plan must be, in the checker's, the simulator's and the plain reader's eyes."""
    check_plan(plan, case.chain, case.cluster)
    timeline = simulate(plan, case.chain, case.cluster, model=case.model)
    (end,) = timeline.iteration_ends
    for name, held in timeline.peak_memory().items():
        assert held <= case.cluster.device(name).kind.memory
    used = [name for stage in plan.stages for name in stage.devices]
    left_out = [left.device for left in plan.left_out]
    assert len(used) == len(set(used))
    assert sorted([*used, *left_out]) == sorted(device.name for device in case.cluster.devices)
    assert plan.predicted is not None
    assert plan.certificate is not None
    seconds, bound = plan.predicted.iteration_seconds, plan.certificate.lower_bound_seconds
    assert seconds == pytest.approx(end, rel=FOLDING)
    assert bound <= end * (1 + 1e-9)
    assert plan.certificate.gap == pytest.approx(seconds / bound - 1)


@pytest.mark.parametrize("seed", range(700, 740))
@pytest.mark.parametrize("level", [1, 2])
def test_every_plan_makes_sense_fits_and_names_each_device_once(seed: int, level: int) -> None:
    case = random_case(seed, Recipe(max_devices=8, max_layers=6))
    try:
        plan = plan_of(case, Settings(level=level, schedules=case.schedules))
    except InfeasibleError:
        return
    check_result(case, plan)


def test_stages_are_split_no_wider_than_their_layers_allow() -> None:
    """The wide layer alone would like both devices."""
    case = uniform_case(2, cluster_of(two_kinds(a=(1, 2))), global_batch=1)
    narrow, wide = case.chain.layers
    layers = (narrow, replace(wide, max_tensor_width=2, forward_flop=1e14, backward_flop=2e14))
    case = replace(case, chain=replace(case.chain, layers=layers))
    for level in (1, 2):
        check_result(case, plan_of(case, Settings(level=level)))


def test_a_tensor_parallel_pair_is_placed_behind_stages_of_three() -> None:
    """Where the search takes 3 + 3 + 2 devices of two nodes of 4, the pair still needs a node of
    its own."""
    case = uniform_case(3, cluster_of(two_kinds(a=(2, 4))), global_batch=12)
    first, second, last = case.chain.layers
    last = replace(last, max_tensor_width=2, activation_bytes=80e9)
    case = replace(case, chain=replace(case.chain, layers=(first, second, last)))
    check_result(case, plan_of(case, Settings(level=2, gap=0.1)))


def test_no_runner_up_is_faster_than_the_plan() -> None:
    """Both are played by the exact engine."""
    for seed in range(20):
        case = random_case(seed, replace(NARROW, max_devices=4))
        plan = plan_of(case, exact_settings(case))
        assert plan.predicted is not None
        assert len(plan.runner_ups) <= 3
        assert all(
            other.iteration_seconds >= plan.predicted.iteration_seconds for other in plan.runner_ups
        )


@pytest.mark.parametrize("level", [1, 2])
def test_what_fits_nowhere_is_refused(level: int) -> None:
    case = uniform_case(2, cluster_of(two_kinds(a=(1, 2))), global_batch=4, parameters=10**13)
    with pytest.raises(InfeasibleError):
        plan_of(case, Settings(level=level))


@pytest.mark.parametrize("level", [1, 2])
def test_a_schedule_with_longer_groups_than_micro_batches_is_left_out(level: int) -> None:
    """k = 4 of 6 samples: only micro-batches of 1; of 3 samples: no plan at all."""
    schedules = (ScheduleSpec(kind=ScheduleKind.KFKB, k=4),)
    case = uniform_case(2, cluster_of(two_kinds(a=(1, 2))), global_batch=6)
    assert plan_of(case, Settings(level=level, schedules=schedules)).micro_batch_size == 1
    with pytest.raises((InfeasibleError, InputError)):
        plan_of(replace(case, global_batch=3), Settings(level=level, schedules=schedules))


def test_a_search_without_time_still_has_a_plan_and_a_bound_that_holds() -> None:
    case = uniform_case(4, cluster_of(two_kinds(a=(2, 2), b=(2, 2))), global_batch=12)
    best = plan_of(case, exact_settings(case))
    hurried = plan_of(case, exact_settings(case, time_budget=0.0))
    assert hurried.certificate is not None
    assert best.predicted is not None
    assert hurried.certificate.lower_bound_seconds <= best.predicted.iteration_seconds * (1 + 1e-9)


def uniform_case(
    num_layers: int, cluster: Cluster, *, global_batch: int, parameters: int = 10**8
) -> Case:
    layer = Layer(
        name="layer",
        kind="block",
        forward_flop=1e12,
        backward_flop=2e12,
        parameters=parameters,
        activation_bytes=1e9,
        output_bytes=1e8,
        reduced_bytes=2e8,
    )
    layers = tuple(replace(layer, name=f"layer{index}") for index in range(num_layers))
    chain = Chain(name="uniform", layers=layers, sequence_length=1, dtype=Dtype.BF16)
    return Case(chain=chain, cluster=cluster, global_batch=global_batch)


def two_kinds(**groups: tuple[int, int]) -> dict[str, Any]:
    """A cluster file of ``name=(nodes, devices per node)``; later kinds are faster."""
    kinds = [kind_fields(name, flops=at + 1, memory=100e9) for at, name in enumerate(groups)]
    nodes = [
        node_fields(name, count=count, per_node=each, nic=5.0)
        for name, (count, each) in groups.items()
    ]
    return {"name": "some", "kinds": kinds, "nodes": nodes}


@pytest.mark.parametrize(
    ("groups", "num_layers"),
    [
        ({"a": (3, 4), "b": (9, 4)}, 16),
        ({"a": (1, 2), "b": (3, 2)}, 8),
        ({"a": (1, 5), "b": (1, 7)}, 8),
        ({"a": (5, 1), "b": (7, 1)}, 8),
        ({"a": (1, 1)}, 4),
        ({"a": (2, 4), "b": (1, 8)}, 2),
        ({"a": (1, 3), "b": (1, 3), "c": (1, 3)}, 1),
    ],
)
def test_any_number_of_devices_has_a_plan(
    groups: dict[str, tuple[int, int]], num_layers: int
) -> None:
    case = uniform_case(num_layers, cluster_of(two_kinds(**groups)), global_batch=24)
    check_result(case, plan_of(case, Settings(level=1)))


def without_clock(plan: Plan) -> str:
    assert plan.search is not None
    return dumps_plan(replace(plan, search=replace(plan.search, cpu_seconds=0.0, history=())))


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("seed", [3, 8, 20, 21])
def test_same_input_same_bytes(seed: int, level: int) -> None:
    case = random_case(seed, replace(SMALL, tight=False))
    settings = Settings(level=level, schedules=case.schedules)
    one, other = plan_of(case, settings), plan_of(case, settings)
    assert without_clock(one) == without_clock(other)
    assert loads_plan(dumps_plan(one)) == one


@pytest.mark.parametrize("seed", range(800, 815))
def test_coarse_to_fine_ends_at_the_same_optimum(seed: int) -> None:
    """Without units the search goes through all granularities, the last of which is single
    devices."""
    case = random_case(
        seed, Recipe(max_devices=8, max_layers=4, batches=(2, 4), tight=False, per_node=(2, 4))
    )
    fine, all_the_way = (
        found_best(case, exact_settings(case, units=units))[1] for units in (case.ones, None)
    )
    assert all_the_way == pytest.approx(fine, rel=FOLDED)


def test_progress_only_improves() -> None:
    seen: list[SearchProgress] = []
    case = random_case(21, replace(SMALL, tight=False))
    plan_of(case, exact_settings(case, progress=seen.append))
    assert all(one.seconds >= other.seconds for one, other in itertools.pairwise(seen))
    assert all(one.bound <= other.bound * (1 + 1e-12) for one, other in itertools.pairwise(seen))


@pytest.mark.parametrize("seed", [101, 298, 394])
def test_nodes_that_no_plan_needs_change_nothing(seed: int) -> None:
    """They loosen the throughput bound, so that even the best plan is far above it."""
    batches, outputs = (2, 4), 8.0 if seed % 2 else 1.0
    recipe = Recipe(
        max_devices=5,
        max_layers=4,
        batches=batches,
        per_node=(1, 2),
        wide=seed % 2 == 0,
        outputs=outputs,
    )
    case = random_case(seed, recipe)
    content = json.loads(case.cluster.content)
    content["nodes"][0]["count"] *= 2
    more = replace(case, cluster=cluster_of(content))
    before, after = (found_best(one, exact_settings(one))[1] for one in (case, more))
    assert after == pytest.approx(before, rel=FOLDED)


def better_files(content: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The same cluster with one thing better, in every way there is."""
    found = []

    def change(what: str, place: list[str | int], field: str, factor: float) -> None:
        copy = json.loads(json.dumps(content))
        target = copy
        for key in place:
            target = target[key]
        value = target[field]
        if isinstance(value, str):
            number, unit = value.split(" ")
            target[field] = f"{float(number) * factor:.6f} {unit}"
        else:
            target[field] = int(value * factor)
        found.append((what, copy))

    for at, node in enumerate(content["nodes"]):
        change(f"more nodes {at}", ["nodes", at], "count", 2)
        if node["count"] * node["devices"]["count"] <= 2:
            change(f"twice the devices in nodes {at}", ["nodes", at, "devices"], "count", 2)
            change(
                f"a device more in nodes {at}",
                ["nodes", at, "devices"],
                "count",
                1 + 1 / node["devices"]["count"],
            )
        change(f"wider nic {at}", ["nodes", at, "nic"], "bandwidth", 1.7)
        change(f"faster bus {at}", ["nodes", at, "intra", 0], "bandwidth", 1.7)
        change(f"faster kind {at}", ["kinds", at, "flops"], "bf16", 1.3)
        change(f"more memory {at}", ["kinds", at], "memory", 1.5)
        change(f"faster memory {at}", ["kinds", at], "memory_bandwidth", 1.5)
    return found


@pytest.mark.parametrize("model", [NO_FLOORS, LONG_FLOORS])
@pytest.mark.parametrize("seed", range(900, 912))
def test_more_or_better_hardware_never_plans_worse(seed: int, model: Any) -> None:
    recipe = Recipe(
        max_devices=4,
        max_pools=2,
        max_layers=4,
        batches=(2, 4),
        per_node=(1, 2),
        wide=seed % 2 == 0,
    )
    case = replace(random_case(seed, recipe), model=model)

    def optimum(cluster: Cluster) -> float:
        one = replace(case, cluster=cluster)
        return found_best(one, exact_settings(one))[1]

    before = optimum(case.cluster)
    for what, content in better_files(json.loads(case.cluster.content)):
        assert optimum(cluster_of(content)) <= before * (1 + FOLDED), what


@pytest.mark.parametrize(
    ("cluster", "level", "is_mixed"),
    [("three-kinds-64", 2, True), ("four-kinds-1024", 2, False), ("mixed-8", 1, True)],
)
def test_stages_mix_kinds_by_default_where_their_tables_stay_small(
    cluster: str, level: int, is_mixed: bool
) -> None:
    chain = load_model("gpt2", sequence_length=512, dtype="fp16")
    pools = able_pools(chain, load_cluster(cluster), ComputeModel())
    units = tuple(pool.count for pool in pools)
    assert search_scope(Settings(level=level), pools, units).mixed is is_mixed
    assert not search_scope(Settings(level=level, mixed=False), pools, units).mixed


def test_an_interrupt_keeps_the_best_plan_so_far_with_a_bound_that_holds() -> None:
    case = random_case(3, Recipe(max_devices=6, max_layers=5))

    def stop(progress: SearchProgress) -> None:
        raise KeyboardInterrupt

    whole, stopped = (
        plan_of(case, exact_settings(case, progress=progress)) for progress in (None, stop)
    )
    check_result(case, stopped)
    assert whole.certificate is not None and whole.predicted is not None
    assert stopped.certificate is not None and stopped.predicted is not None
    assert stopped.certificate.lower_bound_seconds >= stopped.certificate.free_bound_seconds
    assert stopped.certificate.lower_bound_seconds <= whole.certificate.lower_bound_seconds
    assert stopped.predicted.iteration_seconds >= whole.predicted.iteration_seconds * (1 - 1e-9)
    with pytest.raises(KeyboardInterrupt):
        plan_of(case, exact_settings(case, progress=stop, ends_early=False))


@pytest.mark.parametrize("batch", [0, -1, 10**12])
def test_an_impossible_batch_is_refused(batch: int) -> None:
    case = random_case(3, SMALL)
    with pytest.raises(
        InputError, match=r"global_batch: found -?\d+, expected a global batch of 1 to "
    ):
        plan_of(replace(case, global_batch=batch), Settings())


@pytest.mark.parametrize("seed", range(4))
def test_schedules_whose_backwards_are_cut_are_searched_beside_those_whose_are_not(
    seed: int,
) -> None:
    """Zero-bubble lets the stage before go on after half a backward, which bounds of both together
    must allow."""
    both = (ScheduleSpec(), ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE))
    case = replace(
        random_case(seed, Recipe(max_devices=4, max_layers=4, batches=(2, 4), per_node=(1, 2))),
        schedules=both,
    )
    everything = best_of_all(case, case.scope(prune=False), MOST_PLANS)
    assert everything is not None
    assert found_best(case, exact_settings(case))[1] == pytest.approx(everything[0], rel=FOLDED)


def test_level_2_keeps_what_level_1_has_proven() -> None:
    """It stops at a gap of 1 %, which may be wider than that of the quick proof."""
    chain = load_model("gpt2-xl", sequence_length=1024, dtype="fp16")
    certificates = []
    for level in (1, 2):
        plan = find_plan(
            chain, load_cluster("two-cards"), global_batch=64, settings=Settings(level=level)
        )
        assert plan.certificate is not None
        certificates.append(plan.certificate)
    quick, slow = certificates
    assert slow.scope == quick.scope
    assert slow.gap <= quick.gap < 0.005
