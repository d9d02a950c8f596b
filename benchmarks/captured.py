"""Predicted steps of Hugging Face models, captured and by their configs, on bundled clusters; needs
transformers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from argosy.cluster.file import load_cluster
from argosy.dtype import Dtype
from argosy.planner import CapturedProgram, find_plan
from argosy.workload.chain import Chain
from argosy.workload.load import load_model
from benchmarks.registry import Benchmark, Row

CLUSTERS = ("two-cards", "mixed-8", "geo-8", "mixed-16", "one-per-node-16")
SAMPLES = 64


def configs() -> dict[str, tuple[Any, int]]:
    """Return each model's configuration and its number of tokens."""
    import transformers

    llama = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
        use_cache=False,
    )
    gpt2 = transformers.GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return {"Llama of 1.1 B": (llama, 2048), "GPT-2": (gpt2, 1024)}


def captured(config: Any, tokens: int, name: str) -> CapturedProgram:
    """Return the training step of a model that Hugging Face's library builds, in fp16, which all
    devices have."""
    import torch
    import transformers

    from argosy.runtime.sources.operations import capture_program

    def build() -> Any:
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float16)
        ids = torch.zeros(SAMPLES, tokens, dtype=torch.int64)
        return model, lambda net, batch: net(input_ids=batch, labels=batch).loss, ids

    return capture_program(build, name=name)


def by_config(config: Any, tokens: int) -> Chain:
    """Return the same model as its config describes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config.to_dict(), default=str), encoding="utf-8")
        return load_model(str(path), sequence_length=tokens, dtype=Dtype.FP16)


def rows() -> Iterator[Row]:
    for name, (config, tokens) in configs().items():
        program, chain = captured(config, tokens, name), by_config(config, tokens)
        for cluster in map(load_cluster, CLUSTERS):
            plans = find_plan(chain, cluster, global_batch=SAMPLES), find_plan(program, cluster)
            described, own = (plan.predicted.iteration_seconds for plan in plans if plan.predicted)
            yield Row(
                what=f"{name} on {cluster.name}: step by config", value=1e3 * described, unit="ms"
            )
            ratio = own / described
            yield Row(
                what=f"{name} on {cluster.name}: captured over config",
                value=ratio,
                unit="x",
                target="<= 1.05",
            )


def measure() -> list[Row]:
    return list(rows())


BENCHMARK = Benchmark(
    name="captured", shows="programs against the configs of the same models", measure=measure
)
