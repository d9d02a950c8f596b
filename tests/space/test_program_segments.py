"""A captured step as a chain: what its segments compute, keep and hand on, against torch and by
hand."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from argosy.cost.memory import state_bytes  # noqa: E402
from argosy.document import Document  # noqa: E402
from argosy.dtype import Dtype  # noqa: E402
from argosy.plan.plan import Stage  # noqa: E402
from argosy.space.operations.segments import chain_of_step  # noqa: E402
from argosy.workload.capture.trace import capture  # noqa: E402
from argosy.workload.chain import Chain  # noqa: E402
from argosy.workload.layers_file import layers_of, layers_to_dict  # noqa: E402

SAMPLES, WIDTH = 8, 64


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Skip(nn.Module):
    """The input of the first block is read again after the last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.blocks, self.last = (
            nn.Linear(width, width),
            nn.Sequential(),
            nn.Linear(2 * width, width),
        )
        for _ in range(6):
            self.blocks.append(Residual(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.cat([self.blocks(x), x], dim=1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.inside = (
            nn.Embedding(50, WIDTH),
            nn.Sequential(*(Residual(WIDTH) for _ in range(4))),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.inside(self.words(x)), self.words.weight)


def chain_of(model: nn.Module, batch: Any = None, loss: Any = mean_square) -> Chain:
    batch = torch.randn(SAMPLES, WIDTH) if batch is None else batch
    return chain_of_step(capture(lambda: (model, loss, batch), name="net"), SAMPLES, Dtype.FP32)


def test_equal_blocks_are_equal_segments_that_hand_on_one_tensor() -> None:
    chain = chain_of(nn.Sequential(*(Residual(WIDTH) for _ in range(8))))
    blocks = [layer for layer in chain.layers if layer.forward_flop]
    assert len(blocks) == 8 and len({layer.cost_key for layer in blocks[1:-1]}) == 1
    assert [layer.output_bytes for layer in blocks[:-1]] == [4 * WIDTH] * 7


@pytest.mark.parametrize(
    "model", [Skip(WIDTH), nn.Sequential(*(Residual(WIDTH) for _ in range(3)))]
)
def test_flop_and_weights_are_torchs(model: nn.Module) -> None:
    chain = chain_of(model)
    counter = FlopCounterMode(display=False)
    with counter:
        mean_square(model, torch.randn(SAMPLES, WIDTH)).backward()
    counted = sum(layer.forward_flop + layer.backward_flop for layer in chain.layers) * SAMPLES
    assert counted == pytest.approx(counter.get_total_flops())
    assert chain.parameters == sum(weight.numel() for weight in model.parameters())


def test_what_skips_over_segments_is_counted_at_every_cut() -> None:
    chain = chain_of(Skip(WIDTH))
    inner = [layer for layer in chain.layers if layer.name.startswith("blocks")]
    assert len(inner) >= 5 and all(layer.output_bytes == 2 * 4 * WIDTH for layer in inner[:-1])


def test_operations_follow_one_another() -> None:
    chain = chain_of(Skip(WIDTH))
    assert (
        chain.is_captured
        and chain.layers[0].operations is not None
        and chain.layers[0].operations[0] == 0
    )
    for one, other in itertools.pairwise(chain.layers):
        assert one.operations is not None and other.operations is not None
        assert one.operations[1] == other.operations[0] and one.name != other.name


def test_a_weight_that_two_segments_read_is_tied() -> None:
    words = torch.randint(0, 50, (SAMPLES, 16))
    chain = chain_of(
        Tied(),
        words,
        lambda model, x: functional.cross_entropy(model(x).flatten(0, 1), x.flatten()),
    )
    (shared,) = chain.shared
    assert shared[0][0] == 0 and shared[1] == 50 * WIDTH
    assert chain.parameters == sum(weight.numel() for weight in Tied().parameters())


def test_kept_storage_counts_once_however_often_it_is_viewed() -> None:
    """Of a linear layer and a square: its input and its output, whatever views the backward
    reads."""
    chain = chain_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (8, 8)), nn.Flatten()))
    assert sum(layer.activation_bytes for layer in chain.layers) == pytest.approx(
        4 * WIDTH, rel=0.1
    )


class Adapted(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.first = nn.Linear(base.in_features, 2, bias=False)
        self.second = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.second(self.first(x))


def adapted(num_blocks: int, first: int) -> nn.Module:
    """Frozen blocks, from the ``first`` on with adapters."""
    model = nn.Sequential(*(Residual(WIDTH) for _ in range(num_blocks))).requires_grad_(False)
    for block in model[first:]:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


@pytest.mark.parametrize("first", [0, 3, 5])
def test_frozen_weights_are_held_and_not_trained(first: int) -> None:
    """Weights, their bytes and FLOP of a captured program as torch has them; nothing before the
    first adapter has a backward."""
    model = adapted(6, first)
    chain = chain_of(model)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert chain.parameters == trained
    assert chain.frozen_bytes == 4 * (
        sum(weight.numel() for weight in model.parameters()) - trained
    )
    with FlopCounterMode(display=False) as counter:
        mean_square(model, torch.randn(SAMPLES, WIDTH)).backward()
    counted = sum(layer.forward_flop + layer.backward_flop for layer in chain.layers) * SAMPLES
    assert counted == pytest.approx(counter.get_total_flops())
    frozen = [layer for layer in chain.layers if not layer.has_backward]
    assert frozen == list(chain.layers[: chain.first_backward])
    assert (
        len(frozen) >= first - 1
        and sum(layer.backward_flop + layer.activation_bytes for layer in frozen) == 0
    )
    assert all(layer.frozen is not None and layer.frozen.forward_bytes > 0 for layer in frozen)
    stored = json.loads(json.dumps(layers_to_dict(chain.layers)))
    assert layers_of(Document("plan", stored, {})) == chain.layers
    full = chain_of(nn.Sequential(*(Residual(WIDTH) for _ in range(6))))
    whole = (Stage(first=0, end=len(one.layers), replicas=()) for one in (chain, full))
    held = [state_bytes(one, stage, 1.0) for one, stage in zip((chain, full), whole, strict=True)]
    assert held[0].total < 0.4 * held[1].total


def test_a_tied_table_that_is_frozen_counts_once() -> None:
    words = torch.randint(0, 50, (SAMPLES, 16))
    model = Tied()
    model.words.requires_grad_(False)
    chain = chain_of(
        model, words, lambda model, x: functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    )
    assert not chain.shared and chain.frozen_parameters == 50 * WIDTH
    (tied,) = [
        layer for layer in chain.layers if layer.frozen is not None and layer.frozen.tied_bytes
    ]
    assert (
        tied.tied_to == 0 and tied.frozen is not None and tied.frozen.tied_bytes == 4 * 50 * WIDTH
    )


def test_models_of_peft_are_captured_with_their_frozen_weights() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        nn.Sequential(*(Residual(WIDTH) for _ in range(4))),
        peft.LoraConfig(r=2, target_modules=["up", "down"]),
    )
    chain = chain_of(model)
    assert chain.parameters == 4 * 2 * 2 * (WIDTH + 4 * WIDTH)
    assert (
        chain.frozen_parameters
        == sum(weight.numel() for weight in Residual(WIDTH).parameters()) * 4
    )
