"""Shares of a micro-batch against all shares, and the widths that devices can be cut into."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from support.planning_cases import Recipe, random_case

from argosy.plan.plan import Recompute
from argosy.space.option import PoolPart
from argosy.space.price import Prices
from argosy.space.shares import share_samples
from argosy.space.widths import tensor_widths

Groups = list[tuple[int, int, int]]


def slowest(prices: Prices, pool: int, width: int, samples: int) -> float:
    forward, backward = prices.seconds(pool, width, samples, Recompute.NONE)
    return float(forward[-1] + backward[-1])


def least_of_all(prices: Prices, groups: Groups, micro_batch: int) -> float:
    """Over all integer shares, replica by replica."""
    replicas = [(pool, width) for pool, width, count in groups for _ in range(count)]
    shares = itertools.product(range(1, micro_batch + 1), repeat=len(replicas))
    times = {
        (p, w, n): slowest(prices, p, w, n)
        for p, w in set(replicas)
        for n in range(1, micro_batch + 1)
    }
    return min(
        max(times[pool, width, count] for (pool, width), count in zip(replicas, each, strict=True))
        for each in shares
        if sum(each) == micro_batch
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_other_integer_shares_have_a_faster_slowest_replica(seed: int) -> None:
    random = Random(seed)
    case = random_case(seed, Recipe(max_devices=8, max_layers=3))
    pools = random.sample(case.pools, random.randint(1, len(case.pools)))
    groups = [
        (pool.index, random.choice((1, 2) if pool.per_node > 1 else (1,)), random.randint(1, 2))
        for pool in pools
    ]
    total = sum(count for *_, count in groups)
    micro_batch = random.randint(total, 8 if total < 5 else 7)
    parts = share_samples(case.prices, groups, micro_batch, Recompute.NONE)
    assert parts is not None
    assert sum(part.samples * part.replicas + part.extra for part in parts) == micro_batch
    assert all(part.samples >= 1 and part.extra < part.replicas for part in parts)
    ours = max(slowest(case.prices, part.pool, part.width, part.most) for part in parts)
    assert ours == pytest.approx(least_of_all(case.prices, groups, micro_batch), rel=1e-12)


def test_every_replica_needs_a_sample() -> None:
    prices = random_case(0).prices
    assert share_samples(prices, [(0, 1, 3)], 2, Recompute.NONE) is None
    parts = share_samples(prices, [(0, 1, 3)], 5, Recompute.NONE)
    assert parts == (PoolPart(pool=0, width=1, replicas=3, samples=1, extra=2),)


def test_tensor_widths_divide_the_devices_and_a_node_of_four() -> None:
    pool = next(
        pool for seed in range(100) for pool in random_case(seed).pools if pool.per_node == 4
    )
    assert list(tensor_widths(pool, 4, 8)) == [1, 2, 4]
    assert list(tensor_widths(pool, 6, 8)) == [1, 2]
    assert list(tensor_widths(pool, 3, 8)) == [1]
    assert list(tensor_widths(pool, 8, 2)) == [1, 2]


def test_groups_across_nodes_fill_a_power_of_two_or_all() -> None:
    (pool,) = random_case(0, Recipe(max_devices=6, min_devices=6, max_pools=1, per_node=(2,))).pools
    assert list(tensor_widths(pool, 6, 8, spanning=True)) == [1, 2, 6]
    assert list(tensor_widths(pool, 4, 8, spanning=True)) == [1, 2, 4]
    assert list(tensor_widths(pool, 6, 4, spanning=True)) == [1, 2]
    assert list(tensor_widths(pool, 2, 8, spanning=True)) == [1, 2]
