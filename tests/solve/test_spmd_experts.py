"""What people found by hand, found by the search: each strategy where it is the right one, and not
elsewhere."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.spmd_models import Experts, Unet, feed_forward
from torch import Tensor, nn
from torch.nn import functional

from argosy.cost.group import DeviceGroup, GroupCollective
from argosy.solve.programs.placement import Pricing
from argosy.solve.programs.spmd import Program, find_program
from argosy.space.operations.rules import CutKind
from argosy.workload.capture.trace import capture
from argosy.workload.graph import Graph, Phase

NVLINK, INFINIBAND, ETHERNET = 150e9, 20e9, 1.2e9


def group(count: int, bandwidth: float, *, speeds: tuple[float, ...] | None = None) -> DeviceGroup:
    """Cards of 60 TFLOP/s."""
    return DeviceGroup(
        names=tuple(f"d{i}" for i in range(count)),
        flops=speeds or (60e12,) * count,
        memory_bandwidths=(1.5e12,) * count,
        bandwidth=bandwidth,
        latency=5e-6,
    )


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return functional.mse_loss(model(x), x)


@cache
def graph_of(kind: str, batch: int, width: int) -> Graph:
    builds = {
        "feed": lambda: (feed_forward(width), mean_square, torch.randn(batch, width)),
        "experts": lambda: (Experts(width, experts=8), mean_square, torch.randn(batch, 64, width)),
        "table": partial(table, batch, width),
        "seen": partial(seen, batch, width),
        "unet": lambda: (Unet(width), mean_square, torch.randn(batch, 3, 32, 32)),
    }
    return capture(builds[kind], name=kind)


class Seen(nn.Module):
    """Convolutions with much to compute and few weights, then a linear layer with many, then a norm
    over features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.wide, self.norm = nn.Linear(width, width, bias=False), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.two(torch.relu(self.one(x))))
        x = functional.max_pool2d(x, 8).flatten(1)
        return self.norm(self.wide(x))


def seen(batch: int, width: int) -> Any:
    side = int((width // 64) ** 0.5) * 8
    return Seen(width), lambda model, x: model(x).square().mean(), torch.randn(batch, 3, side, side)


class Table(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(words, width), nn.Linear(width, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.mix(self.words(ids))


def table(batch: int, width: int) -> Any:
    ids = torch.zeros(batch, 16, dtype=torch.int64)
    return Table(1_000_000, width), lambda model, x: model(x).square().mean(), ids


def stored(program: Program) -> dict[str, str]:
    return {
        program.graph.values[p].name: str(program.deliveries[p].stored)
        for p in program.graph.parameters
    }


def kinds(program: Program) -> Counter[str]:
    return Counter(
        str(m.step.kind)
        for m in program.moves
        if m.seconds > 0 and m.step.kind is not GroupCollective.SLICE
    )


def reduced(program: Program) -> int:
    """Elements that are all-reduced."""
    sums = [m.value for m in program.moves if m.step.kind is GroupCollective.ALL_REDUCE]
    return sum(program.graph.values[value].elements for value in sums)


def test_small_weights_and_many_samples_are_data_parallel() -> None:
    graph = graph_of("feed", 65536, 256)
    program = find_program(graph, Pricing(group=group(4, ETHERNET)))
    assert set(stored(program).values()) == {"whole"}
    assert reduced(program) >= graph.num_parameters(), "every gradient is summed"
    products = [
        row
        for node, row in zip(graph.nodes, program.rows, strict=True)
        if node.op.startswith("aten.addmm")
    ]
    assert all(str(row.outputs[0]) == "dim 0 / 65536" for row in products)


def test_wide_layers_on_fast_links_split_columns_then_rows() -> None:
    graph = graph_of("feed", 2048, 8192)
    program = find_program(graph, Pricing(group=group(4, NVLINK)))
    found = stored(program)
    assert found["0.weight"].startswith("dim 0") and found["2.weight"].startswith("dim 1"), (
        "columns, then rows"
    )
    assert found["0.bias"].startswith("dim 0")
    forward = {v for node in graph.nodes if node.phase is Phase.FORWARD for v in node.outputs}
    big = [
        m
        for m in program.moves
        if m.value in forward and graph.values[m.value].elements >= 2048 * 8192
    ]
    assert len([m for m in big if m.step.kind is not GroupCollective.SLICE]) <= 2, (
        "nothing between the two layers"
    )
    assert all(graph.values[m.value].shape != (2048, 32768) for m in big)


def test_experts_are_spread_over_devices() -> None:
    program = find_program(graph_of("experts", 64, 1024), Pricing(group=group(4, INFINIBAND)))
    found = stored(program)
    assert found["rise"].startswith("dim 0 / 8") and found["fall"].startswith("dim 0 / 8")
    assert found["gate.weight"] == "whole"
    assert kinds(program)["all-to-all"] >= 2, "words travel to their experts and back"


def test_a_huge_table_is_split() -> None:
    program = find_program(graph_of("table", 32, 512), Pricing(group=group(4, ETHERNET)))
    assert stored(program)["words.weight"].startswith("dim")
    moved = sum(program.graph.values[m.value].num_bytes for m in program.moves if m.seconds > 0)
    assert moved < 0.1 * 4 * 1_000_000 * 512, "the table itself stays where it is"


def test_rows_of_a_table_are_split_where_words_outnumber_features() -> None:
    pricing = Pricing(group=group(8, ETHERNET))
    program = find_program(
        graph_of("table", 2, 4), pricing, kind=CutKind.TENSOR
    )  # fewer features than devices
    assert stored(program)["words.weight"] == "dim 0 / 1000000"


def test_sufficient_factors_for_a_large_layer_at_a_small_batch() -> None:
    graph = graph_of("seen", 32, 4096)
    pricing = Pricing(group=group(2, ETHERNET, speeds=(10e12, 10e12)))
    program = find_program(graph, pricing)
    (weight,) = (p for p in graph.parameters if graph.values[p].name == "wide.weight")
    assert stored(program)["wide.weight"] == "whole"
    assert reduced(program) < 64 * 4096, "its gradient does not travel"
    assert [m for m in program.moves if m.step.kind is GroupCollective.ALL_GATHER], "its factors do"
    sent = sum(program.graph.values[m.value].num_bytes for m in program.moves if m.seconds > 0)
    assert sent < 0.2 * graph.values[weight].num_bytes
    product = next(
        i
        for i, n in enumerate(graph.nodes)
        if n.op == "aten.mm.default" and n.phase is Phase.BACKWARD
    )
    assert program.rows[product].units == 0, "every device forms it from whole factors"


def test_at_a_large_batch_the_gradient_travels() -> None:
    graph = graph_of("seen", 4096, 1024)
    program = find_program(graph, Pricing(group=group(2, ETHERNET, speeds=(10e12, 10e12))))
    assert reduced(program) >= 1024 * 1024


def test_ratios_follow_speed() -> None:
    speeds = (90e12, 60e12, 30e12)
    program = find_program(
        graph_of("feed", 65536, 1024), Pricing(group=group(3, NVLINK, speeds=speeds))
    )
    assert program.ratios == pytest.approx([s / sum(speeds) for s in speeds], abs=0.05)
    even = find_program(
        graph_of("feed", 65536, 1024),
        Pricing(group=group(3, NVLINK, speeds=speeds)),
        ratios=(1 / 3,) * 3,
    )
    assert program.seconds < 0.8 * even.seconds
