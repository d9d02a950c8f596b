"""Rows of the ``spmd`` benchmark: against HAP's synthesiser in its units, against simpler splits, on processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from argosy.cluster.file import load_cluster
from argosy.cost.group import device_group
from argosy.dtype import Dtype
from argosy.solve.elimination import eliminate, elimination_order
from argosy.solve.placement import Placement, Pricing
from argosy.solve.rehearse import rehearse
from argosy.solve.spmd import find_program
from argosy.space.rules import Choices, Kind
from argosy.workload.capture.trace import capture
from argosy.workload.graph import Graph
from benchmarks import spmd_processes
from benchmarks.registry import Row, cpu_seconds
from benchmarks.spmd_models import language, vgg, vision
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
        rows.append(Row(what=f"{what}: cost in HAP's units", value=found.seconds, unit="s", target=f"<= {cost}"))
        target = f"< {seconds}" if seconds else ""
        rows.append(Row(what=f"{what}: whole search", value=spent, unit="s CPU", target=target))
        right = hap_pricing(speeds, element_bytes=4.0, memory=16e9, rounded=True)
        whole = find_program(graph, right)
        rows.append(Row(what=f"{what}: bytes, whole samples, 16 GB", value=whole.seconds, unit="s"))
    return rows


def search_times() -> list[Row]:
    graph = capture(lambda: language(256), name="transformer")
    pricing = hap_pricing(unequal(8), rounded=True)
    choices = Choices(graph, 8)
    problem = Placement(graph, choices, pricing, pricing.group.by_speed).problem
    order = elimination_order([len(cost) for cost in problem.costs], [(i, j) for i, j, _ in problem.pairs])
    apart = _without_sharing(problem)
    free = find_program(graph, pricing, ratios=pricing.group.by_speed)
    tight = hap_pricing(unequal(8), memory=0.8 * max(free.device_bytes), rounded=True)
    capped = find_program(graph, tight, ratios=tight.group.by_speed)
    return [
        Row(what="operations of the 12-layer step", value=len(graph.nodes), unit=""),
        Row(what="rules", value=cpu_seconds(lambda: Choices(graph, 8), repeats=3), unit="s CPU"),
        Row(what="whole search, one ratio vector", value=_once(graph, pricing), unit="s CPU", target="< 1"),
        Row(what="elimination, layers apart", value=cpu_seconds(lambda: eliminate(apart, order=order)), unit="s CPU"),
        Row(
            what="elimination, equal layers once",
            value=cpu_seconds(lambda: eliminate(problem, order=order)),
            unit="s CPU",
            target="< 0.1",
        ),
        Row(what="with a memory cap of 80 %", value=_once(graph, tight), unit="s CPU", target="< 2"),
        Row(what="its proven gap", value=100 * (capped.seconds / capped.bound - 1), unit="%"),
    ]


def _once(graph: Graph, pricing: Pricing) -> float:
    return cpu_seconds(lambda: find_program(graph, pricing, ratios=pricing.group.by_speed), repeats=2)


def _without_sharing(problem: Any) -> Any:
    """The same problem with every table an array of its own, so that nothing is looked up."""
    pairs = tuple((i, j, table.copy()) for i, j, table in problem.pairs)
    return replace(problem, costs=tuple(cost.copy() for cost in problem.costs), pairs=pairs)


def on_hap_cluster() -> list[Row]:
    """Simulated steps on 2 x 8 V100 + 6 x 8 P100, 32 samples per device."""
    cluster = load_cluster(str(Path(__file__).parent / "hap-64.toml"))
    group = device_group(cluster, [device.name for device in cluster.devices], Dtype.FP32)
    pricing = Pricing(group=group)
    rivals = {
        "even data parallelism": (Kind.SAMPLES, group.even),
        "data parallelism by speed": (Kind.SAMPLES, group.by_speed),
        "even ZeRO": (Kind.STORED, group.even),
    }
    rows = []
    for name, build in MODELS.items():
        graph = capture(lambda build=build: build(32 * len(group)), name=name)
        own = rehearse(find_program(graph, pricing), pricing, cluster).end
        rows.append(Row(what=f"{name}: step", value=own, unit="s"))
        for rival, (kind, ratios) in rivals.items():
            other = find_program(graph, pricing, ratios=ratios, kind=kind, capped=False)
            seconds = rehearse(other, pricing, cluster).end
            rows.append(Row(what=f"{name}: over {rival}", value=seconds / own, unit="x", target=">= 1"))
    return rows


def on_processes() -> list[Row]:
    even, found, difference = spmd_processes.compare()
    return [
        Row(what="even split on 0.3 and 0.1 of a core: step", value=even, unit="s"),
        Row(what="found program: step", value=found, unit="s"),
        Row(what="speed-up, measured", value=even / found, unit="x", target="> 1"),
        Row(what="largest relative difference of losses", value=difference, unit=""),
    ]


def all_rows() -> list[Row]:
    return [*against_hap(), *search_times(), *on_hap_cluster(), *on_processes()]
