"""The controller in the simulator: it helps where the world changes, and never costs more than 2 % elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from argosy.adapt.controller import Limits, Reach
from argosy.adapt.play import Course, Stage, play, play_oracle
from argosy.adapt.shares import in_proportion
from argosy.adapt.watch import reason
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.document import parse_toml
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica
from argosy.plan.plan import Stage as PlanStage
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

UNTIL = 60.0
SCHEDULES = (
    ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
    ScheduleSpec(kind=ScheduleKind.KFKB, k=2),
    ScheduleSpec(kind=ScheduleKind.KFKB, k=4),
)
CALM = ""
PREEMPTED = (
    '[[changes]]\nlink = "b0.nic"\n'
    'steps = [["5 s", "4 Gbit/s"], ["20 s", "25 Gbit/s"], ["30 s", "4 Gbit/s"], ["50 s", "25 Gbit/s"]]\n'
)
HALVED = '[[changes]]\ndevice = "b0.*"\nsteps = [["5 s", 0.5]]\n'
LOST = '[[changes]]\ndevice = "b0.0"\nsteps = [["5 s", 0]]\n'


def flipping(period: float) -> str:
    """A link that changes just as often as a controller may."""
    steps = ", ".join(
        f'["{period * turn:g} s", "{4 if turn % 2 else 25} Gbit/s"]' for turn in range(int(UNTIL / period) + 2)
    )
    return f'[[changes]]\nlink = "b0.nic"\nsteps = [{steps}]\n'


def cluster_with(changes: str) -> Cluster:
    nodes = "".join(
        f'[[nodes]]\nname = "{name}"\ndevices = {{ kind = "A100-80GB", count = 2 }}\n'
        'intra = [{ medium = "nvlink", bandwidth = "300 GB/s" }]\n'
        'nic = { bandwidth = "25 Gbit/s", latency = "10 us" }\n'
        for name in "ab"
    )
    return build_cluster(parse_toml(f'name = "pair"\n{nodes}{changes}', file="pair.toml"), folder=Path())


@pytest.fixture(scope="module")
def chain() -> Chain:
    return load_model("gpt2-xl")


def plan_on(cluster: Cluster, chain: Chain) -> Plan:
    cut = len(chain.layers) // 2
    return Plan(
        model=ModelRef(name=chain.name, sequence_length=chain.sequence_length, dtype=chain.dtype),
        cluster=ClusterRef.of(cluster),
        global_batch=64,
        micro_batch_size=8,
        num_micro_batches=8,
        schedule=SCHEDULES[0],
        stages=(
            PlanStage(first=0, end=cut, replicas=_replicas("a")),
            PlanStage(first=cut, end=len(chain.layers), replicas=_replicas("b")),
        ),
    )


def _replicas(node: str) -> tuple[Replica, ...]:
    return tuple(Replica(devices=(f"{node}0.{index}",), samples=4) for index in range(2))


def course(chain: Chain, changes: str, reach: Reach) -> Course:
    cluster = cluster_with(changes)
    plan = plan_on(cluster, chain)

    def replan(believed: Cluster) -> Plan:
        return find_plan(chain, believed, global_batch=plan.global_batch, settings=Settings())

    return play(
        Stage(chain, cluster, ComputeModel()),
        plan,
        until=UNTIL,
        limits=Limits(reach=reach, horizon=200),
        schedules=[replace(plan, schedule=schedule) for schedule in SCHEDULES],
        replan=replan,
    )


@pytest.mark.parametrize(
    "changes",
    [CALM, PREEMPTED, HALVED, flipping(3.0), flipping(1.1)],
    ids=["calm", "preempted", "halved", "flipping slowly", "flipping fast"],
)
@pytest.mark.parametrize("reach", [Reach.K, Reach.SHARES, Reach.FULL])
def test_adapting_never_costs_more_than_two_percent(chain: Chain, changes: str, reach: Reach) -> None:
    still = course(chain, changes, Reach.OFF).samples_per_second
    assert course(chain, changes, reach).samples_per_second >= 0.98 * still


def test_k_pays_under_a_preempted_link(chain: Chain) -> None:
    still, adaptive = (course(chain, PREEMPTED, reach).samples_per_second for reach in (Reach.OFF, Reach.K))
    cluster = cluster_with(PREEMPTED)
    plan = plan_on(cluster, chain)
    variants = [replace(plan, schedule=schedule) for schedule in SCHEDULES]
    oracle = play_oracle(Stage(chain, cluster, ComputeModel()), variants, until=UNTIL).samples_per_second
    assert adaptive > 1.03 * still
    assert oracle >= adaptive > 0.95 * oracle


def test_a_re_plan_pays_when_a_host_halves_its_speed(chain: Chain) -> None:
    still, full = (course(chain, HALVED, reach) for reach in (Reach.OFF, Reach.FULL))
    assert full.samples_per_second > 1.15 * still.samples_per_second
    assert any(decision.what is Reach.FULL and decision.moving > 0 for decision in full.decisions)


def test_a_lost_device_stops_a_static_plan_and_not_an_adaptive_one(chain: Chain) -> None:
    still, full = (course(chain, LOST, reach) for reach in (Reach.OFF, Reach.FULL))
    assert still.end == UNTIL and still.steps[-1].start < 10
    assert full.end >= UNTIL
    assert sum(step.was_lost for step in full.steps) == 1
    assert "b0.0" not in full.steps[-1].plan.devices


def test_a_course_ends_after_as_many_steps_as_are_wanted(chain: Chain) -> None:
    cluster = cluster_with(CALM)
    plan, stage = plan_on(cluster, chain), Stage(chain, cluster, ComputeModel())
    still = play(stage, plan, until=1e30, limits=Limits(reach=Reach.OFF), most_steps=5)
    oracle = play_oracle(stage, [plan], until=1e30, most_steps=5)
    assert [len(course.steps) for course in (still, oracle)] == [5, 5]


def test_a_reason_counts_what_it_does_not_name() -> None:
    assert reason(["a0.0"]) == "a0.0 changed"
    assert reason(["a0.0", "a0.1", "b0.0", "b0.1", "b0.nic"]) == "a0.0, a0.1, b0.0 and 2 more changed"
    assert reason([]) == "as believed now"


def test_shares_follow_speed() -> None:
    assert in_proportion(8, [3.0, 1.0]) == [6, 2]
    assert in_proportion(4, [1.0, 1.0, 1e-9]) == [2, 1, 1]
