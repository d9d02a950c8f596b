"""Rules that no model meets, executed one operation at a time on random shapes: no row of the table
is untried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.row_execution import RATIOS, check_row
from support.spmd_models import BUILDS, captured
from torch import Tensor

from argosy.runtime.graphs.calls import RANDOM, drawn, function
from argosy.space.operations.calls import table
from argosy.space.operations.rules import StateChoices
from argosy.space.operations.sharding import sharded
from argosy.workload.graph import (
    MODULE,
    MODULE_BACKWARD,
    Argument,
    Graph,
    GraphNode,
    Ref,
    Role,
    Symbol,
    Value,
)

ELSEWHERE = {"bert", "vision", "mixtral", "plain"}
"""Models whose rows are executed in the exhaustive run only."""


class Draw:
    """Random tensors; sizes are drawn once per name, so that dims with one name agree."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.sizes: dict[str, int] = {}

    def size(self, name: str) -> int:
        if name not in self.sizes:
            self.sizes[name] = int(torch.randint(3, 8, (), generator=self.rng))
        return self.sizes[name]

    def shape(self, names: str) -> tuple[int, ...]:
        return tuple(1 if name == "1" else self.size(name) for name in names)

    def floats(self, names: str) -> Tensor:
        return torch.randn(self.shape(names), generator=self.rng, dtype=torch.float64)

    def positive(self, names: str) -> Tensor:
        return self.floats(names).abs() + 0.1

    def chances(self, names: str) -> Tensor:
        return torch.rand(self.shape(names), generator=self.rng, dtype=torch.float64)

    def below(self, limit: int, names: str) -> Tensor:
        return torch.randint(0, limit, self.shape(names), generator=self.rng)

    def bools(self, names: str) -> Tensor:
        return self.below(2, names).bool()


Case = Callable[[Draw], tuple[Any, ...]]


def one(names: str) -> Case:
    return lambda draw: (draw.floats(names),)


def two(first: str, second: str) -> Case:
    return lambda draw: (draw.floats(first), draw.floats(second))


def with_scalar(names: str, *scalars: Any) -> Case:
    return lambda draw: (draw.floats(names), *scalars)


def doubled(draw: Draw) -> tuple[Any, ...]:
    _, _, height, width = draw.shape("nchw")
    return (2 * height, 2 * width)


def loss_2d(draw: Draw) -> tuple[Any, ...]:
    return draw.floats("nchw"), draw.below(draw.size("c"), "nhw"), None, 2, -100


def loss_2d_backward(draw: Draw) -> tuple[Any, ...]:
    grad = torch.randn((), generator=draw.rng, dtype=torch.float64)
    total = torch.tensor(
        float(draw.size("n") * draw.size("h") * draw.size("w")), dtype=torch.float64
    )
    return grad, draw.floats("nchw"), draw.below(draw.size("c"), "nhw"), None, 2, -100, total


def parts(draw: Draw) -> tuple[Any, ...]:
    each = draw.size("p")
    return (
        torch.randn(draw.size("a"), 3 * each, generator=draw.rng, dtype=torch.float64),
        (each, each, each),
        1,
    )


CASES: dict[str, Case] = {
    "aten._adaptive_avg_pool2d.default": lambda draw: (draw.floats("nchw"), (2, 3)),
    "aten._adaptive_avg_pool2d_backward.default": lambda draw: (
        torch.randn(*draw.shape("nc"), 2, 3, generator=draw.rng, dtype=torch.float64),
        draw.floats("nchw"),
    ),
    "aten.add.Scalar": with_scalar("abc", 1.5),
    "aten.all.dim": lambda draw: (draw.bools("abc"), 1),
    "aten.amax.default": with_scalar("abc", (1,), True),
    "aten.any.dim": lambda draw: (draw.bools("abc"), 0, True),
    "aten.copy.default": lambda draw: (draw.floats("abc"), draw.floats("abc")),
    "aten.arange.start": lambda draw: (2, 9),
    "aten.arange.start_step": lambda draw: (2, 12, 2),
    "aten.argmax.default": with_scalar("abc", 2),
    "aten.baddbmm.default": lambda draw: (
        draw.floats("bmn"),
        draw.floats("bmk"),
        draw.floats("bkn"),
    ),
    "aten.bitwise_not.default": lambda draw: (draw.bools("ab"),),
    "aten.bitwise_or.Tensor": lambda draw: (draw.bools("ab"), draw.bools("1b")),
    "argosy.uniform.default": with_scalar("abc", 3),
    "aten.binary_cross_entropy.default": lambda draw: (
        draw.chances("ab"),
        draw.chances("ab"),
        None,
        0,
    ),
    "aten.binary_cross_entropy_backward.default": lambda draw: (
        draw.floats("ab"),
        draw.chances("ab"),
        draw.chances("ab"),
        draw.positive("b"),
        0,
    ),
    "aten.binary_cross_entropy_with_logits.default": lambda draw: (
        draw.floats("ab"),
        draw.chances("ab"),
        None,
        draw.positive("b"),
        0,
    ),
    "aten.clamp_max.default": with_scalar("abc", 0.3),
    "aten.detach.default": one("abc"),
    "aten.dot.default": two("a", "a"),
    "aten.elu.default": with_scalar("ab", 1.2),
    "aten.erf.default": one("abc"),
    "aten.exp.default": one("abc"),
    "aten.fill.Scalar": with_scalar("ab", 2.5),
    "aten.flip.default": with_scalar("abc", (1,)),
    "aten.gather.default": lambda draw: (draw.floats("abc"), 1, draw.below(draw.size("b"), "adc")),
    "aten.gt.Tensor": two("abc", "bc"),
    "aten.hardtanh.default": with_scalar("ab", -0.5, 0.5),
    "aten.hardtanh_backward.default": lambda draw: (
        draw.floats("ab"),
        draw.floats("ab"),
        -0.5,
        0.5,
    ),
    "aten.huber_loss.default": lambda draw: (draw.floats("ab"), draw.floats("ab"), 0, 0.5),
    "aten.huber_loss_backward.default": lambda draw: (
        *(draw.floats("ab") for _ in range(3)),
        0,
        0.5,
    ),
    "aten.index_put.default": lambda draw: (
        draw.floats("abc"),
        (None, draw.below(draw.size("b"), "d")),
        draw.floats("adc"),
        True,
    ),
    "aten.le.Scalar": with_scalar("ab", 0.1),
    "aten.leaky_relu.default": with_scalar("ab", 0.1),
    "aten.leaky_relu_backward.default": lambda draw: (
        draw.floats("ab"),
        draw.floats("ab"),
        0.1,
        False,
    ),
    "aten.logical_and.default": lambda draw: (draw.bools("ab"), draw.bools("ab")),
    "aten.logical_not.default": lambda draw: (draw.bools("abc"),),
    "aten.lt.Tensor": two("ab", "ab"),
    "aten.masked_fill.Tensor": lambda draw: (
        draw.floats("abc"),
        draw.bools("1bc"),
        draw.floats(""),
    ),
    "aten.maximum.default": two("abc", "c"),
    "aten.mv.default": two("ab", "b"),
    "aten.ne.Tensor": lambda draw: (draw.below(3, "ab"), draw.below(3, "ab")),
    "aten.nll_loss2d_forward.default": loss_2d,
    "aten.nll_loss2d_backward.default": loss_2d_backward,
    "aten.pow.Tensor_Tensor": lambda draw: (draw.positive("ab"), draw.floats("ab")),
    "aten.reciprocal.default": lambda draw: (draw.positive("ab"),),
    "aten.repeat.default": lambda draw: (draw.floats("ab"), (2, 1, 3)),
    "aten.reshape.default": lambda draw: (draw.floats("abc"), (-1, draw.size("c"))),
    "aten.rsub.Scalar": with_scalar("ab", 2.0),
    "aten.scatter.value": lambda draw: (
        draw.floats("abc"),
        1,
        draw.below(draw.size("b"), "adc")[:, :2],
        3.0,
    ),
    "aten.scatter_add.default": lambda draw: (
        draw.floats("abc"),
        1,
        draw.below(draw.size("b"), "abc"),
        draw.floats("abc"),
    ),
    "aten.select_backward.default": lambda draw: (draw.floats("ac"), draw.shape("abc"), 1, 2),
    "aten.sgn.default": one("ab"),
    "aten.sigmoid.default": one("ab"),
    "aten.sigmoid_backward.default": lambda draw: (draw.floats("ab"), draw.floats("ab").sigmoid()),
    "aten.sign.default": one("ab"),
    "aten.sort.default": with_scalar("abc", 1),
    "aten.split_with_sizes.default": parts,
    "aten.sqrt.default": lambda draw: (draw.positive("ab"),),
    "aten.squeeze.dims": with_scalar("a1b1", (1, 3)),
    "aten.stack.default": lambda draw: ((draw.floats("ab"), draw.floats("ab")), 1),
    "aten.sub.Scalar": with_scalar("abc", 0.5),
    "aten.tril.default": one("abc"),
    "aten.triu.default": with_scalar("abc", 1),
    "aten.unbind.int": with_scalar("abc", 1),
    "aten.upsample_bilinear2d.default": lambda draw: (draw.floats("nchw"), doubled(draw), False),
    "aten.upsample_bilinear2d_backward.default": lambda draw: (
        torch.randn(*draw.shape("nc"), *doubled(draw), generator=draw.rng, dtype=torch.float64),
        doubled(draw),
        draw.shape("nchw"),
        False,
    ),
    "aten.smooth_l1_loss.default": lambda draw: (draw.floats("ab"), draw.floats("ab"), 0, 0.5),
    "aten.smooth_l1_loss_backward.default": lambda draw: (
        *(draw.floats("ab") for _ in range(3)),
        0,
        0.5,
    ),
    "aten.upsample_nearest2d.default": lambda draw: (draw.floats("nchw"), doubled(draw)),
    "aten.upsample_nearest2d_backward.default": lambda draw: (
        torch.randn(*draw.shape("nc"), *doubled(draw), generator=draw.rng, dtype=torch.float64),
        doubled(draw),
        draw.shape("nchw"),
    ),
}
"""Arguments of one call per operation; the letters of a shape are sizes that are drawn."""


def called(
    op: str, arguments: tuple[Any, ...], **named_ones: Any
) -> tuple[Graph, dict[int, Tensor], list[Tensor]]:
    """A graph of one operation, what it reads, and what it makes."""
    values: list[Value] = []
    held: dict[int, Tensor] = {}

    def value(tensor: Tensor, role: Role) -> int:
        dtype = str(tensor.dtype).removeprefix("torch.")
        values.append(
            Value(name=f"v{len(values)}", role=role, shape=tuple(tensor.shape), dtype=dtype)
        )
        return len(values) - 1

    def named(part: Any) -> Argument:
        if isinstance(part, Tensor):
            index = value(part, Role.PARAMETER if part.is_floating_point() else Role.INPUT)
            held[index] = part
            return Ref(index)
        if isinstance(part, torch.dtype):
            return Symbol(str(part))
        return tuple(named(inner) for inner in part) if isinstance(part, tuple) else part

    written = tuple(named(part) for part in arguments)
    keywords = tuple((name, named(part)) for name, part in named_ones.items())
    if op in RANDOM:
        every = torch.arange(arguments[0].numel()).view(arguments[0].shape)
        made: Any = drawn(op, arguments, every, seed=0, step=0)
    else:
        made = function(op)(
            *(list(part) if isinstance(part, tuple) else part for part in arguments), **named_ones
        )
    expected = list(made) if isinstance(made, (tuple, list)) else [made]
    outputs = tuple(value(tensor, Role.RESULT) for tensor in expected)
    node = GraphNode(name="node", op=op, arguments=written, keywords=keywords, outputs=outputs)
    graph = Graph(name=op, values=tuple(values), nodes=(node,), loss=None, gradients=())
    return graph, held, expected


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("op", CASES)
def test_every_row_of_an_operation(op: str, seed: int) -> None:
    torch.manual_seed(seed)
    check_every_row(*called(op, CASES[op](Draw(seed))))


def check_every_row(graph: Graph, held: dict[int, Tensor], expected: list[Tensor]) -> None:
    for ratios in RATIOS:
        choices = StateChoices(graph, len(ratios))
        choices.consider(
            (value, sharded(dim, size // outer, outer=outer))
            for value, described in enumerate(graph.values)
            for dim, size in enumerate(described.shape)
            for outer in (1, 2, 3)
            if size % outer == 0
        )
        rows = choices.rows(0)
        assert rows
        for row in rows:
            check_row(graph, graph.nodes[0], row, held, expected, ratios)


def places(draw: Draw, count: int) -> Tensor:
    """Different ones: which of two equal places is written last is not said."""
    return torch.randperm(draw.size("b"), generator=draw.rng)[:count]


OTHERS: dict[str, tuple[str, Case]] = {
    "overwriting": (
        "aten.index_put.default",
        lambda draw: (
            draw.floats("abc"),
            (None, places(draw, 2)),
            draw.floats("abc")[:, :2],
            False,
        ),
    ),
    "one value for all places": (
        "aten.index_put.default",
        lambda draw: (draw.floats("abc"), (None, places(draw, 2)), draw.floats("c"), True),
    ),
    "unequal parts": (
        "aten.split_with_sizes.default",
        lambda draw: (draw.floats("ab"), (1, draw.size("b") - 1), 1),
    ),
    "a last part that is smaller": (
        "aten.split.Tensor",
        lambda draw: (draw.floats("ab"), draw.size("b") - 1, 1),
    ),
    "classes with weights": (
        "aten.nll_loss_forward.default",
        lambda draw: (
            draw.floats("nc"),
            draw.below(draw.size("c"), "n"),
            draw.positive("c"),
            2,
            -100,
        ),
    ),
    "a loss for each": (
        "aten.nll_loss_forward.default",
        lambda draw: (draw.floats("nc"), draw.below(draw.size("c"), "n"), None, 0, -100),
    ),
    "nothing and something": (
        "aten.cat.default",
        lambda draw: ((torch.zeros(0, dtype=torch.float64), draw.floats("ab")), 0),
    ),
}
"""Calls that the rules of an operation tell apart."""


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", OTHERS)
def test_every_row_of_another_call(name: str, seed: int) -> None:
    op, case = OTHERS[name]
    check_every_row(*called(op, case(Draw(seed))))


def test_every_row_of_attention_under_a_mask_of_positions() -> None:
    draw = Draw(0)
    heads = tuple(draw.floats("nhtd") for _ in range(3))
    mask = draw.floats("tt")
    op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    check_every_row(*called(op, (*heads, 0.0, False), attn_mask=mask))


def test_every_row_of_attention_whose_queries_share_keys() -> None:
    q = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    keys, values = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(2))
    op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    graph, *rest = called(op, (q, keys, values, 0.0, True))
    check_every_row(graph, *rest)
    choices = StateChoices(graph, 3)
    choices.consider([(1, sharded(1, 3))])
    assert any(row.inputs == (sharded(1, 3),) * 3 for row in choices.rows(0)), "by key heads"


SPLITTABLE = sorted(op for op in CASES if table()[op].get("family") != "whole")


@pytest.mark.parametrize("op", SPLITTABLE)
def test_it_can_be_shared_at_all(op: str) -> None:
    graph, _, _ = called(op, CASES[op](Draw(5)))
    choices = StateChoices(graph, 2)
    choices.consider(
        (value, sharded(dim, size))
        for value, described in enumerate(graph.values)
        for dim, size in enumerate(described.shape)
    )
    assert any(row.units for row in choices.rows(0))


def test_no_row_of_the_table_is_untried() -> None:
    met = {node.op for name in BUILDS if name not in ELSEWHERE for node in captured(name).nodes}
    assert set(table()) == met | set(CASES) | {MODULE, MODULE_BACKWARD}, "modules run these"
