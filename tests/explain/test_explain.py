"""Why a plan takes as long as it does: figures that add up, and what-ifs that are simulations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from argosy.cli.inputs import Scenario, load_scenario
from argosy.cluster.file import build_cluster, load_cluster, with_changes
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.cost.compute import ComputeModel
from argosy.cost.memory import USABLE, activation_bytes, state_bytes
from argosy.cost.planned import planned_memory
from argosy.document import parse_toml
from argosy.errors import InfeasibleError
from argosy.explain import explain_plan, with_prediction
from argosy.explain.contest import contest
from argosy.explain.load import bottleneck, edge_loads, stage_loads
from argosy.explain.memory import memory_stack
from argosy.explain.whatif import (
    cheaper_settings,
    with_faster_devices,
    with_replica,
    with_wider_edges,
)
from argosy.plan.file import read_plan
from argosy.plan.plan import Certificate, LeftOut, Plan, Recompute, Replica, Stage
from argosy.planner import find_plan
from argosy.report.explain import memory_in_a_sentence
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import simulate
from argosy.workload.load import load_model

BUNDLED = ("gpt2-xl-on-two-cards", "llama-3-8b-on-mixed-16")
SCHEDULES = (
    ScheduleSpec(kind=ScheduleKind.GPIPE),
    ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
    ScheduleSpec(kind=ScheduleKind.EAGER),
    ScheduleSpec(kind=ScheduleKind.KFKB, k=2),
    ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE),
)


def scenario(name: str = BUNDLED[0]) -> Scenario:
    return load_scenario(read_plan(name))


def with_stages(plan: Plan, **settings: object) -> Plan:
    return replace(plan, stages=tuple(replace(stage, **settings) for stage in plan.stages))  # type: ignore[arg-type]


def tight(memory: str) -> Cluster:
    """The two cards' cluster with small memory on the large cards."""
    text = f"""
        name = "two-cards"
        [[kinds]]
        name = "RTX-A6000"
        memory = "{memory}"
        memory_bandwidth = "768 GB/s"
        flops = {{ fp16 = "155 TFLOP/s" }}
        [[nodes]]
        name = "box"
        devices = [{{ kind = "RTX-A6000", count = 2 }}, {{ kind = "RTX-2080Ti", count = 2 }}]
        intra = [{{ medium = "pcie", bandwidth = "12 GB/s" }}]
    """
    return build_cluster(parse_toml(text, file="tight.toml"), folder=Path())


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", BUNDLED)
def test_stacked_memory_is_the_peak_of_the_simulation(
    name: str, schedule: ScheduleSpec, recompute: Recompute
) -> None:
    case = scenario(name)
    plan = with_stages(replace(case.plan, schedule=schedule), recompute=recompute)
    timeline = simulate(plan, case.chain, case.cluster)
    peaks = timeline.peak_memory()
    stack = memory_stack(plan, case.chain, case.cluster, timeline)
    assert [memory.device for memory in stack] == list(plan.devices)
    for memory in stack:
        assert memory.peak == pytest.approx(peaks[memory.device], rel=1e-12)
        assert memory.free == memory.capacity - memory.peak
        index = next(
            index for index, stage in enumerate(plan.stages) if memory.device in stage.devices
        )
        stage = plan.stages[index]
        replica = next(replica for replica in stage.replicas if memory.device in replica.devices)
        state = state_bytes(case.chain, stage, replica.shares[0])
        assert (memory.weights, memory.gradients, memory.optimizer) == (
            state.weights,
            state.gradients,
            state.optimizer,
        )
        in_flight = memory.activations / activation_bytes(
            case.chain, stage, replica.samples, replica.shares[0]
        )
        assert in_flight == pytest.approx(round(in_flight))
        assert 1 <= round(in_flight) <= plan.num_micro_batches


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", BUNDLED)
def test_memory_in_closed_form_is_the_peak_but_for_early_arrivals(
    name: str, schedule: ScheduleSpec, recompute: Recompute
) -> None:
    case = scenario(name)
    plan = with_stages(replace(case.plan, schedule=schedule), recompute=recompute)
    peaks = simulate(plan, case.chain, case.cluster).peak_memory()
    planned = planned_memory(plan, case.chain)
    assert list(planned) == list(plan.devices)
    for device, held in planned.items():
        assert 0.9 * peaks[device] <= held <= peaks[device] * (1 + 1e-12)


def test_a_device_with_several_chunks_holds_them_all() -> None:
    case = scenario("llama-3-8b-on-mixed-16")
    bounds = ((0, 6), (6, 12), (12, 23), (23, 34))
    nodes = [stage.replicas for stage in case.plan.stages[:2]] * 2
    stages = tuple(
        Stage(first=a, end=b, replicas=r) for (a, b), r in zip(bounds, nodes, strict=True)
    )
    spec = ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2)
    plan = replace(case.plan, schedule=spec, stages=stages)
    timeline = simulate(plan, case.chain, case.cluster)
    for memory in memory_stack(plan, case.chain, case.cluster, timeline):
        assert memory.peak == pytest.approx(timeline.peak_memory()[memory.device], rel=1e-12)
        assert memory.buffers < 0.5 * memory.activations


@pytest.mark.parametrize("name", BUNDLED)
def test_load_of_a_stage_is_its_busiest_device_s(name: str) -> None:
    case = scenario(name)
    timeline = simulate(case.plan, case.chain, case.cluster)
    shares = timeline.utilisation()
    for load, stage in zip(stage_loads(case.plan, timeline), case.plan.stages, strict=True):
        assert load.computing == pytest.approx(max(shares[device] for device in stage.devices))
        assert load.exchanging >= 0
        assert load.busy <= 1 + 1e-9


def test_bottleneck_is_most_of_the_critical_path() -> None:
    case = scenario("llama-3-8b-on-mixed-16")
    timeline = simulate(case.plan, case.chain, case.cluster)
    loads = stage_loads(case.plan, timeline)
    assert sum(load.critical for load in loads) <= 1 + 1e-9
    assert bottleneck(loads).stage == 2
    slowed = with_faster_devices(case.cluster, case.plan.stages[1].devices, 0.5)
    assert bottleneck(stage_loads(case.plan, simulate(case.plan, case.chain, slowed))).stage == 1


def test_edges_are_as_busy_as_their_busiest_link() -> None:
    case = scenario("llama-3-8b-on-mixed-16")
    timeline = simulate(case.plan, case.chain, case.cluster)
    loads = {load.edge: load.utilisation for load in edge_loads(case.cluster, timeline)}
    used = {use.link: use.utilisation for use in timeline.links}
    assert loads["v0.nic"] == max(used["v0.nic.in"], used["v0.nic.out"])
    assert list(loads.values()) == sorted(loads.values(), reverse=True)


def test_a_wider_edge_is_wider_except_while_it_is_down() -> None:
    steps = [["10 s", "0 Gbit/s"], ["20 s", "8 Gbit/s"]]
    cluster = with_changes(load_cluster("mixed-16"), [{"link": "v0.nic", "steps": steps}])
    wider = with_wider_edges(cluster, ["v0.nic"], 1e9)
    for before, after in zip(cluster.links, wider.links, strict=True):
        if before.edge == "v0.nic":
            assert after.bandwidth == Trace((0.0, 10.0, 20.0), (4.125e9, 0.0, 2e9))
        else:
            assert after == before


def test_gains_are_those_of_the_changed_simulation() -> None:
    case = scenario("llama-3-8b-on-mixed-16")
    explanation = explain_plan(case.plan, case.chain, case.cluster)
    changed = {one.change: one for one in explanation.improvements}
    wider = with_wider_edges(case.cluster, ["v0.nic"], 1e9)
    seconds = simulate(case.plan, case.chain, wider).iteration_ends[0]
    assert changed["1 GB/s more on v0.nic"].seconds == seconds
    assert changed["1 GB/s more on v0.nic"].gain == pytest.approx(explanation.seconds / seconds - 1)
    assert 0.05 < changed["10 % more speed of stage 2's devices"].gain <= 0.1
    assert len(changed) == 4


def test_equally_busy_edges_are_widened_together() -> None:
    case = scenario()
    cluster = load_cluster("one-per-node-16")
    stages = tuple(
        Stage(
            first=first,
            end=end,
            replicas=tuple(Replica(devices=(f"{group}{i}.0",), samples=1) for i in range(4)),
        )
        for group, first, end in (("l", 0, 30), ("t", 30, 50))
    )
    plan = with_stages(replace(case.plan, stages=stages), zero=1)
    changes = [one.change for one in explain_plan(plan, case.chain, cluster).improvements]
    assert "1 GB/s more on t0.nic and 3 like it" in changes


def test_cheaper_settings_save_time_and_cost_memory() -> None:
    replicas = tuple(Replica(devices=(f"a0.{index}",), samples=1) for index in range(2))
    stage = Stage(first=0, end=1, replicas=replicas, recompute=Recompute.FULL, zero=3)
    names = [name for name, _ in cheaper_settings(stage)]
    assert names == ["recompute none", "recompute selective", "zero 1", "zero 2"]
    assert not list(cheaper_settings(replace(stage, recompute=Recompute.NONE, zero=1)))
    assert not list(
        cheaper_settings(replace(stage, recompute=Recompute.NONE, replicas=replicas[:1]))
    )
    parts = replace(stage, replicas=(Replica(devices=("a0.0", "a0.1"), samples=1),), context=2)
    assert [name for name, _ in cheaper_settings(parts)] == names, (
        "parts of a sequence share weights, too"
    )


def test_more_memory_is_offered_for_less_recomputation() -> None:
    case = scenario()
    (roomy,) = explain_plan(case.plan, case.chain, case.cluster).settings
    assert roomy.change == "recompute none in stage 0"
    assert roomy.gain > 0
    assert roomy.missing == 0
    (scarce,) = explain_plan(case.plan, case.chain, tight("18 GiB")).settings
    without = with_stages(case.plan, recompute=Recompute.NONE)
    held = simulate(without, case.chain, tight("18 GiB")).peak_memory()["box0.0"]
    assert scarce.missing == pytest.approx(held - USABLE * 18 * 2**30)
    assert scarce.missing > 0


def test_no_setting_is_said_to_fit_that_the_search_was_not_allowed() -> None:
    """The certificate says that nothing is faster: less recomputation would be, in memory that is
    kept free."""
    chain, cluster = load_model("bert-large", dtype="fp16"), load_cluster("two-cards")
    plan = find_plan(chain, cluster, global_batch=256)
    assert plan.certificate is not None
    faster = [
        one
        for one in explain_plan(plan, chain, cluster).settings
        if one.gain > plan.certificate.gap
    ]
    assert faster
    assert all(one.missing > 0 for one in faster)


def test_settings_of_other_stages_are_changed_together() -> None:
    case = scenario("llama-3-8b-on-mixed-16")
    plan = with_stages(case.plan, recompute=Recompute.SELECTIVE)
    changes = {one.change for one in explain_plan(plan, case.chain, case.cluster).settings}
    assert changes == {"recompute none in stage 2", "recompute none in stages 0, 1, 2, 3"}


def without_small_cards(case: Scenario, *, samples: tuple[int, int] = (2, 2)) -> Plan:
    large = tuple(
        Replica(devices=(f"box0.{index}",), samples=count) for index, count in enumerate(samples)
    )
    stage = Stage(first=0, end=50, replicas=large, recompute=Recompute.FULL, zero=1)
    left = tuple(LeftOut(device=f"box0.{index}", reason="too small") for index in (2, 3))
    return replace(case.plan, stages=(stage,), left_out=left)


def test_a_left_out_device_is_tried_as_a_further_replica() -> None:
    case = scenario()
    plan = without_small_cards(case)
    (addition,) = explain_plan(plan, case.chain, case.cluster).additions
    assert addition.change == "box0.2 as a further replica of stage 0"
    assert addition.missing > 0
    larger = with_replica(plan, 0, ("box0.2",), case.chain, case.cluster, ComputeModel())
    assert larger is not None
    assert [replica.samples for replica in larger.stages[0].replicas] == [2, 1, 1]
    assert [left.device for left in larger.left_out] == ["box0.3"]


def test_nothing_is_added_where_samples_do_not_suffice() -> None:
    case = scenario()
    plan = replace(
        without_small_cards(case, samples=(1, 1)), micro_batch_size=2, num_micro_batches=32
    )
    assert explain_plan(plan, case.chain, case.cluster).additions == ()


def test_nothing_is_added_that_cannot_be_reached() -> None:
    case = scenario()
    text = """
        name = "two-boxes"
        [[nodes]]
        name = "box"
        devices = { kind = "RTX-A6000", count = 2 }
        intra = [{ medium = "pcie", bandwidth = "12 GB/s" }]
        [[nodes]]
        name = "far"
        devices = { kind = "RTX-A6000" }
    """
    cluster = build_cluster(parse_toml(text, file="far.toml"), folder=Path())
    left = (LeftOut(device="far0.0", reason="no route to it"),)
    plan = replace(without_small_cards(case), left_out=left)
    assert explain_plan(plan, case.chain, cluster).additions == ()


def test_a_plan_that_never_ends_cannot_be_explained() -> None:
    case = scenario()
    dead = with_changes(case.cluster, [{"device": "box0.2", "steps": [["0 s", 0]]}])
    with pytest.raises(
        InfeasibleError, match=r"gpt2-xl on two-cards: no iteration ends, because box0\.2 is lost"
    ):
        explain_plan(case.plan, case.chain, dead)


def test_prediction_is_the_simulation_and_the_certificate_stays() -> None:
    case = scenario()
    certificate = Certificate(lower_bound_seconds=2.0, gap=0.5, granularity=1, scope="all")
    plan = with_prediction(replace(case.plan, certificate=certificate), case.chain, case.cluster)
    timeline = simulate(case.plan, case.chain, case.cluster)
    assert plan.predicted is not None
    assert plan.predicted.iteration_seconds == timeline.iteration_ends[0]
    assert dict(plan.predicted.peak_memory_bytes) == timeline.peak_memory()
    assert plan.predicted.bottleneck == "stage 1"
    assert (plan.certificate, plan.cost_model) == (certificate, None)
    other = with_prediction(plan, case.chain, case.cluster, model=ComputeModel(forward_peak=0.1))
    assert other.predicted is not None and other.cost_model is not None
    assert other.predicted.iteration_seconds > plan.predicted.iteration_seconds
    assert other.certificate is None


def test_a_large_plan_is_folded_for_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    case = scenario()
    small = with_prediction(case.plan, case.chain, case.cluster)
    assert small.predicted is not None
    monkeypatch.setattr("argosy.sim.simulate.MOST_WHOLE", 1)
    large = with_prediction(case.plan, case.chain, case.cluster).predicted
    assert large is not None
    assert large.iteration_seconds == pytest.approx(small.predicted.iteration_seconds, rel=0.01)
    assert large.bottleneck == small.predicted.bottleneck == "stage 1"
    assert dict(large.peak_memory_bytes) == planned_memory(case.plan, case.chain)


def test_a_plan_that_does_not_fit_is_told_so_first() -> None:
    case = scenario()
    large = replace(
        case.plan,
        schedule=ScheduleSpec(kind=ScheduleKind.GPIPE),
        micro_batch_size=64,
        num_micro_batches=1,
    )
    stages = tuple(
        replace(stage, replicas=tuple(replace(r, samples=r.samples * 16) for r in stage.replicas))
        for stage in large.stages
    )
    told = memory_in_a_sentence(
        explain_plan(replace(large, stages=stages), case.chain, case.cluster)
    )
    assert told.startswith("This plan cannot run: box0.")


def test_a_contest_of_folded_plans_is_that_of_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan without tensor-parallel groups: their sums count as compute where a plan is
    folded."""
    case = scenario("llama-3-8b-on-mixed-16")
    (whole,) = contest([("argosy", case.plan)], case.chain, [case.cluster])
    monkeypatch.setattr("argosy.sim.simulate.MOST_WHOLE", 0)
    (folded,) = contest([("argosy", case.plan)], case.chain, [case.cluster])
    assert folded.seconds == pytest.approx(whole.seconds, rel=0.01)
    for (loss, one), (_, other) in zip(folded.losses, whole.losses, strict=True):
        assert one == pytest.approx(other, abs=0.02), loss
