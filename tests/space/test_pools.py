"""Which devices can take each other's place."""

from __future__ import annotations

from typing import Any

import pytest
from support.planning_cases import cluster_of, kind_fields, node_fields

from argosy.cluster.topology import Cluster
from argosy.space.pool import Pool, find_pools

A, B = kind_fields("a", flops=1, memory=1e9), kind_fields("b", flops=2, memory=1e9)


def cluster(*nodes: dict[str, Any], **more: Any) -> Cluster:
    return cluster_of({"name": "pooled", "kinds": [A, B], "nodes": list(nodes), **more})


def counts(*nodes: dict[str, Any], **more: Any) -> list[int]:
    return [pool.count for pool in find_pools(cluster(*nodes, **more))]


def test_equal_nodes_are_one_pool() -> None:
    pools = find_pools(cluster(node_fields("a", count=3, per_node=2)))
    assert [(pool.count, pool.per_node, pool.node_size) for pool in pools] == [(6, 2, 2)]
    assert pools[0].nodes == (("a0.0", "a0.1"), ("a1.0", "a1.1"), ("a2.0", "a2.1"))


def test_nodes_of_the_same_look_are_one_pool_whatever_their_names() -> None:
    other = {**node_fields("a", count=1, per_node=2), "name": "z"}
    assert counts(node_fields("a", count=2, per_node=2), other) == [6]


def test_kinds_stay_apart() -> None:
    assert counts(node_fields("a", count=2), node_fields("b", count=3)) == [2, 3]


@pytest.mark.parametrize(
    "change", [{"per_node": 4}, {"intra": 5.0}, {"nic": 0.5}, {"latency": 3.0}]
)
def test_nodes_that_differ_in_anything_seen_from_outside_stay_apart(change: dict[str, Any]) -> None:
    other = {**node_fields("a", **{"per_node": 2, **change}), "name": "z"}
    assert len(counts(node_fields("a", count=2, per_node=2), other)) == 2


def test_a_less_efficient_device_stays_apart() -> None:
    slow = {**node_fields("a"), "name": "z", "devices": {"kind": "kind-a", "efficiency": 0.5}}
    assert counts(node_fields("a", count=2), slow) == [2, 1]


def test_a_device_that_is_slowed_down_stays_apart_and_a_lost_one_is_in_no_pool() -> None:
    slowed = [{"device": "a1.0", "steps": [["0 s", 0.5]]}]
    lost = [{"device": "a1.0", "steps": [["0 s", 0]]}]
    assert sorted(counts(node_fields("a", count=3), changes=slowed)) == [1, 2]
    assert counts(node_fields("a", count=3), changes=lost) == [2]


def test_a_node_of_two_kinds_is_in_two_pools_of_the_same_homes() -> None:
    mixed = node_fields("a", count=2)
    mixed["devices"] = [{"kind": "kind-a", "count": 2}, {"kind": "kind-b", "count": 1}]
    pools = find_pools(cluster(mixed))
    assert [(pool.count, pool.per_node, pool.node_size) for pool in pools] == [(4, 2, 3), (2, 1, 3)]


def test_nodes_at_the_ends_of_different_wires_stay_apart() -> None:
    wire = {"between": ["a0", "b0"], "bandwidth": "2 GB/s", "bypasses_nic": True}
    assert counts(node_fields("a", count=2), node_fields("b"), links=[wire]) == [1, 1, 1]


def shortest(cluster: Cluster, pool: Pool) -> float:
    """Least latency from any node of the pool to any other node."""
    pairs = [
        (node[0], other.devices[0])
        for node in pool.nodes
        for other in cluster.nodes
        if node[0] not in other.devices
    ]
    return min(
        cluster.latency(route) for one, other in pairs for route in cluster.routes(one, other)
    )


def racked(uplink: dict[str, str]) -> Cluster:
    """a0 and a2 share a rack; a1, which looks like a2, is further away and comes first."""
    racks = [
        {"name": f"rack{i}", "nodes": [f"a{i}", f"a{i + 2}"], "uplink": uplink} for i in range(2)
    ]
    return cluster(node_fields("a", count=4, latency=1.0), switches=racks)


def test_latency_between_nodes_is_the_best_case_also_in_racks() -> None:
    found = racked({"bandwidth": "100 GB/s", "latency": "500 us"})
    (pool,) = find_pools(found)
    assert pool.nic_latency == pytest.approx(shortest(found, pool))
    assert [node[0] for node in pool.nodes] == ["a0.0", "a2.0", "a1.0", "a3.0"]


@pytest.mark.parametrize("uplink", [("1 MB/s", "0 us"), ("100 GB/s", "50 ms")])
def test_racks_behind_a_narrow_or_far_uplink_are_sites_with_pools_of_their_own(
    uplink: tuple[str, str],
) -> None:
    found = racked({"bandwidth": uplink[0], "latency": uplink[1]})
    pools = find_pools(found)
    assert [(pool.count, pool.site) for pool in pools] == [(2, 0), (2, 1)]
    assert pools[0].far[1][0] == found.links[found.edges["rack0.uplink"][0]].bandwidth.at(0)
