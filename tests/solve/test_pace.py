"""Programs and pipelines while links and devices change: one clock for both, and the right one of them chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from spmd_models import captured
from torch import nn

from argosy.cluster.file import load_cluster, with_changes
from argosy.cluster.lasting import at_moment
from argosy.cluster.topology import Cluster
from argosy.cost.group import Ring, device_group
from argosy.dtype import Dtype
from argosy.errors import InfeasibleError
from argosy.graph_planner import GraphPlan, find_graph_plan
from argosy.report.graph_plan import graph_plan_title, graph_plan_to_dict
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.solve.pace import network_pace, seconds_under_changes
from argosy.solve.placement import Pricing
from argosy.solve.spmd import Program, find_program
from argosy.solve.staging import play, price_stages
from argosy.space.rules import Kind
from argosy.workload.capture.initial import build_fake
from argosy.workload.capture.trace import capture_fake, num_samples, with_samples
from argosy.workload.part import forward_order

CLUSTER = """
name = "pair"
[[nodes]]
name = "a"
devices = [{ kind = "V100-32GB", count = 2 }]
intra = [{ medium = "nvlink", bandwidth = "100 GB/s", latency = "2 us" }]
nic = { bandwidth = "200 Gbit/s", latency = "20 us" }
[[nodes]]
name = "b"
devices = [{ kind = "V100-32GB", count = 2 }]
intra = [{ medium = "nvlink", bandwidth = "100 GB/s", latency = "2 us" }]
nic = { bandwidth = "200 Gbit/s", latency = "20 us" }
"""
NAMES = ("a0.0", "a0.1", "b0.0", "b0.1")
ONE_F_ONE_B = ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    file = tmp_path_factory.mktemp("cluster") / "pair.toml"
    file.write_text(CLUSTER, encoding="utf-8")
    return load_cluster(str(Path(file)))


def nics(cluster: Cluster, *steps: tuple[float, str]) -> Cluster:
    return with_changes(cluster, [{"link": "*.nic", "steps": [[f"{time} s", rate] for time, rate in steps]}])


def speeds(cluster: Cluster, *steps: tuple[float, float]) -> Cluster:
    return with_changes(cluster, [{"device": "*", "steps": [[f"{time} s", speed] for time, speed in steps]}])


def wide() -> Any:
    """Layers whose gradients are larger than what one hands to the next."""
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16)))
    return model, lambda net, x: net(x).square().mean(), torch.randn(2048, 4096)


def planned(cluster: Cluster) -> GraphPlan:
    fake = build_fake(wide)
    return find_graph_plan(
        lambda count: capture_fake(with_samples(fake, count), name="wide"), num_samples(fake), cluster, Dtype.FP32
    )


@pytest.fixture(scope="module")
def calm(pair: Cluster) -> GraphPlan:
    return planned(pair)


def shared(cluster: Cluster) -> tuple[Program, Pricing]:
    """A small model by samples, with an all-reduce per gradient."""
    pricing = Pricing(group=device_group(cluster, NAMES, Dtype.FP32))
    return find_program(captured("language"), pricing, kind=Kind.SAMPLES, ratios=pricing.group.even), pricing


@pytest.mark.parametrize("time", [0.0, 0.5, 2.0])
def test_a_ring_is_that_of_the_moment(pair: Cluster, time: float) -> None:
    changing = nics(pair, (0.5, "1 Gbit/s"), (1.0, "0 bit/s"), (2.0, "900 Gbit/s"))
    ring, then = Ring(changing, NAMES), device_group(at_moment(changing, time), NAMES, Dtype.FP32)
    assert ring.at(time) == (then.bandwidth, then.latency, then.inside)
    assert ring.changes == [0.0, 0.5, 1.0, 2.0]


def test_where_nothing_changes_the_price_is_the_time(pair: Cluster) -> None:
    program, pricing = shared(pair)
    assert seconds_under_changes(program, pricing, pair) == program.seconds
    later = nics(pair, (60.0, "1 Gbit/s"))
    assert seconds_under_changes(program, pricing, later) == pytest.approx(program.seconds, rel=1e-9)


def test_collectives_take_what_they_cost_on_the_links_of_the_moment(pair: Cluster) -> None:
    program, pricing = shared(pair)
    fallen = nics(pair, (1e-9, "0.1 Gbit/s"))
    slow, _ = shared(nics(pair, (0.0, "0.1 Gbit/s")))
    assert slow.transfer_seconds > 1.5 * program.transfer_seconds
    own = seconds_under_changes(program, pricing, fallen)
    assert own == pytest.approx(program.compute_seconds + slow.transfer_seconds, rel=1e-4)
    middle = nics(pair, (program.seconds / 2, "0.1 Gbit/s"))
    assert program.seconds < seconds_under_changes(program, pricing, middle) < own
    assert network_pace(program, pricing, fallen).at(0.0) == 1.0


def test_an_outage_of_links_or_devices_is_waited_for(pair: Cluster) -> None:
    program, pricing = shared(pair)
    half = program.seconds / 2
    lost = speeds(pair, (half, 0.0), (half + 5, 1.0))
    down = nics(pair, (half, "0 bit/s"), (half + 5, "200 Gbit/s"))
    for cluster in (lost, down):  # what the other of them does is finished meanwhile
        assert half + 5 < seconds_under_changes(program, pricing, cluster) <= program.seconds + 5 + 1e-9


def test_a_single_stage_goes_by_the_same_clock(pair: Cluster) -> None:
    """Its operations come in another order, so the moment of a change matters to it, but not what it costs."""
    graph = captured("language")
    group = device_group(pair, NAMES, Dtype.FP32)
    whole = [0] * len(forward_order(graph))
    parts, stages = price_stages(graph, whole, [group], bandwidths=[], micro_batches=1, schedule=ONE_F_ONE_B)
    stage = stages[0]
    fallen = [nics(pair, (1e-9, "1 Gbit/s")), speeds(pair, (1e-9, 0.5)), nics(pair, (60.0, "1 Gbit/s")), pair]
    for cluster in fallen:
        end = play(stages, parts, cluster, micro_batches=1, schedule=ONE_F_ONE_B).end
        assert end == pytest.approx(seconds_under_changes(stage.program, stage.pricing, cluster), rel=1e-4)


def test_a_slow_device_is_slow_once(pair: Cluster) -> None:
    slow = speeds(pair, (0.0, 0.5))
    graph = captured("language")
    whole = [0] * len(forward_order(graph))
    group = device_group(slow, NAMES[:1], Dtype.FP32)
    parts, stages = price_stages(graph, whole, [group], bandwidths=[], micro_batches=1, schedule=ONE_F_ONE_B)
    end = play(stages, parts, slow, micro_batches=1, schedule=ONE_F_ONE_B).end
    assert end == pytest.approx(stages[0].seconds, rel=1e-9)


def test_a_link_that_falls_turns_the_choice(pair: Cluster, calm: GraphPlan) -> None:
    assert calm.program is not None and calm.pipeline is not None and calm.changed_seconds is None
    assert not calm.is_pipeline and calm.seconds == calm.program.seconds
    fallen = planned(nics(pair, (0.02, "1 Gbit/s")))
    assert fallen.program is not None and fallen.pipeline is not None
    assert fallen.program.seconds == calm.program.seconds < fallen.pipeline.seconds, "as priced at time 0"
    assert fallen.is_pipeline and fallen.seconds == fallen.pipeline.seconds < fallen.program_seconds
    assert "one program for all devices would take" in graph_plan_title(fallen, pair)
    assert graph_plan_to_dict(fallen)["program"]["step_seconds"] == fallen.changed_seconds


def test_a_change_after_the_step_changes_nothing(pair: Cluster, calm: GraphPlan) -> None:
    later = planned(nics(pair, (60.0, "1 Gbit/s")))
    assert calm.pipeline is not None and later.pipeline is not None
    assert not later.is_pipeline
    assert later.seconds == pytest.approx(calm.seconds, rel=1e-9)
    assert later.pipeline.seconds == pytest.approx(calm.pipeline.seconds, rel=1e-9)
    assert "while the cluster changes it takes" in graph_plan_title(later, pair)


def test_what_never_ends_is_no_plan(pair: Cluster) -> None:
    with pytest.raises(InfeasibleError, match=r"no step ends, because .* never ends"):
        planned(speeds(pair, (0.02, 0.0)))
