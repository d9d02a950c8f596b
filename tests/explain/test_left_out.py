"""Why a device was left out: it is put to use, and one thing about it is at fault."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from support.planning_cases import cluster_of, kind_fields, node_fields

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.explain import explain_plan
from argosy.explain.leftout import Cause, LeftOutTest
from argosy.plan.check import check_plan
from argosy.plan.plan import (
    Algorithm,
    ClusterRef,
    Collective,
    CollectiveChoice,
    LeftOut,
    ModelRef,
    Plan,
    Replica,
    Stage,
)
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import simulate
from argosy.workload.chain import Chain, Layer

NO_FLOORS = ComputeModel(forward_floor=0, backward_floor=0)
LAYER = Layer(
    name="block",
    kind="block",
    forward_flop=1e11,
    backward_flop=2e11,
    parameters=10**7,
    activation_bytes=1e9,
    output_bytes=1e7,
)
CHAIN = Chain(name="drawn", layers=(LAYER,) * 6, sequence_length=1, dtype=Dtype.BF16)


def cluster_with(
    *, flops: float = 1.0, memory: float = 64e9, nic: float = 10.0, dtype: str = "bf16"
) -> Cluster:
    worse: dict[str, Any] = {**kind_fields("b", flops=flops, memory=memory)}
    worse["flops"] = {dtype: worse["flops"]["bf16"]}
    kinds = [kind_fields("a", flops=1.0, memory=64e9), worse]
    return cluster_of(
        {
            "name": "drawn",
            "kinds": kinds,
            "nodes": [node_fields("a", count=2, nic=10.0), node_fields("b", nic=nic)],
        }
    )


def plan_without(cluster: Cluster, samples: int = 4) -> Plan:
    """Two stages on the good devices; the worse one is left out."""
    stages = tuple(
        Stage(
            first=3 * at,
            end=3 * at + 3,
            replicas=(Replica(devices=(f"a{at}.0",), samples=samples),),
        )
        for at in range(2)
    )
    return Plan(
        model=ModelRef(name="drawn", sequence_length=1, dtype=Dtype.BF16),
        cluster=ClusterRef(name="drawn", hash=cluster.hash, content=cluster.content),
        global_batch=4 * samples,
        micro_batch_size=samples,
        num_micro_batches=4,
        schedule=ScheduleSpec(),
        stages=stages,
        left_out=(LeftOut(device="b0.0", reason="to be seen"),),
    )


def put_to_use(cluster: Cluster, samples: int = 4) -> LeftOutTest:
    (test,) = explain_plan(plan_without(cluster, samples), CHAIN, cluster, model=NO_FLOORS).left_out
    assert test.devices == ("b0.0",)
    return test


@pytest.mark.parametrize(
    ("worse", "cause"),
    [
        ({"flops": 0.01}, Cause.SPEED),
        ({"nic": 0.0001}, Cause.LINK),
        ({"memory": 2e8}, Cause.MEMORY),
        ({"dtype": "fp16"}, Cause.DTYPE),
        ({}, Cause.NONE),
    ],
    ids=lambda value: str(value) if isinstance(value, Cause) else "",
)
def test_what_is_at_fault_is_named(worse: dict[str, Any], cause: Cause) -> None:
    test = put_to_use(cluster_with(**worse))
    assert test.cause is cause, test.sentence
    assert (test.gain > 0) == (cause in (Cause.NONE, Cause.MEMORY))
    assert (test.missing > 0) == (cause is Cause.MEMORY)


def test_the_narrowest_link_to_the_device_is_named() -> None:
    sentence = put_to_use(cluster_with(nic=0.0001)).sentence
    assert "it is held back by the links to it, of which b0.nic is the narrowest: with" in sentence


def test_a_slow_device_is_called_slow() -> None:
    sentence = put_to_use(cluster_with(flops=0.01)).sentence
    assert "it is held back by its speed: with 100 times that, " in sentence


def test_the_gain_is_that_of_a_plan_that_anybody_can_simulate() -> None:
    cluster = cluster_with()
    plan = plan_without(cluster)
    test = put_to_use(cluster)
    assert test.tried == "a further replica of stage 1"
    halves = (Replica(devices=("a1.0",), samples=2), Replica(devices=("b0.0",), samples=2))
    wider = replace(
        plan, stages=(plan.stages[0], replace(plan.stages[1], replicas=halves)), left_out=()
    )
    before, after = (
        simulate(one, CHAIN, cluster, model=NO_FLOORS).iteration_ends[0] for one in (plan, wider)
    )
    assert test.gain == pytest.approx(before / after - 1, rel=1e-9)


def test_stages_keep_their_collectives_where_another_is_put_between_them() -> None:
    """A tree for three replicas far apart, which a ring in its place would make seconds slower."""
    cluster = cluster_of(
        {
            "name": "drawn",
            "kinds": [kind_fields(name, flops=1.0, memory=64e9) for name in "ab"],
            "nodes": [
                node_fields("a", count=6, nic=10.0, latency=4000),
                node_fields("b", nic=10.0),
            ],
        }
    )
    plan = plan_without(cluster, samples=3)
    groups = [
        tuple(Replica(devices=(f"a{3 * at + i}.0",), samples=1) for i in range(3))
        for at in range(2)
    ]
    stages = (Stage(first=0, end=5, replicas=groups[0]), Stage(first=5, end=6, replicas=groups[1]))
    tree = CollectiveChoice(collective=Collective.WEIGHTS, stage=0, algorithm=Algorithm.TREE)
    trees = (tree, replace(tree, stage=1))
    plan = replace(plan, stages=stages, collectives=trees)
    (test,) = explain_plan(plan, CHAIN, cluster, model=NO_FLOORS).left_out

    def seconds(cut: int, place: int) -> float:
        """With the stage of the device that was left out at this place, before or behind the
        cut."""
        all_groups = [*groups[:place], (Replica(devices=("b0.0",), samples=3),), *groups[place:]]
        ranges = itertools.pairwise((0, cut, 5, 6))
        between = [
            Stage(first=a, end=b, replicas=group)
            for (a, b), group in zip(ranges, all_groups, strict=True)
        ]
        moved = tuple(replace(tree, stage=at) for at in range(3) if at != place)
        tried = replace(plan, stages=tuple(between), collectives=moved, left_out=())
        check_plan(tried, CHAIN, cluster)
        return simulate(tried, CHAIN, cluster, model=NO_FLOORS).iteration_ends[0]

    best = min(seconds(cut, place) for cut in (1, 2, 3, 4) for place in (0, 1))
    before = simulate(plan, CHAIN, cluster, model=NO_FLOORS).iteration_ends[0]
    assert test.gain == pytest.approx(before / best - 1, abs=1e-3)  # played folded there


def test_an_interleaved_plan_is_not_said_to_lack_a_route() -> None:
    cluster = cluster_with()
    plan = plan_without(cluster)
    halves = tuple(
        replace(plan.stages[at % 2], first=ends[0], end=ends[1])
        for at, ends in enumerate(((0, 2), (2, 3), (3, 5), (5, 6)))
    )
    woven = replace(
        plan, schedule=ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2), stages=halves
    )
    (test,) = explain_plan(woven, CHAIN, cluster, model=NO_FLOORS).left_out
    assert test.cause is Cause.UNUSABLE
    assert (
        test.sentence
        == "no stage can take b0.0: the workers of the plan's schedule have several stages"
    )
