"""What a step says: the link that is slow is found, wide ones stay believed, queues do not mislead,
and devices are judged by what they computed themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.adapt.recorded import seen_in
from argosy.adapt.shares import with_shares
from argosy.adapt.signals import (
    ObservedTransfer,
    ObservedWork,
    bandwidths_seen,
    speeds_seen,
    work_of,
)
from argosy.adapt.watch import World
from argosy.cli.inputs import load_scenario
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.document import parse_toml
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.plan.file import read_plan
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import simulate
from argosy.workload.chain import Chain, Layer
from argosy.workload.profile import Profile, ProfileRow

MEGABYTE = 1e6


def cluster_of(*rates: float) -> Cluster:
    """Hosts a, b, c, ... with NICs of so many MB/s."""
    nodes = "".join(
        f'[[nodes]]\nname = "{chr(97 + index)}"\ndevices = {{ kind = "A100-40GB" }}\n'
        f'nic = {{ bandwidth = "{8 * rate:g} Mbit/s", latency = "0 us" }}\n'
        for index, rate in enumerate(rates)
    )
    return build_cluster(parse_toml(f'name = "few"\n{nodes}', file="few.toml"), folder=Path())


def believed(cluster: Cluster) -> dict[str, float]:
    return {link.name: link.bandwidth.at(0) for link in cluster.links}


def message(
    source: str, target: str, start: float, seconds: float, *, awaited: bool = True
) -> ObservedTransfer:
    end = start + seconds
    return ObservedTransfer(
        f"{source}0.0", f"{target}0.0", MEGABYTE, start, start if awaited else end, end
    )


def test_one_slow_host_is_blamed_and_its_neighbours_are_not() -> None:
    cluster = cluster_of(100, 100, 100)
    pairs = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")]
    seen = bandwidths_seen(
        [message(*pair, at, 0.1) for at, pair in enumerate(pairs)], cluster, believed(cluster)
    )
    assert seen == {name: pytest.approx(10 * MEGABYTE) for name in ("b0.nic.in", "b0.nic.out")}


def test_of_two_hosts_both_may_be_to_blame() -> None:
    cluster = cluster_of(100, 100)
    seen = bandwidths_seen([message("a", "b", 0, 0.1)], cluster, believed(cluster))
    assert seen.keys() == {"a0.nic.out", "b0.nic.in"}


def test_a_narrow_link_says_nothing_about_a_wide_one() -> None:
    cluster = cluster_of(100, 20)
    seen = bandwidths_seen([message("a", "b", 0, 0.05)], cluster, believed(cluster))
    assert seen == {"b0.nic.in": pytest.approx(20 * MEGABYTE)}


def test_messages_that_queue_share_the_link() -> None:
    cluster = cluster_of(100, 100)
    queued = [message("a", "b", 0.0, 0.01 * (at + 1)) for at in range(4)]
    seen = bandwidths_seen(queued, cluster, believed(cluster))
    assert seen["a0.nic.out"] == pytest.approx(100 * MEGABYTE)


def test_two_receivers_share_their_senders_link() -> None:
    cluster = cluster_of(100, 100, 100)
    both = [message("a", "b", 0.0, 0.02), message("a", "c", 0.0, 0.02)]
    seen = bandwidths_seen(both, cluster, believed(cluster))
    assert seen == {"a0.nic.out": pytest.approx(100 * MEGABYTE)}


def test_what_nobody_waited_for_says_nothing() -> None:
    cluster = cluster_of(100, 100)
    assert (
        bandwidths_seen([message("a", "b", 0, 5.0, awaited=False)], cluster, believed(cluster))
        == {}
    )


def test_a_link_that_is_busy_for_one_route_does_not_explain_another() -> None:
    cluster = cluster_of(100, 100, 100)
    fine = [message(*pair, at, 0.01) for at, pair in enumerate([("a", "b"), ("b", "a")] * 6)]
    slow = [message("b", "c", 20, 0.1), message("c", "b", 21, 0.1)]
    seen = bandwidths_seen([*fine, *slow], cluster, believed(cluster))
    assert {name: round(rate / MEGABYTE) for name, rate in seen.items()} == {
        "a0.nic.in": 100, "a0.nic.out": 100, "b0.nic.in": 100, "b0.nic.out": 100, "c0.nic.in": 10, "c0.nic.out": 10
    }  # fmt: skip


def test_a_timeline_that_nobody_measured_says_nothing_of_links() -> None:
    scenario = load_scenario(read_plan("gpt2-xl-on-two-cards"))
    timeline = simulate(scenario.plan, scenario.chain, scenario.cluster)
    with pytest.raises(
        InputError, match=r'found "?simulated"?, expected a timeline that a run has measured'
    ):
        seen_in(timeline, scenario.plan, scenario.chain, scenario.cluster, scenario.model)


def test_a_device_that_told_nothing_is_not_judged() -> None:
    scenario = load_scenario(read_plan("gpt2-xl-on-two-cards"))
    first, second = scenario.plan.devices[:2]
    found = speeds_seen(
        {(0, first): ObservedWork(1.0, 0.0)},
        scenario.plan,
        scenario.chain,
        scenario.cluster,
        scenario.model,
    )
    assert found.keys() == {first} and second not in found


def core(name: str, seconds: dict[int, tuple[float, float]]) -> ComputeModel:
    """A model whose layers take so long forward and backward for 4 samples, by tensor width."""
    rows = tuple(
        ProfileRow(
            layer="work",
            micro_batch=4,
            tensor_width=width,
            dtype=Dtype.FP16,
            forward_seconds=forward,
            backward_seconds=backward,
        )
        for width, (forward, backward) in seconds.items()
    )
    return ComputeModel(profiles={name: Profile(device=name, model="works", rows=rows)})


def works(*stages: Stage) -> tuple[Plan, Chain, Cluster, ComputeModel]:
    """Layers that take (1, 2) s alone and (0.75, 1.5) s by two, where one of two does half of a
    layer."""
    cluster = cluster_of(100, 100, 100)
    layer = {"kind": "work", "forward_flop": 1e9, "backward_flop": 2e9, "parameters": 64}
    sizes = {"activation_bytes": 8.0, "output_bytes": 8.0, "max_tensor_width": 2}
    layers = tuple(Layer(name=f"work{index}", **layer, **sizes) for index in range(stages[-1].end))
    plan = Plan(
        model=ModelRef(name="works", sequence_length=1, dtype=Dtype.FP16),
        cluster=ClusterRef.of(cluster),
        global_batch=4,
        micro_batch_size=4,
        num_micro_batches=1,
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        stages=stages,
    )
    chain = Chain(
        name="works", layers=layers, sequence_length=1, dtype=Dtype.FP16, optimizer="adamw"
    )
    return plan, chain, cluster, core("A100-40GB", {1: (1.0, 2.0), 2: (0.75, 1.5)})


def test_members_of_an_uneven_group_have_speeds_of_their_own() -> None:
    """A member with ratio r does 2 r of what one of two equal ones does: 3 layers x 2.25 s x 2
    r."""
    group = Replica(devices=("a0.0", "b0.0"), samples=4, ratios=(0.75, 0.25))
    alone = Replica(devices=("c0.0",), samples=4)
    case = works(Stage(first=0, end=3, replicas=(group,)), Stage(first=3, end=4, replicas=(alone,)))
    told = {
        (0, "a0.0"): ObservedWork(10.125, 3.0),
        (0, "b0.0"): ObservedWork(13.5, 0.5),
        (1, "c0.0"): ObservedWork(1.5, 0.0),
    }
    assert speeds_seen(told, *case) == {"a0.0": 1.0, "b0.0": 0.25, "c0.0": 2.0}


def test_what_members_waited_for_each_other_is_no_work_of_theirs() -> None:
    case = works(Stage(first=0, end=1, replicas=(Replica(devices=("a0.0", "b0.0"), samples=4),)))
    for waited in (1e-3, 1.0, 100.0):
        told = {(0, "a0.0"): ObservedWork(2.25, waited), (0, "b0.0"): ObservedWork(4.5, 1e-3)}
        assert speeds_seen(told, *case) == {"a0.0": 1.0, "b0.0": 0.5}


def test_chunks_of_one_device_are_judged_together() -> None:
    """Of two stages on the same group, 1 and 2 layers: 6.75 s predicted in all."""
    group = Replica(devices=("a0.0", "b0.0"), samples=4)
    case = works(Stage(first=0, end=1, replicas=(group,)), Stage(first=1, end=3, replicas=(group,)))
    told = {(0, "a0.0"): ObservedWork(2.5, 1.0), (1, "a0.0"): ObservedWork(11.0, 1.0)}
    assert speeds_seen(told, *case) == {"a0.0": 0.5}


def test_a_group_that_tells_of_no_exchange_is_not_judged() -> None:
    case = works(Stage(first=0, end=1, replicas=(Replica(devices=("a0.0", "b0.0"), samples=4),)))
    assert speeds_seen(
        {(0, "a0.0"): ObservedWork(2.25, 0.0), (0, "b0.0"): ObservedWork(2.25, 0.5)}, *case
    ) == {"b0.0": 1.0}


def test_one_odd_micro_batch_does_not_count() -> None:
    forward = [ObservedWork(1.0, 0.25), ObservedWork(1.0, 7.0), ObservedWork(50.0, 0.25)]
    assert work_of({"forward": forward, "backward": [ObservedWork(2.0, 0.5)] * 3}) == ObservedWork(
        3.0, 0.75
    )


def test_a_group_is_as_fast_as_who_takes_longest_for_its_share() -> None:
    """At ratios 3 to 1, a member with a quarter of the work may slow down to a third before the
    group does."""
    names = (("a0.0", "b0.0"), ("c0.0", "d0.0"))
    replicas = tuple(Replica(devices=devices, samples=4, ratios=(0.75, 0.25)) for devices in names)
    plan, chain, _, _ = works(Stage(first=0, end=1, replicas=replicas))
    for slow, speed, samples in (
        ("d0.0", 1 / 3, [4, 4]),
        ("d0.0", 1 / 9, [6, 2]),
        ("c0.0", 1 / 3, [6, 2]),
    ):
        shared = with_shares(
            plan, chain, cluster_of(100, 100, 100, 100), World(speeds=((slow, speed),))
        )
        assert [replica.samples for replica in shared.stages[0].replicas] == samples
