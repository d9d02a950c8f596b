"""A forward for any number of samples: what cannot be one is told, and so is a cut that does not
fit it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.whole_step import run_whole, whole_tensors
from torch import Tensor, nn
from torch.nn import functional

from argosy.errors import InputError
from argosy.runtime.graphs.cut import GraphCut, aligned
from argosy.workload.capture.decompose import native_dropout
from argosy.workload.capture.forward import Forward, capture_forward
from argosy.workload.capture.trace import capture

CPU = torch.device("cpu")


def forward_of(loss: Callable[[Any, Any], Tensor], batch: Any = None) -> Forward:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return capture_forward(
        model, loss, torch.zeros(2, 3) if batch is None else batch, device=CPU, name="small"
    )


def plain(model: Any, x: Tensor) -> Tensor:
    result: Tensor = model(x).square().sum()
    return result


def many(model: Any, x: Tensor) -> Tensor:
    return plain(model, x if len(x) == 2 else x + 1)


def square(model: Any, x: Tensor) -> Tensor:
    return plain(model, x) + torch.zeros(len(x) ** 2).sum()


def root(model: Any, x: Tensor) -> Tensor:
    return plain(model, x) * len(x) ** 0.5


def mixed(model: Any, x: Tensor) -> Tensor:
    return plain(model, x) * (3 if len(x) == 2 else 0.5)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (
            many,
            r"small: found \d+ operations with 2 samples, other ones with more, expected a step that does the same",
        ),
        (
            square,
            r"zeros.*: found 4, 9, 25 with 2, 3, 5 samples, expected numbers in proportion to the samples",
        ),
        (
            root,
            r"mul.*: found 1\.41\d+, 1\.73\d+, 2\.23\d+ with 2, 3, 5 samples, expected numbers in proportion",
        ),
        (mixed, r"mul.*: found 3, 0\.5, 0\.5 with 2, 3, 5 samples, expected numbers in proportion"),
    ],
)
def test_a_step_that_depends_on_the_samples_otherwise_is_told(
    loss: Callable[..., Tensor], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        forward_of(loss)


def test_a_batch_may_hold_numbers_which_stay_what_they_are() -> None:
    forward = forward_of(
        lambda model, batch: plain(model, batch["x"]) * batch["k"],
        {"x": torch.zeros(2, 3), "k": 0.25},
    )
    assert any(0.25 in node.arguments for node in forward.nodes(7))


def test_a_cut_that_does_not_fit_is_told() -> None:
    forward = forward_of(plain)
    ops = [node.op for node in forward.graph.nodes]
    count, first = len(ops), ops.index("aten.addmm.default")
    with pytest.raises(InputError, match="cut: found stage 5, expected stages 0 to 1"):
        GraphCut(forward, [5] * count, 2)
    with pytest.raises(InputError, match="cut: found stage -1, expected stages 0 to 1"):
        GraphCut(forward, [-1] * count, 2)
    with pytest.raises(
        InputError,
        match=r"cut: found \S+ in stage 0, which reads \S+, expected stage 1 or a later one",
    ):
        GraphCut(forward, [int(at == first) for at in range(count)], 2)
    with pytest.raises(
        InputError,
        match=rf"cut: found 2 operations, expected {count}, the forward of the program; make the "
        "plan from the model and batch that are trained",
    ):
        aligned(forward, [0, 0])
    longer = forward_of(lambda model, x: plain(model, torch.tanh(x)))
    with pytest.raises(
        InputError, match=r"cut: found aten\.tanh\.default \(.*\), expected aten\.t\.default"
    ):
        aligned(longer, [0] * count, forward)
    with pytest.raises(
        InputError, match=r"cut: found aten\.neg\.default \(.*\), expected no further operation"
    ):
        aligned(forward_of(lambda model, x: -plain(model, x)), [0] * count, forward)


def test_what_has_its_samples_in_no_order_is_not_handed_on() -> None:
    """A product of all samples with all is read in the first stage and by the second."""

    def loss(model: Any, x: Tensor) -> Tensor:
        made = model(x)
        similar = made @ made.T
        return plain(model, x + similar.sum(-1, keepdim=True)) + similar.exp().sum()

    forward = forward_of(loss)
    *_, last = (at for at, node in enumerate(forward.graph.nodes) if node.op == "aten.exp.default")
    cut = GraphCut(forward, [int(at >= last) for at in range(len(forward.graph.nodes))], 2)
    says = (
        r"stage 0: found a value handed on whose samples are in no known order \(aten\.mm\.default"
    )
    with pytest.raises(InputError, match=says):
        cut.check_divided([1, 1], 1)


class Dropped(nn.Module):
    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(3, 40), drop

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.first(x))


@pytest.mark.parametrize(
    ("fused", "written"),
    [
        (lambda x: torch.native_dropout(x, 0.3, True)[0], lambda x: functional.dropout(x, 0.3)),
        (lambda x: torch.native_dropout(x, 0.3, False)[0], lambda x: x),
        (lambda x: torch.native_dropout(x, 1.0, True)[0], lambda x: x * 0),
    ],
    ids=["drops", "does not train", "drops all"],
)
def test_the_dropout_of_devices_is_that_of_hosts(
    fused: Callable[..., Tensor], written: Callable[..., Tensor]
) -> None:
    """Devices drop by an operation of its own, hosts by a random mask: captured, both draw the
    same."""
    x, found = torch.ones(6, 3), []
    for drop in (fused, written):
        torch.manual_seed(0)
        model = Dropped(drop)
        graph = capture(lambda drop=drop: (Dropped(drop), plain, torch.ones(6, 3)))
        named = {name: weight.detach() for name, weight in model.named_parameters()} | {"": x}
        loss, gradients, _ = run_whole(graph, whole_tensors(graph, named), seed=3, step=1)
        found.append(
            (loss, {graph.values[at].name: gradient for at, gradient in gradients.items()})
        )
    torch.testing.assert_close(*found)


def test_a_mask_of_nothing_is_known_without_a_place() -> None:
    x = torch.randn(3, 2)
    for p, train in ((0.0, True), (0.5, False)):
        kept, mask = native_dropout(x, p, train)
        assert kept is x
        assert mask.all()
