"""A captured step, run operation by operation, is torch's own; initial values are those of a plain
build."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from support.spmd_models import BUILDS, built, language
from support.whole_step import run_whole, whole_tensors
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import keystr, tree_flatten_with_path
from workload.attention_models import ATTENTIONS, captured_operations

from argosy.errors import InputError
from argosy.runtime.sources.operations import capture_program
from argosy.workload.capture.initial import build_fake
from argosy.workload.capture.trace import Build, capture, capture_fake, trace
from argosy.workload.graph import Graph, Phase

EXACT = [name for name in BUILDS if name not in ("dropout", "mixtral")]
"""Programs whose operations torch can run alone: neither masks of the runtime nor modules."""


def contents(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    named = {
        name: tensor.detach().clone()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    return named | {keystr(path): leaf for path, leaf in tree_flatten_with_path(batch)[0]}


@pytest.mark.parametrize("name", EXACT)
def test_the_captured_step_is_the_step(name: str) -> None:
    build = built(name)
    fake = build_fake(build, seed=3)
    graph = capture_fake(fake, name=name)
    torch.manual_seed(3)
    model, loss_function, batch = build()
    initial = dict(fake.values())
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(initial[key], tensor), f"{key} starts differently"
    loss, gradients, buffers = run_whole(graph, whole_tensors(graph, contents(model, batch)))
    expected = loss_function(model, batch)
    expected.backward()
    assert torch.allclose(loss, expected.detach(), rtol=0, atol=1e-12)
    named = dict(model.named_parameters())
    assert {graph.values[index].name for index in gradients} == {
        key for key in named if named[key].grad is not None
    }
    for index, gradient in gradients.items():
        assert torch.allclose(gradient, named[graph.values[index].name].grad, rtol=0, atol=1e-12)
    state = dict(model.named_buffers())
    for index, after in buffers.items():
        assert torch.allclose(
            after, state[graph.values[index].name].to(after.dtype), rtol=0, atol=1e-12
        )


def dropped_share(graph: Graph, step: int) -> float:
    torch.manual_seed(0)
    model, _, batch = built("dropout")()
    loss, _, _ = run_whole(graph, whole_tensors(graph, contents(model, batch)), seed=5, step=step)
    return float(loss)


def test_dropout_is_drawn_from_seed_and_step_alone() -> None:
    graph = capture(built("dropout"), name="dropout")
    masks = [node for node in graph.nodes if node.op == "argosy.bernoulli.default"]
    assert len(masks) == 4 and len({node.arguments[2] for node in masks}) == 4
    assert dropped_share(graph, 0) == dropped_share(graph, 0) != dropped_share(graph, 1)


def test_a_mask_keeps_the_share_that_it_should() -> None:
    from argosy.runtime.graphs.calls import mask_key, random_mask

    positions = torch.arange(200_000)
    masks = [
        random_mask(positions, 0.7, key=mask_key(1, step, 4), dtype=torch.float64)
        for step in range(2)
    ]
    for mask in masks:
        assert abs(float(mask.mean()) - 0.7) < 0.005
        assert abs(float((mask[1:] * mask[:-1]).mean()) - 0.49) < 0.005, (
            "neighbours are independent"
        )
    assert abs(float((masks[0] * masks[1]).mean()) - 0.49) < 0.005, "steps are independent"


def test_operations_know_the_module_that_ran_them() -> None:
    graph = capture(lambda: language(layers=6), name="language")
    assert any(
        node.module == "blocks.3.feed.0" for node in graph.nodes if node.phase is Phase.FORWARD
    )


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.norm(self.inner(x)))
        return y


def test_a_module_that_does_not_train_is_captured_so() -> None:
    """As for a norm whose statistics are frozen while the rest of the model trains."""

    def build() -> Any:
        model = PartlyFrozen()
        model.norm.eval()
        model.drop.eval()
        return model, lambda model, x: model(x).sum(), torch.randn(8, 4)

    graph = capture(build)
    assert not graph.updates, "running averages stay"
    assert not [node for node in graph.nodes if node.op == "argosy.bernoulli.default"]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.sum() > 0:  # the line that the error must name
            y = y * 2
        return y


def test_what_cannot_be_captured_is_named_by_its_line() -> None:
    def build() -> Any:
        return Branching(), lambda model, x: functional.mse_loss(model(x), x), torch.randn(2, 4)

    with pytest.raises(InputError, match=r"test_capture\.py:\d+.*if y\.sum\(\) > 0"):
        capture(build)


class Missing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_an_error_of_the_model_itself_is_named_by_its_line() -> None:
    expected = (
        r"test_capture\.py:\d+: found AttributeError in `return self\.inner\(x\)` \('Missing' object has no attribute "
        r"'inner'\), expected a model and a loss that run on the batch, forward and backward; if"
    )
    with pytest.raises(InputError, match=expected):
        capture(lambda: (Missing(), lambda model, x: model(x).sum(), torch.randn(2, 4)))


def test_an_error_inside_a_library_also_names_the_line_that_called_it() -> None:
    import transformers

    config = transformers.T5Config(
        d_model=16, d_ff=16, num_layers=1, num_heads=1, d_kv=16, vocab_size=8
    )
    ids = torch.zeros(2, 4, dtype=torch.int64)
    loss = lambda model, batch: model(input_ids=batch, labels=batch).loss  # noqa: E731
    with pytest.raises(
        InputError,
        match=r"decoder_start_token_id'\), called at .*test_capture\.py:\d+, expected a model",
    ):
        capture(lambda: (transformers.T5ForConditionalGeneration(config), loss, ids))


def test_what_build_must_return_is_said() -> None:
    message = "build: found .*Linear, Tensor.*, expected build\\(\\) to return a model, a loss function and a batch"
    with pytest.raises(InputError, match=message):
        capture(lambda: (nn.Linear(4, 4), torch.randn(2, 4)))  # type: ignore[arg-type, return-value]

    with pytest.raises(InputError, match=r"the loss MSELoss, expected a loss function loss_fn\(m"):
        capture(lambda: (nn.Linear(4, 4), nn.MSELoss(), torch.randn(2, 4)))

    def broken() -> Any:
        raise KeyError("width")

    with pytest.raises(
        InputError, match=r"test_capture\.py:\d+: found KeyError in `raise KeyError\(\"width\"\)`"
    ):
        capture(broken)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(InputError, match="scalar"):
        capture(lambda: (nn.Linear(4, 4), lambda model, x: model(x), torch.randn(2, 4)))


def huge_llama(layers: int) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=8192, intermediate_size=28672, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=32000, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(4, 2048, dtype=torch.int64)
    loss = lambda model, batch: model(input_ids=batch, labels=batch).loss  # noqa: E731
    return transformers.LlamaForCausalLM(config), loss, ids


@pytest.mark.parametrize("layers", [2, pytest.param(80, marks=pytest.mark.exhaustive)])
def test_a_model_larger_than_memory_is_captured(layers: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = capture(lambda: huge_llama(layers), name="llama-2-70b")
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    per_layer = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert graph.num_parameters() == layers * per_layer + 2 * 32000 * 8192 + 8192
    assert grown < 2e9 < 4 * graph.num_parameters()


def test_a_recurrent_layer_in_single_precision_is_captured_operation_by_operation() -> None:
    """In fp32 on a CPU torch would call one operation of a library, which keeps samples
    together."""
    program = capture_program(
        lambda: (
            nn.LSTM(8, 8, batch_first=True),
            lambda model, x: model(x)[0].square().mean(),
            torch.randn(6, 4, 8),
        )
    )
    assert not [node.op for node in program.graph.nodes if "mkldnn" in node.op]
    assert program.mixes is None


def test_a_batch_of_one_sample_has_the_operations_of_any_batch() -> None:
    """A library may omit an ``expand`` if there is one row, as transformers does for Llama."""

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.out = nn.Embedding(4, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            numbers = torch.arange(4).unsqueeze(0)
            if len(x) != len(numbers):
                numbers = numbers.expand(len(x), -1)
            return self.out(x + self.places(numbers))

    def build(samples: int) -> Build:
        return lambda: (
            Places(),
            lambda net, x: net(x).square().mean(),
            torch.randn(samples, 4, 8),
        )

    one, many = (capture_program(build(samples)) for samples in (1, 6))
    assert (one.samples, many.samples) == (1, 6)
    assert [node.op for node in one.graph.nodes] == [node.op for node in many.graph.nodes]
    flop = [sum(layer.forward_flop for layer in program.chain.layers) for program in (one, many)]
    assert flop[0] == pytest.approx(flop[1]), "of one sample"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention_is_one_operation_on_every_device(kind: str, dtype: torch.dtype) -> None:
    """A device without a kernel of its own stands for a GPU; tests/gpu compares a real one."""
    assert captured_operations(kind, dtype, "meta") == captured_operations(kind, dtype, "cpu")


class PooledLast(nn.Module):
    """Images whose channels lie last: torch's strides after the convolution depend on samples."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return functional.adaptive_avg_pool2d(self.patches(x.permute(0, 3, 1, 2)), 1).flatten(1)


def test_the_operations_of_a_forward_do_not_depend_on_strides() -> None:
    def build() -> Any:
        return PooledLast(), lambda model, x: model(x).mean(), torch.randn(18, 16, 16, 3)

    def operations(samples: int) -> list[str]:
        graph = trace(build_fake(build), name="x", forward_only=True, samples=samples).graph()
        return [node.op for node in graph.nodes]

    assert operations(2) == operations(18)
