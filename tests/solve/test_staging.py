"""Pipelines of graphs that are no chains: stages compute what the whole does, and are priced and planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from spmd_models import BATCH, BUILDS, Perceptron, built, captured
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import keystr, tree_flatten_with_path

from argosy.cluster.file import load_cluster, with_changes
from argosy.cluster.topology import Cluster
from argosy.cost.group import DeviceGroup, device_group
from argosy.dtype import Dtype
from argosy.errors import InfeasibleError, NothingFitsError
from argosy.graph_planner import GraphPlan, find_graph_plan, ordered_runs
from argosy.report.graph_plan import pipeline_title
from argosy.runtime.calls import run_node, run_whole, tensor_constants, whole_tensors
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.solve.placement import Pricing
from argosy.solve.spmd import find_program
from argosy.solve.stagecut import cut_graph
from argosy.solve.staging import Pipeline, StageProgram, play, price_stages
from argosy.workload.capture.initial import build_fake
from argosy.workload.capture.trace import capture_fake, num_samples, with_samples
from argosy.workload.graph import Graph, Phase, Role
from argosy.workload.part import Parts, cut_into_parts, forward_order, run_after_run

CPU = torch.device("cpu")
ONE_F_ONE_B = ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B)


def run_in_parts(graph: Graph, parts: Parts, tensors: dict[int, Tensor]) -> tuple[Any, dict[int, Tensor]]:
    """Forwards first to last, backwards last to first; a part sees its own values and what was sent to it."""
    held: list[dict[int, Any]] = []
    for part in parts.parts:
        given = {
            v: tensors[w]
            for v, w in enumerate(part.values)
            if w in tensors and part.graph.values[v].role is not Role.RECEIVED
        }
        held.append(given | tensor_constants(part.graph, CPU))
    sent: dict[int, Any] = {}
    for phase, order in ((Phase.FORWARD, range(len(held))), (Phase.BACKWARD, range(len(held) - 1, -1, -1))):
        for number in order:
            part = parts.parts[number]
            for value in part.graph.with_role(Role.RECEIVED):
                if part.values[value] in sent:
                    held[number][value] = sent[part.values[value]]
            for node in part.graph.nodes:
                if node.phase is phase:
                    run_node(node, held[number], CPU)
            sent |= {part.values[v]: held[number][v] for v in part.graph.sent if v in held[number]}
    loss, gradients = None, {}
    for part, values in zip(parts.parts, held, strict=True):
        loss = values[part.graph.loss] if part.graph.loss is not None else loss
        for parameter, gradient in part.graph.gradients:
            whole = part.values[parameter]
            gradients[whole] = gradients.get(whole, 0) + values[gradient]
    return loss, gradients


FEW = {"perceptron", "language", "residual", "unet", "towers", "gpt2", "t5"}


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.4, 0.3, 0.3)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.exhaustive]) for name in BUILDS]
)
def test_stages_compute_what_the_whole_does(name: str, shares: tuple[float, ...]) -> None:
    graph = captured(name)
    torch.manual_seed(4)
    model, _, batch = built(name)()
    named = {key: tensor.detach() for key, tensor in [*model.named_parameters(), *model.named_buffers()]}
    named |= {keystr(path): leaf for path, leaf in tree_flatten_with_path(batch)[0]}
    tensors = whole_tensors(graph, named)
    parts = cut_into_parts(graph, cut_graph(graph, shares).stages)
    loss, gradients, _ = run_whole(graph, tensors)
    own, summed = run_in_parts(graph, parts, tensors)
    with torch.no_grad():
        assert torch.allclose(own, loss, rtol=1e-12)
        assert summed.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            assert torch.allclose(
                summed[parameter], gradient, rtol=1e-9, atol=1e-6 if name in ("llama", "mixtral") else 1e-12
            )


def test_skips_and_their_gradients_cross_each_boundary_once() -> None:
    graph = captured("unet")
    parts = cut_into_parts(graph, cut_graph(graph, (0.34, 0.33, 0.33)).stages)
    assert parts.forwarded and min(parts.up_bytes) > 0
    for up, down in zip(parts.up_bytes, parts.down_bytes, strict=True):
        assert 0 < down <= up, "at most a gradient goes back for every tensor that went on"


def group(count: int, *, memory: float = 1e12) -> DeviceGroup:
    return DeviceGroup(
        names=tuple(f"d{rank}" for rank in range(count)),
        flops=(1e8,) * count,
        memory_bandwidths=(1e12,) * count,
        memory=(memory,) * count,
        bandwidth=1e9,
        latency=0.0,
        launch=0.0,
    )


def priced(
    graph: Graph, forward: Any, groups: list[DeviceGroup], micro_batches: int
) -> tuple[Parts, tuple[StageProgram, ...]]:
    between = [1e9] * (len(groups) - 1)
    return price_stages(graph, forward, groups, bandwidths=between, micro_batches=micro_batches, schedule=ONE_F_ONE_B)


def test_one_stage_is_the_program_itself() -> None:
    graph = captured("language")
    _, (stage,) = priced(graph, [0] * len(forward_order(graph)), [group(3)], 1)
    whole = find_program(graph, Pricing(group=group(3)))
    assert stage.seconds + stage.sync_seconds == pytest.approx(whole.seconds, rel=1e-9)


def test_stages_on_single_devices_do_the_work_once() -> None:
    graph = captured("unet")
    cut = cut_graph(graph, (0.5, 0.5))
    _, stages = priced(graph, cut.stages, [group(1), group(1)], 4)
    _, (alone,) = priced(graph, [0] * len(cut.stages), [group(1)], 1)
    assert sum(stage.seconds for stage in stages) == pytest.approx(alone.seconds, rel=1e-9)
    assert all(stage.sync_seconds == 0 and not stage.program.moves for stage in stages)


def test_gradients_are_summed_once_a_step_and_activations_held_for_all_in_flight() -> None:
    graph = captured("language")
    cut = cut_graph(graph, (0.5, 0.5))
    _, few = priced(graph, cut.stages, [group(2), group(2)], 2)
    _, many = priced(graph, cut.stages, [group(2), group(2)], 16)
    assert many[0].pricing.in_flight == 2 and many[1].pricing.in_flight == 1
    assert many[0].seconds <= few[0].seconds * (1 + 1e-9), "sums weigh less when they serve more micro-batches"


CLUSTER = """
name = "pair"

[[nodes]]
name = "a"
devices = [{{ kind = "V100-32GB", count = 2 }}]
intra = [{{ medium = "nvlink", bandwidth = "100 GB/s", latency = "2 us" }}]
nic = {{ bandwidth = "{nic}", latency = "20 us" }}

[[nodes]]
name = "b"
devices = [{{ kind = "V100-32GB", count = 2 }}]
intra = [{{ medium = "nvlink", bandwidth = "100 GB/s", latency = "2 us" }}]
nic = {{ bandwidth = "{nic}", latency = "20 us" }}
"""


@pytest.fixture
def pair(tmp_path: Any) -> Cluster:
    """Two nodes with a slow network between."""
    (tmp_path / "pair.toml").write_text(CLUSTER.format(nic="10 Gbit/s"), encoding="utf-8")
    return load_cluster(str(tmp_path / "pair.toml"))


def test_a_played_pipeline_takes_what_the_closed_form_says(pair: Cluster) -> None:
    graph = captured("language")
    groups = [device_group(pair, names, Dtype.FP32) for names in (("a0.0", "a0.1"), ("b0.0", "b0.1"))]
    parts, stages = priced(graph, cut_graph(graph, (0.5, 0.5)).stages, groups, 8)
    even = [replace(stage, forward_seconds=1.0, backward_seconds=2.0, sync_seconds=0.5) for stage in stages]
    nothing = replace(parts, up_bytes=(0.0,), down_bytes=(0.0,))
    end = play(even, nothing, pair, micro_batches=8, schedule=ONE_F_ONE_B).end
    assert end == pytest.approx((8 + 1) * 3.0 + 0.5, rel=1e-3)  # latencies of empty messages apart


class Towers(nn.Module):
    def __init__(self, width: int = 512, layers: int = 3) -> None:
        super().__init__()
        self.left = nn.Sequential(*(Perceptron(width, width) for _ in range(layers)))
        self.right = nn.Sequential(*(Perceptron(width, width) for _ in range(layers)))

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        left, right = self.left(pair[0]), self.right(pair[1])
        return functional.normalize(left, dim=-1) @ functional.normalize(right, dim=-1).T * 5.0


def two_towers() -> Any:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch), torch.arange(batch[0].shape[0]))

    return Towers(), loss, (torch.randn(64, 512), torch.randn(64, 512))


def planned(build: Any, cluster: Cluster) -> GraphPlan:
    fake = build_fake(build)
    return find_graph_plan(
        lambda count: capture_fake(with_samples(fake, count), name="case"), num_samples(fake), cluster, Dtype.FP32
    )


@pytest.mark.parametrize("build", [two_towers, BUILDS["unet"]])
def test_the_planner_cuts_graphs_into_stages(build: Any, pair: Cluster) -> None:
    plan = planned(build, pair)
    assert plan.pipeline is not None and plan.program is not None and plan.attempts
    assert [len(stage.devices) for stage in plan.pipeline.stages] == [2, 2]
    assert plan.seconds == min(plan.program.seconds, plan.pipeline.seconds)
    for stage in plan.pipeline.stages:
        assert stage.program.graph.nodes and sum(stage.program.ratios) == pytest.approx(1)


def wide() -> Any:
    """Layers whose gradients are larger than what one hands to the next."""
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16)))
    return model, lambda net, x: net(x).square().mean(), torch.randn(2048, 4096)


def test_a_pipeline_wins_where_the_network_between_nodes_is_slow(pair: Cluster) -> None:
    plan = planned(wide, pair)
    assert plan.is_pipeline and plan.pipeline is not None
    assert plan.program is None or plan.pipeline.seconds < plan.program.seconds
    assert all(stage.program.group.names[0][0] == stage.program.group.names[-1][0] for stage in plan.pipeline.stages)


def test_what_fits_nowhere_is_said(pair: Cluster) -> None:
    def huge() -> Any:
        model = nn.Sequential(*(nn.Linear(40000, 40000, bias=False) for _ in range(12)))
        return model, lambda net, x: net(x).square().mean(), torch.randn(8, 40000)

    with pytest.raises(InfeasibleError, match="memory"):
        planned(huge, pair)


def test_runs_that_stay_inside_nodes_come_first(pair: Cluster) -> None:
    runs = list(ordered_runs(pair, [device.name for device in pair.devices]))
    assert runs[0] == (("a0.0", "a0.1"), ("b0.0", "b0.1")) and runs[1] == runs[0][::-1]


def test_a_batch_that_cannot_be_cut_is_no_pipeline(pair: Cluster) -> None:
    plan = planned(BUILDS["towers"], pair)  # its loss counts on all samples
    assert plan.pipeline is None and not plan.is_pipeline


def test_runs_of_a_forward() -> None:
    graph = captured("perceptron")
    count = len(forward_order(graph))
    parts = cut_into_parts(graph, run_after_run([2, count - 2]))
    assert len(parts.parts) == 2 and sum(len(part.graph.nodes) for part in parts.parts) == len(graph.nodes)
    assert BATCH in {part.graph.values[part.graph.with_role(Role.INPUT)[0]].shape[0] for part in parts.parts}


def test_a_host_that_a_link_cuts_off_at_time_zero_is_planned_without(pair: Cluster) -> None:
    cut = with_changes(pair, [{"link": "b0.nic", "steps": [["0 s", "0 bit/s"], ["9 s", "1 Gbit/s"]]}])
    plan = planned(BUILDS["perceptron"], cut)
    assert plan.program is not None and all(name.startswith("a") for name in plan.program.group.names)


def test_a_medium_that_is_down_at_time_zero_makes_plans_slow_and_no_more(pair: Cluster) -> None:
    down = with_changes(pair, [{"link": "a0.nvlink", "steps": [["0 s", "0 bit/s"], ["9 s", "1 Gbit/s"]]}])
    assert planned(BUILDS["perceptron"], down).seconds >= planned(BUILDS["perceptron"], pair).seconds


def test_a_cluster_of_lost_devices_has_no_plan(pair: Cluster) -> None:
    lost = with_changes(pair, [{"device": "*", "steps": [["0 s", 0], ["9 s", 1]]}])
    with pytest.raises(NothingFitsError, match=r"no device of pair.* is there at time 0"):
        planned(BUILDS["perceptron"], lost)


class Tied(nn.Module):
    """A table of words that the first stage looks up in and the last multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(64, 16)
        self.body = nn.Sequential(*(Perceptron(16, 32) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.word(x)) @ self.word.weight.T


def tied() -> Any:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return Tied(), loss, (torch.randint(0, 64, (8, 4)), torch.randint(0, 64, (8, 4)))


def test_weights_that_stages_share_are_summed_over_the_narrowest_network_between(pair: Cluster) -> None:
    fake = build_fake(tied)
    graph = capture_fake(with_samples(fake, 4), name="tied")
    forward = cut_graph(graph, (0.4, 0.3, 0.3)).stages
    groups = [device_group(pair, (name,), Dtype.FP32) for name in ("a0.0", "a0.1", "b0.0")]
    parts, stages = price_stages(graph, forward, groups, bandwidths=[1e9, 2e8], micro_batches=2, schedule=ONE_F_ONE_B)
    pipeline = Pipeline(graph=graph, parts=parts, stages=stages, micro_batches=2, schedule=ONE_F_ONE_B, seconds=0.125)
    assert repr(pipeline) == "tied in 3 stages on 1 | 1 | 1 devices: 0.125 s"
    assert repr(stages[0].program).endswith(f"on 1 device at 1: {stages[0].program.seconds:.6g} s, 0 collectives")
    ((table, holders),) = parts.shared
    assert graph.values[table].shape == (64, 16) and holders == (0, 2)
    both_ways = 2 * 64 * 16 * 4 / 2e8
    assert [stage.shared_seconds for stage in stages] == [pytest.approx(both_ways), 0.0, pytest.approx(both_ways)]
    assert [stage.sync_seconds for stage in stages] == [stage.shared_seconds for stage in stages]
    # a cluster that changes after the step: sums are work for the network, and take what they took
    later = with_changes(pair, [{"link": "b0.nic", "steps": [["60 s", "1 Gbit/s"]]}])
    calm, changing = (
        play(stages, parts, cluster, micro_batches=2, schedule=ONE_F_ONE_B).end for cluster in (pair, later)
    )
    assert changing == pytest.approx(calm, rel=1e-6)


def test_a_title_names_what_is_passed_on_and_what_is_shared(pair: Cluster) -> None:
    graph = captured("unet")
    groups = [device_group(pair, (name,), Dtype.FP32) for name in ("a0.0", "a0.1", "b0.0")]
    parts, stages = priced(graph, cut_graph(graph, (0.34, 0.33, 0.33)).stages, groups, 2)
    pipeline = Pipeline(graph=graph, parts=parts, stages=stages, micro_batches=2, schedule=ONE_F_ONE_B, seconds=0.125)
    plan = GraphPlan(program=None, pipeline=pipeline, attempts=())
    skips, held = pipeline_title(pipeline, pair, plan).splitlines()[2], replace(parts, shared=((0, (0, 2)),))
    names = ", ".join(graph.values[value].name for value in parts.forwarded)
    assert skips == f"passed on by stages that do not read them: {names}"
    last = pipeline_title(replace(pipeline, parts=held), pair, plan).splitlines()[-1]
    assert last == f"held by several stages, gradients summed: {graph.values[0].name}"
    assert plan.unknown == () and plan.is_pipeline
