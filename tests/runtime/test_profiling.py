"""Profiling a model's layers: what is counted is what the layers have, and the profile plans."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from argosy.cluster.file import build_cluster
from argosy.cost.compute import ComputeModel
from argosy.document import parse_toml
from argosy.dtype import Dtype
from argosy.measure.profile import ProfileSettings, profile_model
from argosy.measure.timing import FEWEST, Between, typical_seconds
from argosy.planner import find_plan
from argosy.runtime.stages import compiling
from argosy.workload.profile_file import dump_profile, parse_profile

PAIR = """
name = "pair"
[[nodes]]
name = "a"
count = 2
devices = { kind = "CPU-core" }
nic = { bandwidth = "1 Gbit/s" }
"""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.outer(torch.relu(self.inner(hidden)))


class Head(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T


def model() -> nn.Sequential:
    embedding = nn.Embedding(50, 16)
    return nn.Sequential(embedding, Block(16), Block(16), Block(16), Head(embedding))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def measured() -> str:
    batch = torch.zeros(4, 8, dtype=torch.int64)
    profile = profile_model(
        model(),
        loss,
        batch,
        ProfileSettings(
            name="small", kind="CPU-core", samples=(1, 2, 4), seconds=0.005, sequence_length=8
        ),
    )
    return dump_profile(profile)


def test_counts_are_those_of_the_layers() -> None:
    profile = parse_profile(measured(), file="profile.json")
    kinds = [layer.kind for layer in profile.layers]
    assert kinds == ["Embedding", "Block", "Block", "Block", "Head"]
    block, head = profile.layers[1], profile.layers[4]
    assert block.parameters == 16 * 32 * 2 + 32 + 16
    assert block.forward_flop == 2 * 8 * 2 * 16 * 32
    assert block.output_bytes == 8 * 16 * 4
    # its input, the inner product's result and what relu keeps of it
    assert 8 * (16 + 32) * 4 <= block.activation_bytes <= 8 * (16 + 3 * 32) * 4
    assert (head.parameters, head.tied_to, head.tied_parameters) == (0, 0, 50 * 16)
    assert head.output_bytes == 0


def test_equal_layers_are_measured_once_for_each_number_of_samples() -> None:
    profile = parse_profile(measured(), file="profile.json")
    assert sorted((row.layer, row.micro_batch) for row in profile.rows) == [
        (kind, count) for kind in ("Block", "Embedding", "Head") for count in (1, 2, 4)
    ]
    assert all(row.forward_seconds > 0 and row.backward_seconds > 0 for row in profile.rows)


def test_compiled_layers_are_measured_and_said_to_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    batch = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(0))
    profile = profile_model(
        model(),
        loss,
        batch,
        ProfileSettings(
            name="small", kind="CPU-core", samples=(2,), seconds=0.001, is_compiled=True
        ),
    )
    assert profile.compiled and len(profile.rows) == 3
    assert parse_profile(dump_profile(profile), file="profile.json") == profile
    assert not parse_profile(measured(), file="profile.json").compiled


def test_a_profile_can_be_planned_with() -> None:
    profile = parse_profile(measured(), file="profile.json")
    cluster = build_cluster(parse_toml(PAIR, file="pair.toml"), folder=Path())
    chain = profile.chain(dtype=Dtype.FP32)
    plan = find_plan(
        chain, cluster, global_batch=4, model=ComputeModel(profiles={"CPU-core": profile})
    )
    assert plan.stages[-1].end == 5


def test_what_is_handed_on_counts_once_and_what_a_backward_holds_is_measured() -> None:
    """Each tanh keeps its result, which is the next one's input: 400 bytes a sample; the first has
    the batch. The backward of the mean fills a tensor of the last result's size before the last
    tanh makes another."""
    found = profile_model(
        nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh()),
        lambda model, batch: model(batch).mean(),
        torch.zeros(4, 100, requires_grad=True),
        ProfileSettings(name="chain", kind="CPU-core", samples=(4,), seconds=0.001),
    )
    assert [layer.activation_bytes for layer in found.layers] == [0, 400, 800]
    assert found.layers[1].working_bytes == 400
    assert 400 <= found.layers[2].working_bytes <= 820


def test_layers_of_16_bit_weights_are_measured_as_a_run_computes_them() -> None:
    """A run does not autocast weights of 16 bits. Under autocast a LayerNorm would keep its result
    in float32."""
    model = nn.Sequential(nn.LayerNorm(64), nn.LayerNorm(64)).to(torch.bfloat16)
    found = [
        profile_model(
            model,
            lambda model, batch: model(batch).mean(),
            torch.zeros(2, 64, dtype=torch.bfloat16, requires_grad=True),
            ProfileSettings(name="norms", kind="CPU-core", samples=(2,), dtype=dtype, seconds=0.0),
        )
        for dtype in (Dtype.BF16, Dtype.FP32)
    ]
    kept = [
        [(layer.activation_bytes, layer.output_bytes) for layer in profile.layers]
        for profile in found
    ]
    assert kept[0] == kept[1]


def test_forwards_and_backwards_are_timed_apart() -> None:
    calls: list[str] = []

    def run(between: Between) -> None:
        calls.append("forward")
        time.sleep(0.002)
        between()
        calls.append("backward")
        time.sleep(0.006)

    forward, backward = typical_seconds(run, torch.device("cpu"), 0.0)
    assert calls == ["forward", "backward"] * FEWEST
    assert 0.002 <= forward < backward
    assert backward >= 0.006
