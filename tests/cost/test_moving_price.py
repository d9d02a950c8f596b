"""What a change of plan moves: every byte that a device lacks once, from whoever has it, and no
more."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.cluster.file import build_cluster, cluster_from_content, with_changes
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.cost.moving import (
    FORMING,
    PAUSE,
    Migration,
    Transfer,
    migration,
    process_groups,
)
from argosy.document import parse_toml
from argosy.dtype import Dtype
from argosy.plan.file import load_plan
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

RATE = 25e9 / 8
MASTER, MOMENTS = 4.0, 8.0
"""Bytes per weight that a move sends under AdamW: weights in fp32, and two moments."""


@pytest.fixture(scope="module")
def chain() -> Chain:
    return load_model("gpt2-xl")


def pair(changes: str = "") -> Cluster:
    """Two hosts with two devices each."""
    nodes = "".join(
        f'[[nodes]]\nname = "{name}"\ndevices = {{ kind = "A100-80GB", count = 2 }}\n'
        'intra = [{ medium = "nvlink", bandwidth = "300 GB/s" }]\nnic = { bandwidth = "25 Gbit/s" }\n'
        for name in "ab"
    )
    return build_cluster(
        parse_toml(f'name = "pair"\n{nodes}{changes}', file="pair.toml"), folder=Path()
    )


def plan_of(cluster: Cluster, chain: Chain, *stages: Stage) -> Plan:
    return Plan(
        model=ModelRef(name=chain.name, sequence_length=chain.sequence_length, dtype=chain.dtype),
        cluster=ClusterRef.of(cluster),
        global_batch=16,
        micro_batch_size=4,
        num_micro_batches=4,
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        stages=stages,
    )


def replicas(*devices: str) -> tuple[Replica, ...]:
    return tuple(Replica(devices=(device,), samples=4 // len(devices)) for device in devices)


def halves(cluster: Cluster, chain: Chain, cut: int, zero: int) -> Plan:
    """Layers up to ``cut`` on host a, the others on b."""
    return plan_of(
        cluster,
        chain,
        Stage(first=0, end=cut, replicas=replicas("a0.0", "a0.1"), zero=zero),
        Stage(first=cut, end=len(chain.layers), replicas=replicas("b0.0", "b0.1"), zero=zero),
    )


def direct(moved: Migration) -> list[Transfer]:
    return [*moved.weights.direct, *moved.state.direct]


def test_nothing_moves_between_equal_plans(chain: Chain) -> None:
    cluster = pair()
    plan = halves(cluster, chain, 20, 1)
    assert migration(plan, plan, chain, cluster).bytes == 0
    assert migration(plan, plan, chain, cluster).seconds(cluster) == 0
    other = migration(plan, replace(plan, micro_batch_size=8), chain, cluster)
    assert (other.bytes, other.seconds(cluster)) == (0, PAUSE)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_layer_that_moves_brings_what_zero_leaves_each_holder_of_it(
    chain: Chain, zero: int
) -> None:
    cluster = pair()
    moved = migration(
        halves(cluster, chain, 20, zero), halves(cluster, chain, 21, zero), chain, cluster
    )
    weights = chain.layers[20].parameters * MASTER / (2 if zero == 3 else 1)
    state = chain.layers[20].parameters * MOMENTS / (2 if zero else 1)
    assert moved.received == pytest.approx({"a0.0": weights + state, "a0.1": weights + state})
    once = chain.layers[20].parameters * (MASTER + MOMENTS)
    assert sum(size for *_, size in direct(moved)) == pytest.approx(once)
    passed_on = (*moved.weights.passed_on, *moved.state.passed_on)
    assert all(source[0] == target[0] == "a" for source, target, _ in passed_on)
    # Passing on inside the node adds a hundredth: 300 GB/s against 3.125 GB/s.
    assert moved.seconds(cluster) == pytest.approx(once / RATE + PAUSE, rel=0.01)


def test_weights_of_16_bits_move_as_their_copies_in_fp32(chain: Chain) -> None:
    """The runtime holds weights in fp32 and multiplies in 16 bits; 8-bit AdamW keeps no copy."""
    cluster = pair()
    plans = halves(cluster, chain, 20, 0), halves(cluster, chain, 21, 0)
    assert chain.dtype is Dtype.BF16
    single = migration(*plans, load_model("gpt2-xl", dtype=Dtype.FP32), cluster)
    assert migration(*plans, chain, cluster) == single
    light = migration(*plans, replace(chain, optimizer="adamw8bit"), cluster)
    assert light.weights.seconds(cluster) == pytest.approx(single.weights.seconds(cluster) / 2)


def test_from_shared_to_whole_only_the_other_half_of_the_state_moves_and_inside_the_host(
    chain: Chain,
) -> None:
    cluster = pair()
    moved = migration(halves(cluster, chain, 20, 1), halves(cluster, chain, 20, 0), chain, cluster)
    own = sum(layer.parameters for layer in chain.layers[:20]) - chain.layers[-1].tied_parameters
    first = (
        own * MOMENTS / 2
    )  # the table of tokens is in both stages, so that its state is whole before
    last = sum(layer.parameters for layer in chain.layers[20:]) * MOMENTS / 2
    assert moved.received == pytest.approx(
        {"a0.0": first, "a0.1": first, "b0.0": last, "b0.1": last}
    )
    assert all(source[0] == target[0] for source, target, _ in direct(moved))
    assert moved.seconds(cluster) < first / RATE + PAUSE


def test_from_whole_to_shared_nothing_moves(chain: Chain) -> None:
    cluster = pair()
    for before, after in itertools.combinations(range(4), 2):
        assert (
            migration(
                halves(cluster, chain, 20, before),
                halves(cluster, chain, 20, after),
                chain,
                cluster,
            ).bytes
            == 0
        )


def test_a_head_that_moves_brings_the_table_that_it_shares() -> None:
    """gpt2's head has 21,504 bytes of its own, and uses a table of 38.6 million weights."""
    cluster, chain = pair(), load_model("gpt2", dtype=Dtype.BF16)
    head = len(chain.layers) - 1
    stages = [
        Stage(first=0, end=6, replicas=replicas("a0.0")),
        Stage(first=6, end=head, replicas=replicas("a0.1")),
    ]
    here, there = (
        plan_of(cluster, chain, *stages, Stage(first=head, end=head + 1, replicas=replicas(device)))
        for device in ("b0.0", "b0.1")
    )
    moved = migration(here, there, chain, cluster)
    head_and_table = 768 * 2 + 50257 * 768
    assert moved.weights.direct == (("b0.0", "b0.1", MASTER * head_and_table),)
    assert moved.state.direct == (("b0.0", "b0.1", MOMENTS * head_and_table),)
    assert moved.bytes == 12 * head_and_table


def test_who_has_the_table_through_another_layer_needs_nothing_and_gives_it() -> None:
    """The table is on a and on b; b's head goes to a, whose devices ask each other first."""
    cluster, chain = pair(), load_model("gpt2", dtype=Dtype.BF16)
    head = len(chain.layers) - 1
    here = plan_of(
        cluster,
        chain,
        Stage(first=0, end=6, replicas=replicas("a0.0")),
        Stage(first=6, end=head, replicas=replicas("a0.1")),
        Stage(first=head, end=head + 1, replicas=replicas("b0.0")),
    )
    own = MOMENTS * chain.layers[head].parameters
    on_first = replace(
        here, stages=(*here.stages[:2], replace(here.stages[2], replicas=replicas("a0.0")))
    )
    assert migration(here, on_first, chain, cluster).state.direct == (("b0.0", "a0.0", own),)
    beside = replace(here, stages=(here.stages[0], replace(here.stages[1], end=head + 1)))
    table = MOMENTS * chain.layers[head].tied_parameters
    assert migration(here, beside, chain, cluster).state.direct == (
        ("a0.0", "a0.1", table),
        ("b0.0", "a0.1", own),
    )


def test_a_table_that_three_layers_share_comes_once() -> None:
    cluster, chain = pair(), load_model("t5-base", dtype=Dtype.BF16)
    half = len(chain.layers) // 2
    assert [layer.tied_to for layer in chain.layers[half:]].count(0) == 2
    here, there = (
        plan_of(
            cluster,
            chain,
            Stage(first=0, end=half, replicas=replicas("a0.0")),
            Stage(first=half, end=len(chain.layers), replicas=replicas(device)),
        )
        for device in ("b0.0", "b0.1")
    )
    own = sum(layer.parameters for layer in chain.layers[half:])
    assert migration(here, there, chain, cluster).bytes == 12 * (
        own + chain.layers[-1].tied_parameters
    )


@pytest.mark.parametrize(("zero", "parts"), [(0, 1), (1, 2), (2, 1), (3, 1)])
def test_a_table_within_a_stage_is_whole_where_zero_gathers_layer_by_layer(
    zero: int, parts: int
) -> None:
    """From one device to two: only under ZeRO 1 is the second to have half of the table's state,
    otherwise all."""
    cluster, chain = pair(), load_model("gpt2", dtype=Dtype.BF16)
    whole = Stage(first=0, end=len(chain.layers), replicas=replicas("a0.0"))
    two = replace(whole, replicas=replicas("a0.0", "a0.1"), zero=zero)
    moved = migration(plan_of(cluster, chain, whole), plan_of(cluster, chain, two), chain, cluster)
    table = chain.layers[-1].tied_parameters
    own = chain.parameters - table
    weights = own * MASTER / (2 if zero == 3 else 1) + own * MOMENTS / (2 if zero else 1)
    assert moved.received == pytest.approx({"a0.1": weights + table * (MASTER + MOMENTS / parts)})


def test_tensor_parallel_parts_are_sent_by_whoever_has_them(chain: Chain) -> None:
    cluster = pair()
    group = Replica(devices=("a0.0", "a0.1"), samples=4)
    together = plan_of(cluster, chain, Stage(first=0, end=len(chain.layers), replicas=(group,)))
    alone = plan_of(
        cluster, chain, Stage(first=0, end=len(chain.layers), replicas=replicas("b0.0"))
    )
    moved = migration(together, alone, chain, cluster)
    half = sum(layer.parameters for layer in chain.layers) / 2
    for transfers, width in ((moved.weights.direct, MASTER), (moved.state.direct, MOMENTS)):
        assert [pair for *pair, _ in transfers] == [["a0.0", "b0.0"], ["a0.1", "b0.0"]]
        assert [size for *_, size in transfers] == pytest.approx([half * width, half * width])


def test_what_cannot_be_reached_comes_from_somebody_who_can(chain: Chain) -> None:
    nodes = "".join(
        f'[[nodes]]\nname = "{name}"\ndevices = {{ kind = "A100-80GB" }}\nnic = {{ bandwidth = "25 Gbit/s" }}\n'
        for name in "abc"
    )
    down = '[[changes]]\nlink = "c0.nic"\nsteps = [["0 s", "0 Mbit/s"]]\n'
    cluster = build_cluster(
        parse_toml(f'name = "three"\n{nodes}{down}', file="three.toml"), folder=Path()
    )
    third = len(chain.layers) // 3
    cuts = (0, third, 2 * third, len(chain.layers))
    stages = [Stage(first=begin, end=end, replicas=replicas(f"{name}0.0"))
              for name, (begin, end) in zip("abc", itertools.pairwise(cuts), strict=True)]  # fmt: skip
    middle = (cuts[1] + cuts[3]) // 2
    left = [replace(stages[0], end=middle), replace(stages[1], first=middle, end=cuts[3])]
    moved = migration(
        plan_of(cluster, chain, *stages), plan_of(cluster, chain, *left), chain, cluster
    )
    assert "c0.0" not in {source for source, *_ in direct(moved)}
    assert math.isfinite(moved.seconds(cluster))
    back = migration(
        plan_of(cluster, chain, *left), plan_of(cluster, chain, *stages), chain, cluster
    )
    assert math.isinf(back.seconds(cluster))


def test_a_lost_device_sends_nothing_though_its_link_is_up(chain: Chain) -> None:
    """The copy of its state is in another node's memory."""
    cluster = pair()
    lost = [replace(device, speed=Trace.constant(0.0)) for device in cluster.devices[2:]]
    without = replace(cluster, devices=(*cluster.devices[:2], *lost))
    plan = halves(cluster, chain, 20, 0)
    alone = plan_of(
        cluster, chain, Stage(first=0, end=len(chain.layers), replicas=replicas("a0.0", "a0.1"))
    )
    moved = migration(plan, alone, chain, without)
    assert {source[0] for source, *_ in direct(moved)} == {"a"}
    assert {source[0] for source, *_ in direct(migration(plan, alone, chain, cluster))} == {"b"}


def test_bytes_take_the_way_that_is_up_then(chain: Chain) -> None:
    """Over PCIe while NVLink, which is faster at time 0, is down."""
    text = """
name = "node"
[[nodes]]
name = "a"
devices = { kind = "A100-80GB", count = 2 }
intra = [{ medium = "nvlink", bandwidth = "300 GB/s" }, { medium = "pcie", bandwidth = "20 GB/s" }]
[[changes]]
link = "a0.nvlink"
steps = [["10 s", "0 Mbit/s"]]
"""
    cluster = build_cluster(parse_toml(text, file="node.toml"), folder=Path())
    here, there = (
        plan_of(cluster, chain, Stage(first=0, end=len(chain.layers), replicas=replicas(name)))
        for name in ("a0.0", "a0.1")
    )
    for time, rate in ((0.0, 300e9), (20.0, 20e9)):
        moved = migration(here, there, chain, cluster, time)
        assert moved.seconds(cluster, time) == pytest.approx(moved.bytes / rate + PAUSE)


def test_a_big_plan_moves_one_layer_over_one_nic() -> None:
    plan = load_plan("llama-3-8b-on-mixed-16")
    cluster = with_changes(cluster_from_content(plan.cluster.content), [])
    chain = load_model(
        "llama-3-8b", sequence_length=plan.model.sequence_length, dtype=plan.model.dtype
    )
    first, second, *rest = plan.stages
    cut = first.end - 1
    moved = replace(plan, stages=(replace(first, end=cut), replace(second, first=cut), *rest))
    found = migration(plan, moved, chain, cluster)
    assert second.zero == 1
    # every replica has all of the weights, in fp32, and its part of the two moments
    weights = chain.layers[cut].parameters * MASTER * len(second.replicas)
    assert found.bytes == pytest.approx(weights + chain.layers[cut].parameters * MOMENTS)
    into = next(link for link in cluster.links if link.name == "a1.nic.in").bandwidth.at(0)
    once = chain.layers[cut].parameters * (MASTER + MOMENTS)
    inside = next(link for link in cluster.links if link.name == "a1.0.nvlink.out")
    passed_on = (len(second.replicas) - 1) * chain.layers[cut].parameters * MASTER
    assert sum(size for *_, size in found.weights.passed_on) == pytest.approx(passed_on)
    assert found.seconds(cluster) == pytest.approx(
        once / into + passed_on / inside.bandwidth.at(0) + PAUSE
    )


def test_groups_are_formed_once(chain: Chain) -> None:
    """Moving a layer between two stages needs none; going back to a plan needs none either."""
    cluster = pair()
    plan, shifted = halves(cluster, chain, 20, 0), halves(cluster, chain, 21, 0)
    assert not migration(plan, shifted, chain, cluster).new_groups
    apart = plan_of(
        cluster,
        chain,
        Stage(first=0, end=20, replicas=replicas("a0.0", "b0.0")),
        Stage(first=20, end=len(chain.layers), replicas=replicas("a0.1", "b0.1")),
    )
    there = migration(plan, apart, chain, cluster)
    assert frozenset({"a0.0", "b0.0"}) in there.new_groups
    back = migration(apart, plan, chain, cluster)
    assert frozenset({"a0.0", "a0.1"}) in back.new_groups
    saved = back.seconds(cluster) - back.seconds(cluster, known=process_groups(plan, chain))
    assert saved == pytest.approx(FORMING)


@pytest.mark.parametrize("zero", [0, 3])
def test_experts_move_only_to_holders_that_lack_them(zero: int) -> None:
    """Two holders of 5 and 3 of eight experts become two of 4 each: one expert moves, and with it
    nothing else."""
    cluster, mixture = pair(), load_model("mixtral-8x7b")
    holders = replicas("a0.0", "b0.0")
    stage = Stage(first=0, end=len(mixture.layers), replicas=holders, expert=2, experts=(5, 3))
    uneven = plan_of(cluster, mixture, replace(stage, zero=zero))
    even = plan_of(cluster, mixture, replace(stage, zero=zero, experts=()))
    moved = migration(uneven, even, mixture, cluster)
    assert not moved.is_free, "the number of experts is no share of samples"
    expert = sum(layer.expert_parameters for layer in mixture.layers) / 8
    assert moved.received == pytest.approx({"b0.0": expert * (MASTER + MOMENTS)})
    alone = plan_of(
        cluster, mixture, replace(stage, replicas=replicas("a0.0"), expert=1, experts=())
    )
    joined = migration(uneven, alone, mixture, cluster)
    outside = 0.0
    if zero:
        outside = sum(layer.parameters - layer.expert_parameters for layer in mixture.layers) / 2
    assert joined.bytes == pytest.approx((3 * expert + outside) * (MASTER + MOMENTS))
