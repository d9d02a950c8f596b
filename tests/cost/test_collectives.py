"""Algorithms of collectives: bytes by hand, what crosses every cut, closed form against the exact
engine, choices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
from support.planning_cases import NO_FLOORS, cluster_of, kind_fields, node_fields

from argosy.cluster.topology import Cluster
from argosy.cost.collective import Pairs, once_around, seconds_alone, sliced, uneven_once
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.plan.check import check_plan
from argosy.plan.file import dumps_plan, loads_plan
from argosy.plan.plan import (
    Algorithm,
    ClusterRef,
    Collective,
    CollectiveChoice,
    ModelRef,
    Plan,
    Replica,
    Stage,
)
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import Flow, Task, TaskGraph
from argosy.sim.simulate import simulate
from argosy.sim.tasks.choose import with_collectives
from argosy.sim.tasks.compile import compile_plan
from argosy.timeline import SpanKind
from argosy.workload.chain import Chain, Layer

WHOLE = (Algorithm.RING, Algorithm.HIERARCHICAL, Algorithm.TREE)
LAYER = Layer(
    name="layer",
    kind="block",
    forward_flop=1e9,
    backward_flop=2e9,
    parameters=10**8,
    activation_bytes=0.0,
    output_bytes=1e6,
    reduced_bytes=2e6,
    max_tensor_width=8,
)
CHAIN = Chain(name="drawn", layers=(LAYER,), sequence_length=1, dtype=Dtype.BF16)


def cluster(
    count: int,
    per_node: int,
    *,
    intra: float = 100.0,
    nic: float = 1.0,
    latency: float = 0.0,
    intra_latency: float = 0.0,
) -> Cluster:
    kinds = [kind_fields("a", flops=1, memory=1e15, memory_bandwidth=1e6)]
    nodes = node_fields("a", count=count, per_node=per_node, intra=intra, nic=nic, latency=latency)
    nodes["intra"][0]["latency"] = f"{intra_latency} ms"
    return cluster_of({"name": "even", "kinds": kinds, "nodes": [nodes]})


def node_of(name: str) -> str:
    return name.partition(".")[0]


def names(count: int, per_node: int) -> list[str]:
    return [f"a{node}.{at}" for node in range(count) for at in range(per_node)]


def leaving(pairs: Pairs, inside: Iterable[str]) -> float:
    chosen = set(inside)
    return sum(
        size
        for (one, other), size in pairs.items()
        if node_of(one) in chosen and node_of(other) not in chosen
    )


@pytest.mark.parametrize("algorithm", WHOLE)
@pytest.mark.parametrize(
    ("count", "per_node"), [(1, 2), (1, 5), (2, 1), (2, 4), (3, 2), (5, 3), (8, 1)]
)
def test_a_sum_leaves_every_set_of_nodes_and_every_device(
    algorithm: Algorithm, count: int, per_node: int
) -> None:
    """Whatever the algorithm, all of the payload must get out of any set of nodes and into it: half
    of it each time around; and as much through every device."""
    devices = names(count, per_node)
    pairs, rounds = once_around(algorithm, devices, node_of)
    assert rounds >= 1
    for size in range(1, count):
        for nodes in itertools.combinations({node_of(name) for name in devices}, size):
            assert leaving(pairs, nodes) >= 0.5 - 1e-12
    for name in devices:
        assert sum(size for (one, _), size in pairs.items() if one == name) >= 0.5 - 1e-12
        assert sum(size for (_, other), size in pairs.items() if other == name) >= 0.5 - 1e-12
    assert not any(one == other for one, other in pairs)


def test_bytes_out_of_a_node_by_hand() -> None:
    """Two nodes of four: a ring takes 7/8 of the bytes out of each, one device per node 1/2."""
    out = {}
    for algorithm in WHOLE:
        pairs, out_rounds = once_around(algorithm, names(2, 4), node_of)
        out[algorithm] = (leaving(pairs, ["a0"]), out_rounds)
    assert out == {
        Algorithm.RING: (7 / 8, 7),
        Algorithm.HIERARCHICAL: (1 / 2, 1),
        Algorithm.TREE: (1 / 2, 1),
    }


def test_slices_go_their_own_ways() -> None:
    groups = [["a0.0", "a0.1"], ["a1.0", "a1.1"], ["a2.0", "a2.1"]]
    order = {name: at for at, name in enumerate(names(3, 2))}
    pairs, rounds = sliced(Algorithm.RING, groups, order, node_of)
    assert pairs == {
        (f"a{one}.{at}", f"a{(one + 1) % 3}.{at}"): pytest.approx(1 / 3)
        for one in range(3)
        for at in range(2)
    }
    assert rounds == 2


def test_unequal_shards_by_hand() -> None:
    shares, devices = [0.5, 0.25, 0.25], ["a0.0", "a0.1", "a0.2"]
    padded, _ = uneven_once(Algorithm.PADDED, devices, shares)
    grouped, _ = uneven_once(Algorithm.GROUPED, devices, shares)
    assert list(padded.values()) == pytest.approx([1.0] * 3)
    assert list(grouped.values()) == pytest.approx([0.75, 0.75, 0.5])
    even, _ = uneven_once(Algorithm.PADDED, devices, [1 / 3] * 3)
    assert dict(even) == pytest.approx(dict(once_around(Algorithm.RING, devices, node_of)[0]))


@pytest.mark.parametrize("algorithm", WHOLE)
@pytest.mark.parametrize(("count", "per_node"), [(1, 8), (2, 4), (4, 2), (3, 3)])
@pytest.mark.parametrize("nic", [1.0, 80.0])
def test_the_closed_form_is_what_the_exact_engine_says(
    algorithm: Algorithm, count: int, per_node: int, nic: float
) -> None:
    """For a collective that is alone on the network, where the busiest link is busy to the end."""
    where = cluster(count, per_node, nic=nic, latency=1.0)
    devices = [device.name for device in where.devices]
    pairs, rounds = once_around(algorithm, devices, node_of)
    amounts = {pair: 1e9 * share for pair, share in pairs.items()}
    index = {name: at for at, name in enumerate(devices)}
    flows = tuple(Flow(index[one], index[other], size) for (one, other), size in amounts.items())
    graph = TaskGraph(
        devices=tuple(devices), tasks=(Task(kind=SpanKind.COLLECTIVE, flows=flows, rounds=rounds),)
    )
    (end,) = simulate_exact(graph, where).iteration_ends
    closed = seconds_alone(where, amounts, rounds)
    assert closed <= end * (1 + 1e-9)
    assert end <= closed * (1.02 if algorithm is not Algorithm.TREE else 1.1)


def plan_on(
    where: Cluster, *, width: int = 1, zero: int = 0, ratios: tuple[float, ...] = ()
) -> Plan:
    devices = [device.name for device in where.devices]
    replicas = tuple(
        Replica(devices=tuple(devices[at : at + width]), samples=1, ratios=ratios)
        for at in range(0, len(devices), width)
    )
    return Plan(
        model=ModelRef(name="drawn", sequence_length=1, dtype=Dtype.BF16),
        cluster=ClusterRef.of(where),
        global_batch=len(replicas),
        micro_batch_size=len(replicas),
        num_micro_batches=1,
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        stages=(Stage(first=0, end=1, replicas=replicas, zero=zero),),
    )


def chosen(where: Cluster, chain: Chain = CHAIN, **settings: object) -> dict[str, str]:
    plan = with_collectives(plan_on(where, **settings), chain, where)  # type: ignore[arg-type]
    check_plan(plan, chain, where)
    assert loads_plan(dumps_plan(plan)) == plan
    return {str(choice.collective): str(choice.algorithm) for choice in plan.collectives}


def small(parameters: int) -> Chain:
    return replace(CHAIN, layers=(replace(LAYER, parameters=parameters),))


def test_choices() -> None:
    assert chosen(cluster(1, 8)) == {"weights": "ring"}
    assert chosen(cluster(2, 4)) == {"weights": "hierarchical"}
    assert chosen(cluster(1, 4), width=4) == {"tensor": "ring"}
    assert chosen(cluster(2, 4), width=2) == {"tensor": "ring", "weights": "hierarchical"}
    # Little to send over long ways: few latencies count
    assert chosen(cluster(8, 1, latency=10.0), small(1000)) == {"weights": "tree"}
    assert chosen(cluster(8, 1, latency=10.0), small(1000), zero=1) == {"weights": "ring"}
    assert chosen(cluster(1, 8, intra_latency=1.0), width=8) == {"tensor": "tree"}


def test_shards_are_padded_where_nearly_equal_and_grouped_where_not() -> None:
    where = cluster(1, 4, intra_latency=0.001)
    assert chosen(where, width=4, ratios=(0.26, 0.26, 0.24, 0.24)) == {"tensor": "padded"}
    assert chosen(where, width=4, ratios=(0.7, 0.1, 0.1, 0.1)) == {"tensor": "grouped"}


def test_the_simulator_does_what_the_plan_says() -> None:
    """200 MB of gradients over NICs of 1 GB/s: twice 7/8 of them out of each node, or twice a
    half."""
    where = cluster(2, 4)
    ends = {}
    for algorithm in WHOLE:
        choice = CollectiveChoice(collective=Collective.WEIGHTS, stage=0, algorithm=algorithm)
        plan = replace(plan_on(where), collectives=(choice,))
        tasks = compile_plan(plan, CHAIN, where, NO_FLOORS).tasks
        (sync,) = (task for task in tasks if task.kind is SpanKind.COLLECTIVE)
        (end,) = simulate(plan, CHAIN, where, model=NO_FLOORS).iteration_ends
        updated = max(task.seconds for task in tasks if task.kind is SpanKind.UPDATE)
        computed = max(task.seconds for task in tasks if task.kind is SpanKind.FORWARD)
        ends[algorithm] = end - updated - 3 * computed
        assert sync.flows
    assert ends[Algorithm.RING] == pytest.approx(2 * 7 / 8 * 0.2, rel=0.02)
    assert ends[Algorithm.HIERARCHICAL] == pytest.approx(0.2, rel=0.02)
    assert ends[Algorithm.TREE] == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize(
    ("choice", "settings", "problem"),
    [
        (
            (Collective.WEIGHTS, Algorithm.TREE),
            {"zero": 1},
            'collectives[0].algorithm: found "tree", expected ring or hierarchical for weights of stage 0',
        ),
        (
            (Collective.TENSOR, Algorithm.RING),
            {"width": 2, "ratios": (0.75, 0.25)},
            'collectives[0].algorithm: found "ring", expected padded or grouped for tensor of stage 0',
        ),
        (
            (Collective.TENSOR, Algorithm.HIERARCHICAL),
            {"width": 2},
            'collectives[0].algorithm: found "hierarchical", expected ring or tree for tensor of stage 0',
        ),
    ],
)
def test_algorithms_that_do_not_fit_are_named(
    choice: tuple[Collective, Algorithm], settings: dict[str, object], problem: str
) -> None:
    where = cluster(1, 2)
    plan = plan_on(where, **settings)  # type: ignore[arg-type]
    entry = CollectiveChoice(collective=choice[0], stage=0, algorithm=choice[1])
    with pytest.raises(InputError) as caught:
        check_plan(replace(plan, collectives=(entry,)), CHAIN, where)
    assert str(caught.value) == problem
    with pytest.raises(InputError, match="one choice for"):
        check_plan(replace(plan, collectives=(entry, entry)), CHAIN, where)
