"""Rows of the ``spmd`` benchmark: against HAP's synthesiser in its units, search times, simpler
splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.group import device_group
from argosy.dtype import Dtype
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.planner import CapturedProgram, find_plan
from argosy.runtime.sources.operations import capture_program
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.prediction import play_once
from argosy.solve.programs.placement import Pricing
from argosy.solve.programs.spmd import Program, find_program, program_at
from argosy.space.operations.rules import StateChoices
from argosy.space.operations.sharding import unit_counts
from argosy.workload.capture.trace import capture
from argosy.workload.chain import Chain
from argosy.workload.graph import Graph
from benchmarks.registry import Row, cpu_seconds
from benchmarks.spmd_models import language, t5, vgg, vision
from benchmarks.spmd_units import EQUAL, hap_pricing, unequal

HAP = {
    "transformer, 8 unequal": (language, unequal(8), 1.2365, 3.35),
    "transformer, 8 equal": (language, (EQUAL,) * 8, 0.5453, None),
    "mixture of experts, 8 unequal": (partial(language, experts=16), unequal(8), 1.9585, 4.22),
}
"""Model, devices, and the released synthesiser's cost and seconds of search."""
MODELS: dict[str, Callable[[int], Any]] = {
    "VGG-19": vgg,
    "ViT-Base": vision,
    "BERT-Base": partial(language, words=30522),
    "BERT-MoE": partial(language, words=30522, experts=128),
}


def against_hap() -> list[Row]:
    rows = []
    for what, (build, speeds, cost, seconds) in HAP.items():
        graph = capture(lambda build=build: build(256), name=what)
        pricing = hap_pricing(speeds)
        found = find_program(graph, pricing)
        spent = cpu_seconds(lambda g=graph, p=pricing: find_program(g, p), repeats=2)
        rows.append(
            Row(
                what=f"{what}: cost in HAP's units",
                value=found.seconds,
                unit="s",
                target=f"<= {cost}",
            )
        )
        target = f"< {seconds}" if seconds else ""
        rows.append(Row(what=f"{what}: whole search", value=spent, unit="s CPU", target=target))
        whole = find_program(graph, hap_pricing(speeds, element_bytes=4.0, rounded=True))
        rows.append(Row(what=f"{what}: bytes, whole samples", value=whole.seconds, unit="s"))
    return rows


def search_times() -> list[Row]:
    graph = capture(lambda: language(256), name="transformer")
    pricing = hap_pricing(unequal(8), rounded=True)
    return [
        Row(what="operations of the 12-layer step", value=len(graph.nodes), unit=""),
        Row(
            what="whole search, equal layers once",
            value=_once(graph, pricing),
            unit="s CPU",
            target="< 0.1",
        ),
        Row(
            what="every operation by itself",
            value=_once(graph, pricing, fold=False),
            unit="s CPU",
            target="< 1",
        ),
        Row(
            what="program and ratios in turns",
            value=cpu_seconds(lambda: find_program(graph, pricing), repeats=3),
            unit="s CPU",
        ),
    ]


def large_searches() -> list[Row]:
    """A step of 10,000 operations, and T5, whose layers hang together."""
    deep = capture(lambda: language(256, layers=116), name="deep transformer")
    pricing = hap_pricing(unequal(8), rounded=True)
    tangled = capture(lambda: t5(256), name="T5")
    found = _at_speed(tangled, pricing)
    return [
        Row(what="operations of the 116-layer step", value=len(deep.nodes), unit=""),
        Row(what="116 layers: equal layers once", value=_once(deep, pricing), unit="s CPU"),
        Row(
            what="116 layers: every operation by itself",
            value=_once(deep, pricing, fold=False),
            unit="s CPU",
        ),
        Row(
            what="116 layers: program and ratios in turns",
            value=cpu_seconds(lambda: find_program(deep, pricing), repeats=2),
            unit="s CPU",
        ),
        Row(what="operations of T5's step, 12 + 12 layers", value=len(tangled.nodes), unit=""),
        Row(what="T5: whole search", value=_once(tangled, pricing), unit="s CPU"),
        Row(what="T5: its proven gap", value=100 * (found.seconds / found.bound - 1), unit="%"),
    ]


def _at_speed(graph: Graph, pricing: Pricing, *, fold: bool = True) -> Program:
    """One ratio vector, in proportion to speed; rules and tables included."""
    return program_at(
        graph, StateChoices(graph, len(pricing.group), fold=fold), pricing, pricing.group.by_speed
    )


def _once(graph: Graph, pricing: Pricing, *, fold: bool = True) -> float:
    return cpu_seconds(lambda: _at_speed(graph, pricing, fold=fold), repeats=3)


def on_hap_cluster() -> list[Row]:
    """Simulated steps on 2 x 8 V100 + 6 x 8 P100, 32 samples per device, by the plan that is found
    and by rivals."""
    cluster = load_cluster(str(Path(__file__).parent / "hap-64.toml"))
    names = tuple(device.name for device in cluster.devices)
    speeds = device_group(cluster, names, Dtype.FP32).by_speed
    batch = 32 * len(names)
    rivals = {
        "even data parallelism": (_samples(batch, [1 / len(names)] * len(names)), 0),
        "data parallelism by speed": (_samples(batch, speeds), 0),
        "even ZeRO": (_samples(batch, [1 / len(names)] * len(names)), 3),
    }
    rows = []
    for name, build in MODELS.items():
        program = capture_program(lambda build=build: build(batch), name=name)
        own = _seconds(find_plan(program, cluster), program.chain, cluster)
        rows.append(Row(what=f"{name}: step", value=own, unit="s"))
        for rival, (samples, zero) in rivals.items():
            seconds = _seconds(_replicas(program, cluster, samples, zero), program.chain, cluster)
            rows.append(
                Row(what=f"{name}: over {rival}", value=seconds / own, unit="x", target=">= 1")
            )
    return rows


def _samples(batch: int, shares: Sequence[float]) -> tuple[int, ...]:
    return unit_counts(batch, shares)


def _replicas(
    program: CapturedProgram, cluster: Cluster, samples: Sequence[int], zero: int
) -> Plan:
    """One stage of replicas with given samples."""
    devices = zip(cluster.devices, samples, strict=True)
    replicas = tuple(Replica(devices=(device.name,), samples=count) for device, count in devices)
    return Plan(
        model=ModelRef.of(program.chain),
        cluster=ClusterRef.of(cluster),
        global_batch=program.samples,
        micro_batch_size=program.samples,
        num_micro_batches=1,
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        stages=(Stage(first=0, end=len(program.chain.layers), replicas=replicas, zero=zero),),
    )


def _seconds(plan: Plan, chain: Chain, cluster: Cluster) -> float:
    return play_once(plan, chain, cluster, ComputeModel(), whole=False).seconds


def all_rows() -> list[Row]:
    return [*against_hap(), *search_times(), *large_searches(), *on_hap_cluster()]
