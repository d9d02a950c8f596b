"""The controller in the simulator under odd changes: outages from the start, links that all go down,
latencies, plans of another sort."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.adapt import predictor
from argosy.adapt.controller import AdaptationLevel, Controller, ControllerLimits
from argosy.adapt.play import NOTICE, Playback, PolicyRun, play
from argosy.adapt.predictor import Predictor
from argosy.adapt.watch import World
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.document import parse_toml
from argosy.errors import InfeasibleError
from argosy.plan.check import check_plan
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

UNTIL = 40.0
ONE_F_ONE_B = ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B)
INTERLEAVED = ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2)


def two_hosts(changes: str, devices: int = 2) -> Cluster:
    wires = 'intra = [{ medium = "nvlink", bandwidth = "300 GB/s" }]\n' if devices > 1 else ""
    nodes = "".join(
        f'[[nodes]]\nname = "{name}"\ndevices = {{ kind = "A100-80GB", count = {devices} }}\n'
        f'{wires}nic = {{ bandwidth = "25 Gbit/s", latency = "10 us" }}\n'
        for name in "ab"
    )
    return build_cluster(
        parse_toml(f'name = "hosts"\n{nodes}{changes}', file="hosts.toml"), folder=Path()
    )


@pytest.fixture(scope="module")
def chain() -> Chain:
    return load_model("gpt2-medium")


def pipeline(
    chain: Chain, cluster: Cluster, devices: Sequence[str], cuts: Sequence[int], samples: int = 4
) -> Plan:
    """A plan with one device for each stage; devices are used again if there are more stages."""
    edges = (0, *cuts, len(chain.layers))
    stages = tuple(
        Stage(
            first=edges[at],
            end=edges[at + 1],
            replicas=(Replica(devices=(devices[at % len(devices)],), samples=samples),),
        )
        for at in range(len(edges) - 1)
    )
    return Plan(
        model=ModelRef(name=chain.name, sequence_length=chain.sequence_length, dtype=chain.dtype),
        cluster=ClusterRef.of(cluster),
        global_batch=32,
        micro_batch_size=samples,
        num_micro_batches=32 // samples,
        schedule=ONE_F_ONE_B,
        stages=stages,
    )


def across(chain: Chain, cluster: Cluster) -> Plan:
    """Half of the layers on each host."""
    return pipeline(chain, cluster, ("a0.0", "b0.0"), (len(chain.layers) // 2,))


def on_first_host(chain: Chain, cluster: Cluster) -> Plan:
    return pipeline(chain, cluster, ("a0.0",), ())


def run(
    chain: Chain,
    cluster: Cluster,
    plan: Plan,
    replan: Callable[[Cluster], Sequence[Plan]],
    reach: AdaptationLevel = AdaptationLevel.FULL,
    until: float = UNTIL,
) -> PolicyRun:
    return play(
        Playback(chain, cluster, ComputeModel()),
        plan,
        until=until,
        limits=ControllerLimits(reach=reach),
        schedules=[plan],
        replan=replan,
    )


@pytest.mark.parametrize(
    "change",
    ['link = "b0.nic"\nsteps = [["0 s", "0 Gbit/s"]]', 'device = "b0.0"\nsteps = [["0 s", 0]]'],
    ids=["link", "device"],
)
def test_an_outage_from_the_start_is_left_when_it_is_noticed(chain: Chain, change: str) -> None:
    cluster = two_hosts(f"[[changes]]\n{change}\n")
    plan = pipeline(chain, cluster, ("a0.0", "a0.1", "b0.0"), (9, 18))
    near = pipeline(chain, cluster, ("a0.0", "a0.1"), (13,))
    still, full = (
        run(chain, cluster, plan, lambda believed: [near], reach)
        for reach in (AdaptationLevel.OFF, AdaptationLevel.FULL)
    )
    assert not still.steps
    assert full.steps[0].was_lost and full.steps[0].seconds == NOTICE
    assert full.steps[1].plan == near and full.steps[1].start >= NOTICE
    assert full.end >= UNTIL


def test_a_step_that_an_outage_does_not_hold_up_is_not_given_up(chain: Chain) -> None:
    """The other host is lost, which the plan does not use."""
    cluster = two_hosts('[[changes]]\ndevice = "b0.*"\nsteps = [["0 s", 0]]\n')
    plan = on_first_host(chain, cluster)
    full = run(chain, cluster, plan, lambda believed: [plan])
    assert full.steps and not any(step.was_lost for step in full.steps)


def test_no_move_is_made_that_never_ends(chain: Chain) -> None:
    """While all links are down, no state can reach the device of the other plan."""
    cluster = two_hosts(
        '[[changes]]\nlink = "*"\nsteps = [["5 s", "0 Gbit/s"], ["25 s", "25 Gbit/s"]]\n', devices=1
    )
    plan, near = across(chain, cluster), on_first_host(chain, cluster)
    still, full = (
        run(chain, cluster, plan, lambda believed: [near], reach)
        for reach in (AdaptationLevel.OFF, AdaptationLevel.FULL)
    )
    assert full.steps[-1].start > 30 and not full.decisions
    assert full.samples_per_second == still.samples_per_second


def test_steps_follow_a_latency_that_changes(chain: Chain) -> None:
    cluster = two_hosts(
        '[[changes]]\nlink = "b0.nic"\nlatency_steps = [["5 s", "200 ms"], ["20 s", "10 us"]]\n'
    )
    stage, plan = Playback(chain, cluster, ComputeModel()), across(chain, cluster)
    before, during, after = (stage.seconds(plan, time) for time in (0.0, 6.0, 21.0))
    assert during > before + 0.4 and after == pytest.approx(before)


def test_a_plan_after_another_has_schedules_that_fit_it(chain: Chain) -> None:
    """The first plan has two stages on each worker, the plan that follows has three workers."""
    cluster = two_hosts('[[changes]]\ndevice = "a0.0"\nsteps = [["2 s", 0.2]]\n')
    quarters = [len(chain.layers) * at // 4 for at in (1, 2, 3)]
    interleaved = replace(
        pipeline(chain, cluster, ("a0.0", "b0.0"), quarters), schedule=INTERLEAVED
    )
    other = pipeline(chain, cluster, ("b0.0", "b0.1", "a0.1"), (9, 18))
    check_plan(interleaved, chain, cluster)
    full = run(chain, cluster, interleaved, lambda believed: [other])
    assert full.decisions and full.decisions[-1].plan.stages == other.stages
    for step in full.steps:
        check_plan(step.plan, chain, cluster)


def test_a_host_that_slows_by_a_seventh_is_planned_for(chain: Chain) -> None:
    """Its levels are near those that were searched for, but every plan takes longer."""
    cluster = two_hosts('[[changes]]\ndevice = "b0.0"\nsteps = [["5 s", 0.85]]\n')
    plan = across(chain, cluster)
    shifted = pipeline(chain, cluster, ("a0.0", "b0.0"), (len(chain.layers) // 2 + 2,))
    searches = []

    def replan(believed: Cluster) -> list[Plan]:
        searches.append(believed.device("b0.0").speed.at(0))
        return [plan if searches[-1] == 1 else shifted]

    still = run(chain, cluster, plan, replan, AdaptationLevel.OFF)
    full = run(chain, cluster, plan, replan)
    assert len(searches) == 2 and searches == [1, pytest.approx(0.85, rel=0.05)]
    assert [decision.plan.stages for decision in full.decisions] == [shifted.stages]
    assert full.samples_per_second > 1.02 * still.samples_per_second


def test_a_gain_that_another_schedule_brings_for_nothing_pays_for_no_move(chain: Chain) -> None:
    """The other plan is 30 % faster than the first one under its own schedule, and no faster than
    under the best one."""
    cluster = two_hosts("")
    slow = replace(across(chain, cluster), schedule=ScheduleSpec(kind=ScheduleKind.GPIPE))
    fast = replace(slow, schedule=ONE_F_ONE_B)
    half = len(chain.layers) // 2
    moved = pipeline(chain, cluster, ("a0.0", "b0.0"), (half + 1,))
    controller = Controller(
        slow, chain, cluster, schedules=[slow, fast], replan=lambda believed: [moved]
    )
    world = controller.watch.world
    seconds = {"slow": 1.3, "fast": 1.0, "moved": 0.999}
    for name, plan in (("slow", slow), ("fast", fast), ("moved", moved)):
        controller.predictor.known[(*predictor.plan_key(plan), world)] = seconds[name]
    controller.predictor.known[(*predictor.plan_key(slow), controller.watch.sampled)] = 1.3
    assert controller._gain(moved, world) == pytest.approx(0.001)
    decisions = [controller.after_step(step, 1.0, {}, {}) for step in range(1, 6)]
    assert [decision.what for decision in decisions if decision.is_change] == [AdaptationLevel.K]


def test_a_cache_of_predictions_stays_small(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured levels of a long run hardly recur."""
    monkeypatch.setattr(predictor, "_KEPT", 3)
    cluster = two_hosts("")
    cache, plan = Predictor(chain, cluster, ComputeModel()), across(chain, cluster)
    worlds = [World(speeds=(("a0.0", 1 - at / 10),)) for at in range(5)]
    first = [cache.seconds(plan, world) for world in worlds]
    assert len(cache.known) == 3
    assert [cache.seconds(plan, world) for world in worlds] == first == sorted(first)


def test_a_controller_without_a_plan_for_what_is_left_waits(chain: Chain) -> None:
    cluster = two_hosts('[[changes]]\ndevice = "*"\nsteps = [["5 s", 0], ["25 s", 1]]\n')
    plan = across(chain, cluster)

    def nothing(believed: Cluster) -> list[Plan]:
        raise InfeasibleError("no device is left")

    still, full = (
        run(chain, cluster, plan, nothing, reach)
        for reach in (AdaptationLevel.OFF, AdaptationLevel.FULL)
    )
    assert full.samples_per_second == still.samples_per_second > 0
