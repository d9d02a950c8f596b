"""Every row of the sharding rules, executed: shards in, the local operation, results joined, equal
to the whole."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.row_execution import CPU, RATIOS, check_row, local_arguments, local_calls, local_result
from support.spmd_models import BUILDS, built, captured
from support.whole_step import whole_tensors
from torch.utils._pytree import keystr, tree_flatten_with_path

from argosy.runtime.communication.shards import take
from argosy.runtime.graphs.calls import filled, tensor_constants
from argosy.space.operations.calls import table
from argosy.space.operations.rules import StateChoices, only_whole
from argosy.space.operations.sharding import (
    REPLICATED,
    fits,
    flat_cut,
    from_flat_cut,
    sharded,
    unit_counts,
)
from argosy.workload.graph import Graph, GraphNode

MANY = {"bert", "gpt2", "language", "llama", "plain", "t5", "vision"}
"""Models whose operations others have too."""
ALONE = [name for name in BUILDS if name != "mixtral"]
"""Models whose operations run without the runtime, which runs modules of experts."""


def executed(name: str) -> Iterator[tuple[Graph, GraphNode, int, dict[int, Any], list[Any]]]:
    """The nodes of a model's step, each with the values around it, every distinct one once."""
    torch.manual_seed(1)
    graph = captured(name)
    model, _, batch = built(name)()
    named = {
        key: tensor.detach() for key, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    named |= {keystr(path): leaf for path, leaf in tree_flatten_with_path(batch)[0]}
    held: dict[int, Any] = {**whole_tensors(graph, named), **tensor_constants(graph, CPU)}
    seen: set[Any] = set()
    for index, node in enumerate(graph.nodes):
        (call,) = local_calls(graph, node, only_whole(node), (1.0,))
        arguments = [filled(part, held.__getitem__, CPU) for part in node.arguments]
        keywords = {key: filled(part, held.__getitem__, CPU) for key, part in node.keywords}
        out = local_result(call, arguments, keywords)
        expected = list(out) if isinstance(out, (tuple, list)) else [out]
        held.update(
            {v: part for v, part in zip(node.outputs, expected, strict=True) if v is not None}
        )
        look = (
            node.op,
            tuple(graph.values[v].shape for v in node.inputs),
            str(local_arguments(call)[1:]),
        )
        if look not in seen:
            seen.add(look)
            yield graph, node, index, held, expected


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] if name in MANY else []) for name in ALONE],
)
def test_every_row_that_a_model_meets(name: str) -> None:
    torch.manual_seed(0)
    choices: dict[int, StateChoices] = {}
    count = 0
    for graph, node, index, held, expected in executed(name):
        for ratios in RATIOS[1 - index % 2 :]:  # two devices for every second node
            if len(ratios) not in choices:
                choices[len(ratios)] = StateChoices(graph, len(ratios))
            for row in choices[len(ratios)].rows(index):
                check_row(graph, node, row, held, expected, ratios)
                count += 1
    assert count > 80 and not choices[2].unknown


def test_the_table_knows_the_vocabulary() -> None:
    assert len(table()) >= 80


@given(st.integers(2, 400), st.lists(st.floats(0.01, 10.0), min_size=1, max_size=9))
def test_rounding_loses_no_row(units: int, weights: list[float]) -> None:
    if units < len(weights):
        return
    ratios = [weight / sum(weights) for weight in weights]
    counts = unit_counts(units, ratios)
    assert sum(counts) == units and min(counts) >= 1
    assert all(
        count <= math.ceil(ratio * units) + 1 for count, ratio in zip(counts, ratios, strict=True)
    )


@settings(max_examples=60)
@given(st.data())
def test_a_reshape_moves_the_same_elements(data: st.DataObject) -> None:
    factors = data.draw(st.lists(st.sampled_from([2, 3, 4]), min_size=2, max_size=5))
    rng = random.Random(data.draw(st.integers(0, 99)))
    before, after = (_grouped(factors, rng) for _ in range(2))
    x = torch.arange(math.prod(factors))
    for dim, size in enumerate(before):
        for units in [u for u in range(2, size + 1) if size % u == 0]:
            for outer in [o for o in range(1, size // units + 1) if size % (o * units) == 0]:
                state = sharded(dim, units, outer=outer)
                found = from_flat_cut(after, *flat_cut(before, state))
                if found is None:
                    continue
                assert fits(after, found)
                for rank in range(2):
                    one = take(x.view(before), state, (0.6, 0.4), rank).flatten()
                    other = take(x.view(after), found, (0.6, 0.4), rank).flatten()
                    assert torch.equal(one, other)


def _grouped(factors: list[int], rng: random.Random) -> tuple[int, ...]:
    shape, grown = [], 1
    for factor in factors:
        grown *= factor
        if rng.random() < 0.5:
            shape.append(grown)
            grown = 1
    return (*shape, grown)


def test_what_is_unknown_is_done_in_full() -> None:
    graph = captured("perceptron")
    node = graph.nodes[0]
    row = only_whole(node)
    assert set(row.inputs) | set(row.outputs) == {REPLICATED} and row.units == 0
