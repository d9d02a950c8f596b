"""Rows of the ``spmd`` benchmark: against HAP's synthesiser in its units, search times, simpler
splits, processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from argosy.cluster.file import load_cluster
from argosy.cost.group import device_group
from argosy.dtype import Dtype
from argosy.solve.programs.placement import Pricing
from argosy.solve.programs.rehearse import rehearse
from argosy.solve.programs.spmd import Program, find_program, program_at
from argosy.space.operations.rules import CutKind, StateChoices
from argosy.workload.capture.trace import capture
from argosy.workload.graph import Graph
from benchmarks import spmd_processes
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
        right = hap_pricing(speeds, element_bytes=4.0, memory=16e9, rounded=True)
        whole = find_program(graph, right)
        rows.append(Row(what=f"{what}: bytes, whole samples, 16 GB", value=whole.seconds, unit="s"))
    return rows


def search_times() -> list[Row]:
    graph = capture(lambda: language(256), name="transformer")
    pricing, tight = _free_and_tight(graph)
    capped = _at_speed(graph, tight)
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
        Row(
            what="with a memory cap of 80 %", value=_once(graph, tight), unit="s CPU", target="< 2"
        ),
        Row(
            what="the same, by itself",
            value=_once(graph, tight, fold=False),
            unit="s CPU",
            target="< 2",
        ),
        Row(what="its proven gap", value=100 * (capped.seconds / capped.bound - 1), unit="%"),
    ]


def large_searches() -> list[Row]:
    """A step of 10,000 operations, and T5, whose layers hang together."""
    deep = capture(lambda: language(256, layers=116), name="deep transformer")
    pricing, tight = _free_and_tight(deep)
    capped = _at_speed(deep, tight)
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
        Row(what="116 layers: with a memory cap of 80 %", value=_once(deep, tight), unit="s CPU"),
        Row(
            what="116 layers: its proven gap",
            value=100 * (capped.seconds / capped.bound - 1),
            unit="%",
        ),
        Row(what="operations of T5's step, 12 + 12 layers", value=len(tangled.nodes), unit=""),
        Row(what="T5: whole search", value=_once(tangled, pricing), unit="s CPU"),
        Row(what="T5: its proven gap", value=100 * (found.seconds / found.bound - 1), unit="%"),
    ]


def _free_and_tight(graph: Graph) -> tuple[Pricing, Pricing]:
    """HAP's unequal devices without a memory limit, and with 80 % of what the program for them
    takes."""
    pricing = hap_pricing(unequal(8), rounded=True)
    free = _at_speed(graph, pricing)
    return pricing, hap_pricing(unequal(8), memory=0.8 * max(free.device_bytes), rounded=True)


def _at_speed(graph: Graph, pricing: Pricing, *, fold: bool = True) -> Program:
    """One ratio vector, in proportion to speed; rules and tables included."""
    return program_at(
        graph, StateChoices(graph, len(pricing.group), fold=fold), pricing, pricing.group.by_speed
    )


def _once(graph: Graph, pricing: Pricing, *, fold: bool = True) -> float:
    return cpu_seconds(lambda: _at_speed(graph, pricing, fold=fold), repeats=3)


def on_hap_cluster() -> list[Row]:
    """Simulated steps on 2 x 8 V100 + 6 x 8 P100, 32 samples per device."""
    cluster = load_cluster(str(Path(__file__).parent / "hap-64.toml"))
    group = device_group(cluster, [device.name for device in cluster.devices], Dtype.FP32)
    pricing = Pricing(group=group)
    rivals = {
        "even data parallelism": (CutKind.SAMPLES, group.even),
        "data parallelism by speed": (CutKind.SAMPLES, group.by_speed),
        "even ZeRO": (CutKind.STORED, group.even),
    }
    rows = []
    for name, build in MODELS.items():
        graph = capture(lambda build=build: build(32 * len(group)), name=name)
        own = rehearse(find_program(graph, pricing), pricing, cluster).end
        rows.append(Row(what=f"{name}: step", value=own, unit="s"))
        for rival, (kind, ratios) in rivals.items():
            other = find_program(graph, pricing, ratios=ratios, kind=kind, capped=False)
            seconds = rehearse(other, pricing, cluster).end
            rows.append(
                Row(what=f"{name}: over {rival}", value=seconds / own, unit="x", target=">= 1")
            )
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
    return [*against_hap(), *search_times(), *large_searches(), *on_hap_cluster(), *on_processes()]
