"""A sequence in parts and experts over holders: bytes and seconds by hand, laws, and both ways to
simulate them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import pytest
from support.planning_cases import NO_FLOORS as WITHOUT_FLOORS
from support.planning_cases import cluster_of, kind_fields, node_fields

from argosy.cluster.topology import Cluster
from argosy.cost.compute import Portion, read_weights, split_stage_seconds, stage_seconds
from argosy.cost.memory import activation_bytes, state_bytes
from argosy.dtype import Dtype
from argosy.explain import explain_plan
from argosy.plan.check import check_plan
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Recompute, Replica, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import TaskGraph
from argosy.sim.fold import fold_plan
from argosy.sim.tasks.compile import compile_plan
from argosy.timeline import SpanKind
from argosy.workload.chain import Chain, Layer
from argosy.workload.load import load_model

NO_FLOORS = replace(
    WITHOUT_FLOORS,
    forward_peak=0.78,
    backward_peak=0.78,
    attention_peak=0.78,
    passes=2.5,
    gathered=0.0,
)
DENSE = Layer(
    name="block",
    kind="block",
    forward_flop=0.78e12,
    backward_flop=1.56e12,
    parameters=10**7,
    activation_bytes=0.0,
    output_bytes=1e8,
    reduced_bytes=2e8,
    key_value_bytes=4e8,
    attention_flop=0.39e12,
    max_tensor_width=8,
    max_context=32,
)
"""Forward 1 s and backward 2 s of products on a device of 1 TFLOP/s, half of both attention."""
SPARSE = replace(
    DENSE,
    parameters=10**8 + 8 * 10**7,
    expert_parameters=8 * 10**7,
    active_parameters=12 * 10**7,
    num_experts=8,
)
ROUTED = replace(SPARSE, routed_bytes=3e8)


def chain_of(*layers: Layer) -> Chain:
    return Chain(name="drawn", layers=layers, sequence_length=64, dtype=Dtype.BF16)


def cluster(
    count: int = 1, per_node: int = 4, *, intra: float = 1.0, nic: float = 1.0, latency: float = 0.0
) -> Cluster:
    kinds = [kind_fields("a", flops=1, memory=1e15, memory_bandwidth=1e9)]
    nodes = [
        node_fields("a", count=count, per_node=per_node, intra=intra, nic=nic, latency=latency)
    ]
    return cluster_of({"name": "even", "kinds": kinds, "nodes": nodes})


def plan_of(
    chain: Chain, where: Cluster, stages: Iterable[Stage], *, micro_batches: int = 1
) -> Plan:
    stages = tuple(stages)
    size = sum(replica.samples for replica in stages[0].replicas)
    plan = Plan(
        model=ModelRef(name=chain.name, sequence_length=chain.sequence_length, dtype=chain.dtype),
        cluster=ClusterRef.of(where),
        global_batch=size * micro_batches,
        micro_batch_size=size,
        num_micro_batches=micro_batches,
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        stages=stages,
    )
    check_plan(plan, chain, where)
    return plan


def one_stage(
    where: Cluster, chain: Chain, *, width: int, samples: int = 1, **settings: int | Recompute
) -> Stage:
    """All devices of a cluster in replicas of one width."""
    names = [device.name for device in where.devices]
    replicas = tuple(
        Replica(devices=tuple(names[at : at + width]), samples=samples)
        for at in range(0, len(names), width)
    )
    return Stage(first=0, end=len(chain.layers), replicas=replicas, **settings)  # type: ignore[arg-type]


def compiled(plan: Plan, chain: Chain, where: Cluster) -> TaskGraph:
    return compile_plan(plan, chain, where, NO_FLOORS)


def seconds(plan: Plan, chain: Chain, where: Cluster) -> float:
    (end,) = simulate_exact(compiled(plan, chain, where), where).iteration_ends
    return end


def collective_bytes(graph: TaskGraph, *, in_micro_batch: bool) -> float:
    tasks = [task for task in graph.tasks if task.kind is SpanKind.COLLECTIVE]
    return sum(
        flow.bytes
        for task in tasks
        if (task.micro_batch is not None) == in_micro_batch
        for flow in task.flows
    )


def test_keys_and_values_by_hand() -> None:
    """Four parts: each device sends its quarter of 400 MB three times, and twice as much in the
    backward."""
    chain, where = chain_of(DENSE), cluster()
    plan = plan_of(chain, where, [one_stage(where, chain, width=4, context=4)])
    graph = compiled(plan, chain, where)
    assert collective_bytes(graph, in_micro_batch=True) == pytest.approx(4 * 3 * 1e8 * (1 + 2))
    again = plan_of(
        chain, where, [one_stage(where, chain, width=4, context=4, recompute=Recompute.FULL)]
    )
    graph = compiled(again, chain, where)
    assert collective_bytes(graph, in_micro_batch=True) == pytest.approx(4 * 3 * 1e8 * (1 + 3))


@pytest.mark.parametrize(("intra", "hidden"), [(100.0, True), (0.5, False)])
def test_an_iteration_of_two_parts_by_hand(intra: float, hidden: bool) -> None:
    """Half of 1 s and of 2 s on each device; a quarter of that, of attention, may hide the exchange
    of 200 MB and of 400 MB. Then two holders sum 20 MB of gradients."""
    chain, where = chain_of(DENSE), cluster(per_node=2, intra=intra)
    plan = plan_of(chain, where, [one_stage(where, chain, width=2, context=2)])
    forward, backward = 0.2 / intra, 0.4 / intra
    passes = max(0.125, forward) + 0.375 + max(0.25, backward) + 0.75
    assert (passes == 1.5) == hidden
    gradients = 2e7 / (intra * 1e9)
    assert seconds(plan, chain, where) == pytest.approx(passes + gradients, rel=1e-4)


def test_tensor_parallel_groups_reduce_their_part_of_the_sequence() -> None:
    chain, where = chain_of(replace(DENSE, key_value_bytes=0.0)), cluster()
    plan = plan_of(chain, where, [one_stage(where, chain, width=4, context=2)])
    # Two pairs, each all-reduces half of 200 MB forward and again backward: one times its bytes per
    # device
    graph = compiled(plan, chain, where)
    assert collective_bytes(graph, in_micro_batch=True) == pytest.approx(2 * 4 * 1e8)
    # Two holders of pairs: each of the four devices sends its half of 20 MB once
    assert collective_bytes(graph, in_micro_batch=False) == pytest.approx(4 * 1e7)


def test_routed_tokens_by_hand() -> None:
    """Of 300 MB each of four holders keeps a quarter and sends one to each other, there and back,
    in both passes."""
    chain, where = chain_of(ROUTED), cluster()
    plan = plan_of(chain, where, [one_stage(where, chain, width=1, expert=4)])
    graph = compiled(plan, chain, where)
    assert collective_bytes(graph, in_micro_batch=True) == pytest.approx(4 * 3 * 3e8 / 4 * (2 + 2))
    again = plan_of(
        chain, where, [one_stage(where, chain, width=1, expert=4, recompute=Recompute.FULL)]
    )
    assert collective_bytes(compiled(again, chain, where), in_micro_batch=True) == pytest.approx(
        9e8 * (2 + 4)
    )


def test_gradients_of_experts_are_summed_over_those_that_hold_them() -> None:
    """100 M weights that all four hold, 80 M in two halves with two holders each, 2 bytes: (n - 1)
    / n of it, twice, from every device."""
    chain, where = chain_of(ROUTED), cluster()
    plan = plan_of(chain, where, [one_stage(where, chain, width=1, expert=2)])
    graph = compiled(plan, chain, where)
    common, split = 2 * 3 / 4 * 2e8, 2 * 1 / 2 * 0.8e8
    assert collective_bytes(graph, in_micro_batch=False) == pytest.approx(4 * (common + split))
    plan = plan_of(chain, where, [one_stage(where, chain, width=1, expert=4)])
    graph = compiled(plan, chain, where)
    assert collective_bytes(graph, in_micro_batch=False) == pytest.approx(4 * common)


def test_a_device_holds_its_part_of_the_experts_by_hand() -> None:
    chain, where = chain_of(ROUTED), cluster()
    stages = [one_stage(where, chain, width=1, expert=4, zero=zero) for zero in range(4)]
    held = [state_bytes(chain, stage, 1.0) for stage in stages]
    # 100 M weights and a quarter of 80 M; under ZeRO a quarter of everything, whoever holds it
    assert [one.weights for one in held] == pytest.approx([2 * 120e6] * 3 + [2 * 45e6])
    assert [one.gradients for one in held] == pytest.approx([2 * 120e6] * 2 + [2 * 45e6] * 2)
    assert [one.optimizer for one in held] == pytest.approx([12 * 120e6] + [12 * 45e6] * 3)


def test_parts_of_a_sequence_hold_the_weights_each() -> None:
    chain, where = chain_of(DENSE), cluster()
    assert state_bytes(chain, one_stage(where, chain, width=4, context=4), 0.25).weights == 2e7
    assert state_bytes(chain, one_stage(where, chain, width=4, context=2), 0.25).weights == 1e7
    shared = state_bytes(chain, one_stage(where, chain, width=4, context=4, zero=3), 0.25)
    assert shared.total == pytest.approx(16 * 10**7 / 4)


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "gpt2"])
def test_twice_the_sequence_in_twice_the_parts_keeps_the_memory_of_a_device(name: str) -> None:
    short, long = (load_model(name, sequence_length=length) for length in (512, 1024))
    for recompute in Recompute:
        stage = Stage(first=0, end=len(short.layers), replicas=(), recompute=recompute)
        once, twice = (
            activation_bytes(short, stage, 1, 1 / 2),
            activation_bytes(long, stage, 1, 1 / 4),
        )
        assert once == pytest.approx(twice)


def test_compute_is_divided_by_the_parts_and_weights_are_not() -> None:
    chain = load_model("llama-3-8b")
    device = cluster().devices[0]
    stage = Stage(first=1, end=2, replicas=())
    whole = stage_seconds(NO_FLOORS, chain, stage, Portion(device=device, samples=1))
    part = stage_seconds(
        NO_FLOORS,
        chain,
        replace(stage, context=4),
        Portion(device=device, samples=1, share=0.25, width=4),
    )
    weights = NO_FLOORS.passes * chain.layers[1].parameters * 2 / device.kind.memory_bandwidth
    assert 4 * part[0] == pytest.approx(whole[0] + 3 * weights)
    assert 4 * part[1] == pytest.approx(whole[1] + 3 * 2 * weights)


def test_attention_that_hides_an_exchange_is_part_of_the_time() -> None:
    chain, device = load_model("llama-3-8b", sequence_length=131072), cluster().devices[0]
    stage = Stage(first=0, end=len(chain.layers), replicas=(), context=8)
    cost = split_stage_seconds(
        NO_FLOORS, chain, stage, Portion(device=device, samples=1, share=1 / 8, width=8)
    )
    attention = 32 * chain.layers[1].attention_flop / 8 / (NO_FLOORS.forward_peak * 1e12)
    assert cost.hidden_forward == pytest.approx(7 / 8 * 6 / 7 * attention)
    assert cost.hidden_forward < cost.forward and cost.hidden_backward < cost.backward


def test_many_tokens_read_all_the_experts_of_a_device() -> None:
    """One token of mixtral meets two of eight; thousands meet all."""
    chain = load_model("mixtral-8x7b", sequence_length=1)
    block, device = chain.layers[1], cluster().devices[0]
    alone = read_weights(chain, block, Portion(device=device, samples=1))
    assert alone == pytest.approx(block.active_parameters)
    many = read_weights(chain, block, Portion(device=device, samples=4096))
    assert many == pytest.approx(block.parameters)
    quarter = read_weights(chain, block, Portion(device=device, samples=4096, expert=4))
    assert quarter == pytest.approx(block.parameters - 0.75 * block.expert_parameters)


CASES = [
    ({"width": 2, "context": 2}, 2, 4),
    ({"width": 4, "context": 2}, 2, 4),
    ({"width": 4, "context": 4, "zero": 1}, 2, 4),
    ({"width": 4, "context": 4, "zero": 3}, 1, 4),
    ({"width": 1, "expert": 4}, 2, 4),
    ({"width": 2, "context": 2, "expert": 4}, 2, 4),
    ({"width": 2, "expert": 2, "zero": 2}, 2, 4),
    ({"width": 4, "context": 4, "expert": 8, "recompute": Recompute.FULL}, 2, 4),
    ({"width": 8, "context": 8}, 2, 4),
]


@pytest.mark.parametrize(("settings", "count", "per_node"), CASES)
def test_folded_and_whole_simulation_agree(
    settings: dict[str, int], count: int, per_node: int
) -> None:
    chain, where = (
        chain_of(ROUTED, ROUTED),
        cluster(count, per_node, intra=2.0, nic=0.7, latency=3.0),
    )
    plan = plan_of(chain, where, [one_stage(where, chain, samples=2, **settings)], micro_batches=3)
    graph, small = fold_plan(plan, chain, where, NO_FLOORS)
    (folded,) = simulate_exact(graph, small).iteration_ends
    assert folded == pytest.approx(seconds(plan, chain, where), rel=0.02)


def test_stages_of_different_contexts_hand_everything_on() -> None:
    chain, where = chain_of(DENSE, DENSE), cluster(2, 4)
    names = [device.name for device in where.devices]
    stages = [
        Stage(first=0, end=1, replicas=(Replica(devices=tuple(names[:4]), samples=1),), context=4),
        Stage(first=1, end=2, replicas=(Replica(devices=tuple(names[4:6]), samples=1),), context=2),
    ]
    graph = compiled(plan_of(chain, where, stages), chain, where)
    moved: dict[int, float] = defaultdict(float)
    for task in graph.tasks:
        if task.kind is SpanKind.TRANSFER:
            moved[task.stage or 0] += sum(flow.bytes for flow in task.flows)
    assert moved == pytest.approx({0: 1e8, 1: 1e8})


def test_memory_is_explained_where_a_pass_is_two_spans() -> None:
    chain, where = chain_of(replace(DENSE, activation_bytes=1e9)), cluster(1, 2)
    plan = plan_of(chain, where, [one_stage(where, chain, width=2, context=2)], micro_batches=4)
    for held in explain_plan(plan, chain, where, model=NO_FLOORS).memory:
        assert held.activations == pytest.approx(0.5e9)
        assert held.buffers == pytest.approx(4 * 4e8 / 2)


def test_a_runtime_that_waits_for_transfers_can_run_parts_and_experts() -> None:
    """What goes on beside the computation keeps nobody from taking a transfer."""
    chain, where = chain_of(ROUTED, ROUTED, DENSE, DENSE), cluster(2, 4)
    names = [device.name for device in where.devices]
    pairs = tuple(Replica(devices=tuple(names[at : at + 2]), samples=1) for at in (0, 2))
    stages = [
        Stage(first=0, end=2, replicas=pairs, context=2, expert=4, zero=3),
        Stage(first=2, end=4, replicas=(Replica(devices=tuple(names[4:]), samples=2),), context=2),
    ]
    plan = plan_of(chain, where, stages, micro_batches=4)
    free, waiting = (
        simulate_exact(
            compile_plan(plan, chain, where, replace(NO_FLOORS, blocking=one)), where
        ).iteration_ends
        for one in (False, True)
    )
    assert free[0] <= waiting[0] < 2 * free[0]
