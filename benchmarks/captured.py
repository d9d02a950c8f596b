"""Predicted steps of Hugging Face models, captured and by their configs, on bundled clusters; needs
transformers.

(1)  A config's layer i + 1 is block i. In the captured program the block begins at the first
     segment that is named after it, and the head after the last segment of a block.
(2)  A config's plan on the captured program has the same stages, cut by (1). If it fits into
     memory, the program's own plan must be as fast.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.dtype import Dtype
from argosy.plan.plan import ModelRef, Plan
from argosy.planner import CapturedProgram, find_plan
from argosy.sim.simulate import first_end, play
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


def borders(chain: Chain, program: Chain) -> dict[int, int]:
    """Return (1) the program's segment at which every layer of the config begins or ends."""
    blocks: dict[int, list[int]] = {}
    for at, layer in enumerate(program.layers):
        if block := re.search(r"\.(?:layers|h)\.(\d+)", layer.name):
            blocks.setdefault(int(block[1]), []).append(at)
    ends = len(chain.layers), len(program.layers)
    head = ends[0] - 1, max(blocks[len(blocks) - 1]) + 1
    return {0: 0, **{block + 1: min(at) for block, at in blocks.items()}, **dict((head, ends))}


def exchanged(described: Plan, own: Plan, chain: Chain, program: Chain, cluster: Cluster) -> Row:
    """Compare (2) the program's own plan with the config's plan on the program."""
    at = borders(chain, program)
    stages = tuple(
        replace(stage, first=at[stage.first], end=at[stage.end]) for stage in described.stages
    )
    moved = replace(described, model=ModelRef.of(program), stages=stages)
    timeline = play(moved, program, cluster, whole=True)
    memory = {device.name: device.kind.memory for device in cluster.devices}
    used = max(held / memory[name] for name, held in timeline.peak_memory().items())
    what = f"{program.name} on {cluster.name}: "
    if used > 1:
        return Row(
            what=f"{what}memory that the config's plan needs", value=used, unit="of the devices'"
        )
    assert own.predicted is not None
    ratio = own.predicted.iteration_seconds / first_end(timeline)
    return Row(what=f"{what}own over the config's plan", value=ratio, unit="x", target="<= 1.02")


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
            yield exchanged(*plans, chain, program.chain, cluster)


def measure() -> list[Row]:
    return list(rows())


BENCHMARK = Benchmark(
    name="captured", shows="programs against the configs of the same models", measure=measure
)
