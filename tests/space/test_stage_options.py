"""Which ways there are to run a stage, and which of them the rules remove."""

from __future__ import annotations

import itertools

import pytest
from support.planning_cases import (
    Case,
    Recipe,
    cluster_of,
    complete_plans,
    kind_fields,
    node_fields,
    random_case,
)

from argosy.dtype import Dtype
from argosy.plan.plan import Recompute
from argosy.space.enumerate import stage_options, vectors
from argosy.space.option import Option
from argosy.space.pool import find_pools
from argosy.space.prune import Counters
from argosy.space.widths import node_widths, tensor_widths
from argosy.workload.chain import Chain, Layer


def tiny(num_layers: int = 2, *, memory: float = 1e12, **nodes: tuple[int, int]) -> Case:
    """Equal layers on nodes given as ``name=(count, devices per node)``."""
    layer = Layer(
        name="layer",
        kind="block",
        forward_flop=1e12,
        backward_flop=2e12,
        parameters=10**8,
        activation_bytes=1e9,
        output_bytes=1e8,
        selective_bytes=5e8,
        max_tensor_width=2,
    )
    chain = Chain(name="tiny", layers=(layer,) * num_layers, sequence_length=1, dtype=Dtype.BF16)
    kinds = [kind_fields(name, flops=1, memory=memory) for name in nodes]
    groups = [
        node_fields(name, count=count, per_node=each) for name, (count, each) in nodes.items()
    ]
    return Case(
        chain=chain,
        cluster=cluster_of({"name": "tiny", "kinds": kinds, "nodes": groups}),
        global_batch=4,
    )


def test_vectors_are_any_number_of_one_or_two_pools_or_everything() -> None:
    case = tiny(a=(1, 2), b=(1, 1), c=(1, 1))
    found = list(vectors(case.pools, case.scope()))
    assert len(found) == len(set(found))
    two_or_less = {
        v for v in itertools.product(range(3), range(2), range(2)) if 0 < sum(map(bool, v)) <= 2
    }
    assert set(found) == two_or_less | {(2, 1, 1)}
    single = set(vectors(case.pools, case.scope(mixed=False)))
    assert single == {(1, 0, 0), (2, 0, 0), (0, 1, 0), (0, 0, 1)}


def test_units_take_devices_together_and_leave_the_rest() -> None:
    case = tiny(a=(1, 4), b=(3, 1))
    scope = case.scope(units=(2, 2))
    assert scope.counts(case.pools) == (2, 1)
    assert set(vectors(case.pools, scope)) == {(1, 0), (2, 0), (0, 1), (1, 1), (2, 1)}
    assert all(len(row) for row in case.options(8, scope).values())
    assert {option.vector for row in case.options(8, scope).values() for option in row} == {
        (2, 0),
        (4, 0),
        (0, 2),
        (2, 2),
        (4, 2),
    }


def test_options_are_widths_times_recomputation_times_zero() -> None:
    case = tiny(a=(1, 2))
    options = case.options(4, case.scope(prune=False))
    assert {vector: len(row) for vector, row in options.items()} == {(1,): 3, (2,): 3 * 4 + 3}
    ways = {(o.parts[0].width, o.replicas, o.recompute, o.zero) for o in options[(2,)]}
    pairs = {(1, 2, recompute, zero) for recompute in Recompute for zero in (0, 1, 2, 3)}
    assert ways == pairs | {(2, 1, recompute, 0) for recompute in Recompute}


def test_more_replicas_than_samples_are_counted_and_left_out() -> None:
    case, counters = tiny(a=(1, 2)), Counters()
    options = stage_options(case.prices, 1, case.scope(prune=False), counters)
    assert {(o.parts[0].width, o.replicas) for o in options[(2,)]} == {(2, 1)}
    assert counters.removed["divisibility"] == 1


def test_what_fits_nowhere_is_counted_and_left_out() -> None:
    case, counters = tiny(a=(1, 2), memory=1e6), Counters()
    assert stage_options(case.prices, 1, case.scope(), counters) == {}
    assert counters.removed["memory"] == 6
    assert len(stage_options(case.prices, 1, case.scope(prune=False), Counters())) == 2


def test_all_plans_of_a_tiny_case() -> None:
    """Two equal devices and layers, one sample, one schedule: 3 ways for one device, 3 for a pair,
    3 x 3 for two."""
    case = tiny(a=(1, 2))
    shape = next(shape for shape in case.shapes if shape.micro_batch_size == 1)
    plans = list(complete_plans(case, shape, case.options(1, case.scope(prune=False))))
    assert len(plans) == 3 + 3 + 3 * 3


@pytest.mark.parametrize("seed", range(30))
def test_the_rules_keep_an_option_as_good_for_every_range_of_layers(seed: int) -> None:
    """For each option removed there is one kept on the same devices, no slower, that fits wherever
    it does."""
    case = random_case(seed, Recipe(max_devices=6, max_layers=4))
    size = case.global_batch
    every, kept = case.options(size, case.scope(prune=False)), case.options(size, case.scope())
    num_layers = len(case.chain.layers)
    ranges = list(itertools.combinations(range(num_layers + 1), 2))
    for vector, row in every.items():
        for option, (first, end) in itertools.product(row, ranges):
            if option.fits(first, end, 1, 1):
                rivals = [other for other in kept[vector] if other.fits(first, end, 1, 1)]
                assert any(no_worse(other, option, first, end) for other in rivals)


def no_worse(one: Option, other: Option, first: int, end: int) -> bool:
    mine, its = (
        (*one.seconds(first, end), one.tail(first, end)),
        (*other.seconds(first, end), other.tail(first, end)),
    )
    return all(a <= b + 1e-9 * abs(b) for a, b in zip(mine, its, strict=True))


def test_groups_need_not_divide_a_node() -> None:
    """A node of three has pairs, one at a time; stages of several nodes keep to widths that divide
    a node."""
    kinds = [kind_fields("a", flops=1, memory=1e9)]
    for count, most in ((1, {1: [1], 2: [1, 2], 3: [1, 3]}), (2, {4: [1], 6: [1, 3]})):
        nodes = [node_fields("a", count=count, per_node=3)]
        (pool,) = find_pools(cluster_of({"name": "three", "kinds": kinds, "nodes": nodes}))
        for devices, widths in most.items():
            assert list(tensor_widths(pool, devices, 8)) == widths
    assert list(node_widths(pool, 8)) == [1, 2, 3]
