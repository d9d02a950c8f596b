"""The memory model against torch's MemTracker, which follows every tensor of a step by what it is
for."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from argosy.cost.memory import activation_bytes, state_bytes
from argosy.dtype import Dtype
from argosy.measure.slices import BlockSlice, build_layer
from argosy.plan.plan import Replica, Stage
from argosy.workload.architecture import (
    Architecture,
    Attention,
    Block,
    FeedForward,
    Head,
    NormKind,
    TokenEmbedding,
)
from argosy.workload.chain import Chain
from argosy.workload.finetune import tuned_chain
from argosy.workload.transformer import build_chain
from argosy.workload.tuning import Tuning, parse_tuning

HIDDEN, TOKENS, VOCABULARY = 64, 64, 96


def architecture(*, gated: bool) -> Architecture:
    block = Block(
        attention=Attention(heads=4, kv_heads=2 if gated else 4, head_dim=16),
        feed_forward=FeedForward(inner=256, gated=gated),
        norm=NormKind.LAYER,
    )
    return Architecture(
        hidden=HIDDEN,
        embedding=TokenEmbedding(vocabulary=VOCABULARY, width=HIDDEN, position_rows=TOKENS),
        blocks=(block, block, block),
        head=Head(outputs=VOCABULARY, width=HIDDEN, norm=NormKind.LAYER, tied=False),
        context=TOKENS,
    )


def stage_of(chain: Chain) -> Stage:
    return Stage(first=0, end=len(chain.layers), replicas=(Replica(devices=("a",), samples=1),))


class Adapted(nn.Module):
    """A linear layer with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.first = nn.Linear(base.in_features, rank, bias=False)
        self.second = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.second(self.first(x))


def with_adapters(model: nn.Sequential, tuning: Tuning) -> None:
    """Freeze a model but for adapters."""
    model.requires_grad_(False)
    for layer in model:
        if isinstance(layer, BlockSlice):
            attention, feed_forward = layer.attention, layer.feed_forward
            places = {"v": attention.value, "o": attention.out, "down": feed_forward.down}
            for target in tuning.targets:
                places[target].linear = Adapted(places[target].linear, tuning.rank)  # type: ignore[assignment]


@pytest.mark.parametrize("targets", ["v", "o,down", "v,o,down"])
@pytest.mark.parametrize("gated", [False, True])
def test_adapters_keep_what_the_model_says(gated: bool, targets: str) -> None:
    """Bytes of all storages that a forward saves for the backward; the tracker of torch refuses
    frozen layers."""
    shape, tuning = architecture(gated=gated), parse_tuning(lora=f"rank=4,targets={targets}")
    chain = build_chain(shape, name="small", sequence_length=TOKENS, dtype=Dtype.FP32)
    model = nn.Sequential(*(build_layer(shape, layer.kind, width=1) for layer in chain.layers))
    chain = tuned_chain(chain, shape, tuning)
    with_adapters(model, tuning)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(torch.zeros(3, TOKENS, dtype=torch.long))
    assert loss.requires_grad
    predicted = activation_bytes(chain, stage_of(chain), 3, 1.0)
    assert sum(kept.values()) == pytest.approx(predicted, rel=0.06)
    state = state_bytes(chain, stage_of(chain), 1.0)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert state.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert (state.gradients, state.optimizer, state.updated) == (trained, 2 * trained, 4 * trained)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "sgd"])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_a_step_holds_what_the_model_says(gated: bool, samples: int, optimizer: str) -> None:
    """Weights, gradients and optimizer state to the byte but for counters; activations as closely
    as layers alone."""
    shape = architecture(gated=gated)
    chain = build_chain(
        shape, name="small", sequence_length=TOKENS, dtype=Dtype.FP32, optimizer=optimizer
    )
    kinds = [layer.kind for layer in chain.layers]
    model = nn.Sequential(*(build_layer(shape, kind, width=1) for kind in kinds))
    steps = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), foreach=False),
        "momentum": lambda: torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, foreach=False
        ),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
    }[optimizer]()
    given = torch.zeros(samples, TOKENS, dtype=torch.long)
    tracker = MemTracker()
    tracker.track_external(model, steps, given)
    with tracker:
        loss = model(given).sum()
        gc.collect()
        forward = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
        loss.backward()
        backward = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
        steps.step()
        after = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    state = state_bytes(chain, stage_of(chain), 1.0)
    assert forward["Parameter"] == state.weights
    assert backward["Gradient"] == state.gradients
    counters = 8 * len(list(model.parameters())) if optimizer == "adamw" else 0
    assert state.optimizer <= after["Optstate"] <= state.optimizer + counters
    kept = forward["Activation"] + forward["Temp"]
    assert kept == pytest.approx(activation_bytes(chain, stage_of(chain), samples, 1.0), rel=0.06)
