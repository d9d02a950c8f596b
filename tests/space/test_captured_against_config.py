"""Hugging Face models cost the same whether they are captured or described by their config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from argosy.cluster.file import load_cluster
from argosy.cost.compute import ComputeModel, Portion, layer_seconds
from argosy.dtype import Dtype
from argosy.planner import CapturedProgram, find_plan
from argosy.runtime.sources.operations import capture_program
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

SAMPLES, LAYERS = 8, 3
TOKENS = {"llama": 2048, "gpt2": 1024}
NAMES = [pytest.param("llama", marks=pytest.mark.exhaustive), "gpt2"]


def config_of(name: str) -> Any:
    if name == "gpt2":
        return transformers.GPT2Config(
            n_layer=LAYERS, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
    return transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        use_cache=False,
    )


def captured(name: str) -> CapturedProgram:
    def build() -> Any:
        model = transformers.AutoModelForCausalLM.from_config(config_of(name)).to(torch.float16)
        ids = torch.zeros(SAMPLES, TOKENS[name], dtype=torch.int64)
        return model, lambda net, batch: net(input_ids=batch, labels=batch).loss, ids

    return capture_program(build, name=name)


def described(name: str, folder: Path) -> Chain:
    path = folder / "config.json"
    path.write_text(json.dumps(config_of(name).to_dict(), default=str), encoding="utf-8")
    return load_model(str(path), sequence_length=TOKENS[name], dtype=Dtype.FP16)


@pytest.mark.parametrize("name", NAMES)
def test_layers_and_segments_take_the_same_time(name: str, tmp_path: Path) -> None:
    """On every kind of device, forward and backward by themselves."""
    program, chain = captured(name), described(name, tmp_path)
    model = ComputeModel()
    devices = load_cluster("mixed-16").devices
    kinds = {device.kind.name: device for device in devices if model.can_run(chain, device)}
    assert len(kinds) > 1
    for device in kinds.values():
        portion = Portion(device=device, samples=SAMPLES)
        for place in range(2):
            own, config = (
                sum(layer_seconds(model, each, layer, portion)[place] for layer in each.layers)
                for each in (program.chain, chain)
            )
            assert own == pytest.approx(config, rel=0.03)
    assert program.chain.parameters == chain.parameters


@pytest.mark.parametrize("name", NAMES)
def test_plans_for_both_are_as_fast(name: str, tmp_path: Path) -> None:
    program, chain = captured(name), described(name, tmp_path)
    cluster = load_cluster("two-cards")
    plans = find_plan(program, cluster), find_plan(chain, cluster, global_batch=SAMPLES)
    own, config = (plan.predicted.iteration_seconds for plan in plans if plan.predicted is not None)
    assert own == pytest.approx(config, rel=0.05)
