"""Small steps between plans: each is a plan that can run, and climbing reaches what a walk over all
of them reaches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.measured_data import needs_sailor

from argosy.adapt.predictor import Predictor
from argosy.cluster.file import load_cluster, with_changes
from argosy.cost.compute import ComputeModel
from argosy.plan.check import check_plan
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.schedule import ScheduleSpec
from argosy.workload.load import load_model
from benchmarks.climbing import best_nearby, climb, steps
from benchmarks.sailor_clusters import FLOOR, SIZES, best_plan

CHAIN = load_model("gpt2", sequence_length=512, dtype="fp16")
CLUSTER = with_changes(load_cluster("mixed-8"), [])
NODES = [node.devices for node in CLUSTER.nodes]


def plan_of(
    *stages: tuple[int, int, list[tuple[str, ...]]], samples: int = 2, count: int = 8
) -> Plan:
    """(first layer, end, groups) of every stage."""
    width = len(stages[0][2])
    return Plan(
        model=ModelRef(name=CHAIN.name, sequence_length=CHAIN.sequence_length, dtype=CHAIN.dtype),
        cluster=ClusterRef.of(CLUSTER),
        global_batch=samples * width * count,
        micro_batch_size=samples * width,
        num_micro_batches=count,
        schedule=ScheduleSpec(),
        stages=tuple(
            Stage(
                first=first,
                end=end,
                replicas=tuple(Replica(devices=group, samples=samples) for group in groups),
            )
            for first, end, groups in stages
        ),
    )


FOUR = plan_of(
    *((3 * at, 3 * at + (3 if at < 3 else 5), [(NODES[at // 4][at % 4],)]) for at in range(4))
)
WIDE = plan_of((0, 7, [tuple(NODES[0][:2])]), (7, 14, [tuple(NODES[1][:2])]))


@pytest.mark.parametrize("plan", [FOUR, WIDE], ids=["narrow", "wide"])
def test_every_step_is_a_plan_of_the_same_job(plan: Plan) -> None:
    found = list(steps(plan, CLUSTER))
    assert len({(one.stages, one.micro_batch_size) for one in found}) == len(found) > 4
    for one in found:
        check_plan(one, CHAIN, CLUSTER)
        assert one.global_batch == plan.global_batch
        assert set(one.devices) == set(plan.devices)
        assert one.stages != plan.stages


def test_two_stages_side_by_side_merge_into_wider_groups_and_fall_apart_again() -> None:
    merged = [one for one in steps(FOUR, CLUSTER) if len(one.stages) == 3]
    assert [stage.replicas[0].width for stage in merged[0].stages] == [2, 1, 1]
    assert any(one.stages == FOUR.stages for one in steps(merged[0], CLUSTER))
    assert not [one for one in steps(WIDE, CLUSTER) if len(one.stages) == 1]  # two nodes


def test_climbing_ends_where_no_step_is_better_and_never_below_its_start() -> None:
    predictor = Predictor(CHAIN, CLUSTER, ComputeModel())

    def speed(plan: Plan) -> float:
        return 1 / predictor.on(plan, CLUSTER)

    uneven = replace(
        WIDE, stages=(replace(WIDE.stages[0], end=11), replace(WIDE.stages[1], first=11))
    )
    reached = climb(uneven, speed, CLUSTER)
    assert speed(reached) > 1.05 * speed(uneven)
    assert all(speed(one) <= speed(reached) * (1 + 1e-9) for one in steps(reached, CLUSTER))
    assert speed(best_nearby([uneven, WIDE, FOUR], speed, CLUSTER)) >= max(
        map(speed, (WIDE, FOUR, reached))
    )


@needs_sailor
@pytest.mark.parametrize(
    "size",
    [
        (8, 24),
        (32, 96),
        *(pytest.param(s, marks=pytest.mark.exhaustive) for s in ((4, 12), (8, 8), (16, 16))),
    ],
)
def test_a_plain_uneven_split_is_reached_on_sailors_clusters(size: tuple[int, int]) -> None:
    floor = FLOOR[SIZES.index(size)]
    assert floor is not None
    assert best_plan(size).judged >= floor - 5e-5


def test_stages_of_unequal_shares_do_not_merge() -> None:
    alone = [(name,) for name in NODES[0]]
    plan = plan_of((0, 7, alone[:2]), (7, 14, alone[2:]))
    assert [one for one in steps(plan, CLUSTER) if len(one.stages) == 1]
    first, second = plan.stages
    uneven = (replace(second.replicas[0], samples=3), replace(second.replicas[1], samples=1))
    plan = replace(plan, stages=(first, replace(second, replicas=uneven)))
    assert not [one for one in steps(plan, CLUSTER) if len(one.stages) == 1]
