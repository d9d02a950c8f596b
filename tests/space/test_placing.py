"""From numbers of devices to devices."""

from __future__ import annotations

from random import Random

import pytest
from support.planning_cases import Case, Recipe, cluster_of, kind_fields, node_fields, random_case

from argosy.plan.plan import Recompute, Replica
from argosy.space.option import Option, PoolPart
from argosy.space.place import can_place, place_stages
from argosy.space.widths import tensor_widths


def some_stages(random: Random, case: Case) -> list[Option]:
    """Stages that use up the devices of a case, each a part of some pools, in groups of any width
    that fits."""
    left = list(case.counts)
    stages = []
    while any(left):
        parts, vector = [], [0] * len(left)
        for pool in random.sample(case.pools, random.randint(1, len(left))):
            number = random.randint(0, left[pool.index])
            if not number:
                continue
            width = random.choice(list(tensor_widths(pool, number, 4)))
            parts.append(
                PoolPart(pool=pool.index, width=width, replicas=number // width, samples=2, extra=0)
            )
            vector[pool.index] = number
            left[pool.index] -= number
        if parts:
            ordered = tuple(sorted(parts, key=lambda part: part.pool))
            stages.append(
                Option(
                    prices=case.prices,
                    vector=tuple(vector),
                    parts=ordered,
                    recompute=Recompute.NONE,
                    zero=0,
                )
            )
    return stages


def node_of(device: str) -> str:
    return device.partition(".")[0]


def check_placed(case: Case, options: list[Option], placed: list[tuple[Replica, ...]]) -> None:
    names = [name for stage in placed for replica in stage for name in replica.devices]
    assert len(names) == len(set(names))
    pool_of = {name: pool.index for pool in case.pools for node in pool.nodes for name in node}
    for option, stage in zip(options, placed, strict=True):
        assert all(len({node_of(name) for name in replica.devices}) == 1 for replica in stage)
        taken = [0] * len(case.pools)
        for replica in stage:
            for name in replica.devices:
                taken[pool_of[name]] += 1
        assert tuple(taken) == option.vector
        widths = [part.width for part in option.parts for _ in range(part.replicas)]
        assert [replica.width for replica in stage] == widths


@pytest.mark.parametrize("seed", range(60))
def test_everything_that_fits_in_number_is_placed_with_groups_inside_nodes(seed: int) -> None:
    random = Random(seed)
    case = random_case(seed, Recipe(max_devices=16, max_layers=2, per_node=(1, 2, 4, 8)))
    options = some_stages(random, case)
    check_placed(case, options, place_stages(case.pools, options))


def stages_of(case: Case, *groups: tuple[int, int]) -> list[Option]:
    """One stage per (width, replicas) on the first pool."""
    return [
        Option(
            prices=case.prices,
            vector=(width * replicas, *(0,) * (len(case.pools) - 1)),
            parts=(PoolPart(pool=0, width=width, replicas=replicas, samples=1, extra=0),),
            recompute=Recompute.NONE,
            zero=0,
        )
        for width, replicas in groups
    ]


def two_nodes_of_four() -> Case:
    recipe = Recipe(max_devices=8, max_pools=1, per_node=(4,))
    return next(
        case for case in (random_case(seed, recipe) for seed in range(100)) if case.counts == (8,)
    )


def test_a_pair_finds_room_behind_two_stages_of_three() -> None:
    case = two_nodes_of_four()
    options = stages_of(case, (1, 3), (1, 3), (2, 1))
    check_placed(case, options, place_stages(case.pools, options))


def test_a_stage_sits_in_as_few_nodes_as_possible_and_next_to_its_neighbour() -> None:
    case = two_nodes_of_four()
    placed = place_stages(case.pools, stages_of(case, (1, 2), (1, 2), (2, 2)))
    homes = [{node_of(name) for replica in stage for name in replica.devices} for stage in placed]
    assert homes == [{"a0"}, {"a0"}, {"a1"}]


def test_samples_of_replicas_are_those_of_the_option() -> None:
    case = two_nodes_of_four()
    part = PoolPart(pool=0, width=1, replicas=3, samples=2, extra=1)
    option = Option(
        prices=case.prices, vector=(3,), parts=(part,), recompute=Recompute.NONE, zero=1
    )
    assert [replica.samples for replica in place_stages(case.pools, [option])[0]] == [3, 2, 2]


def test_groups_that_no_nodes_hold_are_placed_all_the_same() -> None:
    """For the plan that comes closest where nothing fits: three pairs of two nodes of three."""
    kinds, nodes = [kind_fields("a", flops=1, memory=1e9)], [node_fields("a", count=2, per_node=3)]
    chain = random_case(0).chain
    case = Case(
        chain=chain,
        cluster=cluster_of({"name": "three", "kinds": kinds, "nodes": nodes}),
        global_batch=3,
    )
    part = PoolPart(pool=0, width=2, replicas=3, samples=1)
    option = Option(
        prices=case.prices, vector=(6,), parts=(part,), recompute=Recompute.NONE, zero=0
    )
    assert not can_place(case.pools, [option])
    (replicas,) = place_stages(case.pools, [option])
    assert len({name for replica in replicas for name in replica.devices}) == 6
