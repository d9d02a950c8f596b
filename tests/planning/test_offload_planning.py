"""Plans that keep something in host memory: their memory, their copies and what the planner makes
of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.planning_cases import (
    NO_FLOORS,
    Case,
    Recipe,
    best_of_all,
    cluster_of,
    found_best,
    kind_fields,
    node_fields,
    random_case,
)

from argosy.cluster.topology import Cluster
from argosy.cost.memory import PIECE_BYTES, activation_bytes, state_bytes
from argosy.cost.offload import host_uses
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.explain.infeasible import diagnose
from argosy.explain.remedy import ChangeKind
from argosy.plan.check import check_plan
from argosy.plan.file import dumps_plan, loads_plan
from argosy.plan.offload import NO_OFFLOAD, Offload, parse_offload
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Recompute, Replica, Stage
from argosy.plan.runnable import unsupported
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import simulate
from argosy.timeline import SpanKind
from argosy.workload.chain import Chain, Layer

GB = 1e9
ALL = parse_offload("optimizer,activations,weights")


def chain_of(num_layers: int = 4, *, parameters: int = 10**9) -> Chain:
    """Layers of a second forward and two backward on 1 TFLOP/s, each keeping 2 GB of a sample."""
    layers = tuple(
        Layer(
            name=f"layer{at}",
            kind="block",
            forward_flop=1e12,
            backward_flop=2e12,
            activation_bytes=2 * GB,
            output_bytes=0.1 * GB,
            parameters=parameters,
        )
        for at in range(num_layers)
    )
    return Chain(
        name="layers", layers=layers, sequence_length=1, dtype=Dtype.BF16, optimizer="adamw"
    )


def cluster_with(
    host: dict[str, Any], *, per_node: int = 1, count: int = 1, memory: float = 100 * GB
) -> Cluster:
    kind = kind_fields("a", flops=1.0, memory=memory, memory_bandwidth=1e6)
    node = node_fields("a", count=count, per_node=per_node, intra=1000.0, nic=1000.0)
    return cluster_of({"name": "hosts", "kinds": [kind], "nodes": [{**node, "host_memory": host}]})


def plan_with(
    chain: Chain,
    cluster: Cluster,
    offload: Offload,
    stages: tuple[tuple[str, ...], ...],
    **changes: Any,
) -> Plan:
    """Layers in equal stages, each with a replica of one sample on every device that it names."""
    size = len(chain.layers) // len(stages)
    samples = max(map(len, stages))
    return Plan(
        model=ModelRef.of(chain),
        cluster=ClusterRef.of(cluster),
        global_batch=2 * samples,
        micro_batch_size=samples,
        num_micro_batches=2,
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        stages=tuple(
            Stage(
                first=at * size,
                end=(at + 1) * size,
                replicas=tuple(
                    Replica(devices=(name,), samples=samples // len(names)) for name in names
                ),
                offload=offload,
                **changes,
            )
            for at, names in enumerate(stages)
        ),
    )


def seconds_of(plan: Plan, chain: Chain, cluster: Cluster) -> float:
    model = replace(NO_FLOORS, forward_peak=1.0, backward_peak=1.0, passes=1e-12)
    return simulate(plan, chain, cluster, model=model).iteration_ends[0]


def test_what_is_offloaded_leaves_the_device_and_is_on_its_host() -> None:
    """By hand: AdamW keeps 8 bytes of moments per weight, a stage keeps its input of 0.1 GB on the
    device."""
    chain, cluster = chain_of(), cluster_with({"size": "1000 GB"}, count=2)
    plan = plan_with(chain, cluster, parse_offload("optimizer,activations"), (("a0.0",), ("a1.0",)))
    first, second = plan.stages
    state = state_bytes(chain, second, 1.0)
    assert (state.weights, state.gradients, state.optimizer) == (4 * GB, 4 * GB, 8 * GB)
    assert state.outside == 16 * GB
    assert (activation_bytes(chain, first, 1, 1.0), activation_bytes(chain, second, 1, 1.0)) == (
        0.0,
        0.1 * GB,
    )
    (one, other) = host_uses(plan, chain, cluster)
    assert (one.moments, one.activations, one.capacity) == (16 * GB, 2 * 4 * GB, 800 * GB)
    assert other.activations == pytest.approx(3.9 * GB)
    kept = chain_of(parameters=1)
    plan = plan_with(kept, cluster, parse_offload("activations"), (("a0.0",), ("a1.0",)))
    peaks = {
        name: max(held for _, held in steps) for name, steps in simulate(plan, kept, cluster).memory
    }
    assert peaks["a0.0"] == pytest.approx(
        4.2 * GB
    )  # two layers while they are copied, and gradients of an output
    plan = plan_with(chain, cluster, parse_offload("optimizer"), (("a0.0",), ("a1.0",)))
    spent = simulate(plan, chain, cluster)
    held = dict(spent.memory)["a1.0"]
    (begin,) = (
        span.start for span in spent.spans if span.kind is SpanKind.UPDATE and span.where == "a1.0"
    )
    at_update = max(level for time, level in held if time <= begin and time > begin - 3)
    assert at_update >= 16 * GB + 2 * PIECE_BYTES


@pytest.mark.parametrize(
    ("host", "offload", "expected"),
    [
        ({"bandwidth": "1000 GB/s"}, "activations", 24 + 0.0),
        ({"bandwidth": "1 GB/s"}, "activations", 2 * (1 + 8) + 2 * (2 + 8)),
        ({"bandwidth": "4 GB/s"}, "optimizer", 24 + 8),
        ({"bandwidth": "1 GB/s"}, "weights", 2 * (1 + 8) + 2 * (2 + 8) + 8),
        (
            {"bandwidth": "8 GB/s", "nvme": {"size": "1 TB", "bandwidth": "1 GB/s"}},
            "optimizer=nvme",
            24 + 32,
        ),
    ],
    ids=str,
)
def test_copies_run_beside_computing(host: dict[str, Any], offload: str, expected: float) -> None:
    """Four layers of 1 s forward and 2 s backward, two micro-batches of 8 GB that are kept, 8 GB of
    weights and 32 GB of moments: an action takes its first layer and then the longer of its copies
    and its other layers."""
    chain, cluster = chain_of(), cluster_with({"size": "1000 GB", **host})
    plan = plan_with(chain, cluster, parse_offload(offload), (("a0.0",),))
    check_plan(plan, chain, cluster)
    assert seconds_of(plan, chain, cluster) == pytest.approx(expected, rel=1e-3)


def test_devices_of_a_node_share_the_link_of_their_host() -> None:
    chain = chain_of()
    times = []
    for shared in (False, True):
        cluster = cluster_with(
            {"size": "1000 GB", "bandwidth": "1 GB/s", "shared": shared}, per_node=2
        )
        plan = plan_with(chain, cluster, parse_offload("activations"), (("a0.0", "a0.1"),))
        times.append(seconds_of(plan, chain, cluster))
    assert times[1] - times[0] == pytest.approx(4 * 8, rel=1e-3)


def test_a_plan_file_keeps_what_is_offloaded_and_says_what_is_wrong_with_it() -> None:
    chain, cluster = chain_of(), cluster_with({"size": "1000 GB"})
    plan = plan_with(chain, cluster, parse_offload("optimizer=nvme,activations"), (("a0.0",),))
    assert json.loads(dumps_plan(plan))["stages"][0]["offload"] == {
        "optimizer": "nvme",
        "activations": "host",
    }
    assert loads_plan(dumps_plan(plan)) == plan
    assert (
        "offload"
        not in json.loads(dumps_plan(plan_with(chain, cluster, NO_OFFLOAD, (("a0.0",),))))[
            "stages"
        ][0]
    )
    with pytest.raises(InputError, match=r"a0 has no host_memory\.nvme"):
        check_plan(plan, chain, cluster)
    selective = plan_with(
        chain, cluster, parse_offload("activations"), (("a0.0",),), recompute=Recompute.SELECTIVE
    )
    with pytest.raises(InputError, match="recompute none or full"):
        check_plan(selective, chain, cluster)
    with pytest.raises(InputError, match="some of optimizer, activations, weights"):
        parse_offload("optimiser")


def with_hosts(case: Case, seed: int) -> Case:
    """The case with half of its memory, on nodes whose links to host memory are between useless and
    free, and whose own memory is short or not."""
    content = json.loads(case.cluster.content)
    needed = 16 * case.chain.parameters
    for kind in content["kinds"]:
        kind["memory"] = f"{float(kind['memory'].split()[0]) / 2} GB"
    for at, node in enumerate(content["nodes"]):
        size, rate = (0.3, 2.0)[(seed + at) % 2] * needed, (0.05, 1.0, 50.0)[(seed + at) % 3]
        node["host_memory"] = {
            "size": f"{size} B",
            "bandwidth": f"{rate} GB/s",
            "shared": seed % 2 == 0,
        }
    return replace(case, cluster=cluster_of(content))


@pytest.mark.parametrize("block", range(2))
def test_no_plan_that_offloads_is_faster_than_the_planner_says(block: int) -> None:
    """The bound is not above the best of all plans, and more is possible than without offload."""
    used = 0
    recipe = Recipe(
        max_devices=3, max_pools=2, max_layers=3, batches=(2, 3), wide=False, per_node=(1, 2)
    )
    offload = (parse_offload("optimizer,activations"), ALL)[block]
    for seed in range(12):
        case = with_hosts(random_case(seed, recipe), seed)
        scope = case.scope(
            prune=False, offload=offload, recompute=(Recompute.NONE, Recompute.FULL), zero=(0, 1)
        )
        everything = best_of_all(case, scope, 20_000)
        settings = Settings(
            level=2, gap=0, units=case.ones, schedules=case.schedules, zero=scope.zero
        )
        settings = replace(settings, recompute=scope.recompute)
        assert everything is not None
        best, _ = everything
        plan, ours = found_best(case, replace(settings, offload=offload))
        _, without = found_best(case, settings)
        assert ours <= without * (1 + 1e-6), seed
        assert (plan is None) == (best == float("inf")), seed
        if plan is not None and plan.certificate is not None:
            assert plan.certificate.lower_bound_seconds <= best * (1 + 1e-8), seed
            assert ours <= 1.1 * best, seed
            check_plan(plan, case.chain, case.cluster)
            assert all(
                use.total <= use.capacity for use in host_uses(plan, case.chain, case.cluster)
            ), seed
            used += plan.offloads
    assert used >= 3


def test_what_would_fit_names_the_least_offload_and_its_time() -> None:
    """64 GB of state on a device of 40 GB, of which 32 GB may be on the host."""
    chain = chain_of()
    chain = replace(
        chain, layers=tuple(replace(layer, activation_bytes=0.1 * GB) for layer in chain.layers)
    )
    cluster = cluster_with({"size": "50 GB", "bandwidth": "4 GB/s"}, memory=40 * GB)
    why = diagnose(chain, cluster, global_batch=2)
    (change,) = (change for change in why.changes if change.kind is ChangeKind.OFFLOAD)
    assert (change.sentence, change.options) == (
        "optimizer state in host memory",
        (("--offload", "optimizer"),),
    )
    plan = find_plan(
        chain, cluster, global_batch=2, settings=Settings(offload=parse_offload("optimizer"))
    )
    assert plan.predicted is not None and change.seconds == pytest.approx(
        plan.predicted.iteration_seconds, rel=1e-6
    )
    runnable = find_plan(
        chain, cluster, global_batch=2, settings=Settings(offload=ALL, runnable=True)
    )
    assert runnable.offloads and unsupported(runnable) == ()
    small = cluster_with({"size": "20 GB", "bandwidth": "4 GB/s"}, memory=40 * GB)
    kinds = {change.kind for change in diagnose(chain, small, global_batch=2).changes}
    assert ChangeKind.OFFLOAD not in kinds
