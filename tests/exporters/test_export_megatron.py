"""Plans in Megatron-LM's words: read back by a reader that also reads layouts that others have
published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exporters.target_readers import (
    cluster,
    options_of,
    plan,
    read_layout,
    run_script,
    visible_devices,
    with_stage,
)

from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.exporters.deepspeed import export_deepspeed
from argosy.exporters.flagscale import export_flagscale
from argosy.exporters.form import Export
from argosy.exporters.megatron import export_megatron, layout
from argosy.plan.plan import CostModelRef, Plan, PolicyRule, Recompute
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.load import load_architecture, load_model

CHAIN, SHAPE = load_model("llama-3-8b", sequence_length=2048), load_architecture("llama-3-8b")

PUBLISHED = {
    "Et*3|(tt|)*29,m|L": (32, 61, 1),
    "Et*2|(tt|)*22t|(tt|)*7mL": (32, 61, 1),
    "Et|(tt|)*22L": (24, 45, 0),
    "Et*11|t*11|t*11|t*10mL": (4, 43, 1),
    "Et*4|t*3|t*3|t*4|t*3|t*4|t*4|t*3,L": (8, 28, 0),
}
"""Layouts from public training scripts: stages, blocks and prediction layers that they say they
have."""


def export(plan: Plan, *, lossy: bool = False) -> Export:
    return export_megatron(plan, CHAIN, SHAPE, lossy=lossy)


def flags(plan: Plan, *, lossy: bool = False) -> dict[str, str | bool]:
    ((_, script),) = export(plan, lossy=lossy).files
    return options_of(run_script(script)[0])


@pytest.mark.parametrize("text", PUBLISHED)
def test_the_reader_reads_what_others_have_published(text: str) -> None:
    stages = read_layout(text)
    letters = "".join(stages)
    assert (len(stages), letters.count("t"), letters.count("m")) == PUBLISHED[text]
    assert letters.startswith("E")
    assert letters.endswith("L")


@pytest.mark.parametrize(
    "text", ["Et*11|t*10|t*8|t*3L", "Et*8|(t*8|)*2,t*8L", "E|t*16|t*16|L", "Et|t*15|t*15|tL"]
)
def test_a_layout_survives_the_way_through_a_plan(text: str) -> None:
    stages = read_layout(text)
    ends = [sum(map(len, stages[: at + 1])) for at in range(4)]
    written = layout(plan(ends), CHAIN)
    assert read_layout(written) == stages


def test_the_flags_say_what_the_plan_says() -> None:
    made = with_stage(with_stage(plan([13, 26, 30, 34], samples=2), 0, zero=1), 1, zero=1)
    made = with_stage(with_stage(made, 2, zero=1), 3, zero=1)
    found = flags(made)
    assert found["pipeline-model-parallel-size"] == "4"
    assert found["tensor-model-parallel-size"] == "2"
    assert found["sequence-parallel"] is True
    assert read_layout(str(found["pipeline-model-parallel-layout"])) == [
        "E" + 12 * "t",
        13 * "t",
        4 * "t",
        3 * "t" + "L",
    ]
    assert (found["micro-batch-size"], found["global-batch-size"]) == ("2", "32")
    assert found["use-distributed-optimizer"] is True
    assert found["bf16"] is True
    assert found["num-layers"] == "32"
    assert (found["num-attention-heads"], found["num-query-groups"]) == ("32", "8")
    assert found["swiglu"] is True


def test_every_host_is_started_with_its_ranks() -> None:
    ((_, script),) = export(plan([13, 26, 30, 34])).files
    calls = [options_of(words) for words in run_script(script)]
    assert [call["node-rank"] for call in calls] == ["0", "1", "2", "3"]
    assert {call["nproc-per-node"] for call in calls} == {"4"}
    assert {call["master-addr"] for call in calls} == {"a0"}


def test_a_host_whose_ranks_are_apart_has_an_agent_for_each_run() -> None:
    """Stages 0 and 1 have half of the devices of a0 and a1 each: torchrun numbers ranks agent by
    agent."""
    made = plan([13, 26, 30, 34])
    (one, two), (three, four) = (stage.replicas for stage in made.stages[:2])
    apart = with_stage(with_stage(made, 0, replicas=(one, three)), 1, replicas=(two, four))
    ((_, script),) = export(apart).files
    calls = [options_of(words) for words in run_script(script)]
    assert [call["nproc-per-node"] for call in calls] == ["2", "2", "2", "2", "4", "4"]
    assert visible_devices(script)[:4] == [("0", "1"), ("0", "1"), ("2", "3"), ("2", "3")]
    assert {call["nnodes"] for call in calls} == {"6"}


def test_flags_that_a_default_would_change() -> None:
    """The rotary base, the constant in norms, the format of gradients, and one queue of work per
    device."""
    ((_, script),) = export(plan([13, 26, 30, 34])).files
    found = flags(plan([13, 26, 30, 34]))
    assert (found["rotary-base"], found["norm-epsilon"], found["vocab-size"]) == (
        "500000",
        "1e-05",
        "128256",
    )
    assert found["make-vocab-size-divisible-by"] == "1"
    assert found["grad-reduce-in-bf16"] is True, (
        "the default cost model keeps gradients in the format of the weights"
    )
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in script
    main = replace(
        plan([13, 26, 30, 34]),
        cost_model=CostModelRef.of({"constants": {"gradient_dtype": "fp32"}}),
    )
    found = flags(main)
    assert (
        found["accumulate-allreduce-grads-in-fp32"] is True and "grad-reduce-in-bf16" not in found
    )
    ((_, scaled),) = preset("llama-3.1-405b").files
    found = options_of(run_script(scaled)[0])
    assert (found["use-rope-scaling"], found["rope-scaling-factor"]) == (True, "8.0")
    ((_, window),) = preset("mistral-7b", length=8192).files
    assert options_of(run_script(window)[0])["window-size"] == "4095,0"


def test_chunks_go_round_the_ranks() -> None:
    two = plan(
        [9, 17, 26, 34],
        hosts=("a0", "a1", "a0", "a1"),
        schedule=ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2),
    )
    found = flags(two)
    assert found["pipeline-model-parallel-size"] == "2"
    assert len(read_layout(str(found["pipeline-model-parallel-layout"]))) == 4


def uneven(made: Plan) -> Plan:
    first, second = made.stages[0].replicas
    return with_stage(made, 0, replicas=(replace(first, samples=3), replace(second, samples=1)))


def with_replicas(made: Plan, index: int, **changes: Any) -> Plan:
    return with_stage(
        made, index, replicas=tuple(replace(one, **changes) for one in made.stages[index].replicas)
    )


LOSSES = {
    "shares": (uneven, "stages[0].samples: found 3/1"),
    "recompute": (lambda made: with_stage(made, 1, recompute=Recompute.FULL), "stages.recompute: found none/full/none"),
    "zero": (lambda made: with_stage(made, 1, zero=3), "stages.zero: found 0/3/0/0"),
    "schedule": (
        lambda made: replace(made, schedule=ScheduleSpec(kind=ScheduleKind.KFKB, k=2)),
        "schedule: found kfkb (k=2), expected 1f1b or interleaved",
    ),
    "policy": (
        lambda made: replace(made, policy=(PolicyRule(edge="v0.nic", below=1e9, schedule=ScheduleSpec()),)),
        "policy: found 1 rules",
    ),
    "ratios": (
        lambda made: with_replicas(made, 0, ratios=(0.75, 0.25)),
        "stages[0].replicas[0].ratios: found 0.75/0.25",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LOSSES)
def test_what_can_be_lost_is_refused_and_lost_by_name(what: str) -> None:
    change, says = LOSSES[what]
    made = change(plan([13, 26, 30, 34], samples=2))
    with pytest.raises(InputError) as caught:
        export(made)
    assert says in str(caught.value)
    assert "--lossy" in str(caught.value)
    lost = export(made, lossy=True).lost
    assert [says in str(problem) for problem in lost].count(True) == 1


def test_what_is_lost_is_written_as_the_next_best() -> None:
    made = plan([13, 26, 30, 34])
    found = flags(with_stage(with_stage(made, 1, recompute=Recompute.FULL), 2, zero=3), lossy=True)
    assert found["recompute-granularity"] == "full"
    assert found["use-distributed-optimizer"] is True


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda made: with_stage(made, 3, replicas=made.stages[3].replicas[:1]), "stages[3].replicas: found 1"),
        (lambda made: with_replicas(made, 1, devices=("a1.0",)), "stages[1].replicas[0].devices: found 1"),
        (lambda made: with_stage(made, 2, context=2), "stages[2].context: found 2"),
    ],
)  # fmt: skip
def test_what_nothing_comes_close_to_is_refused_all_the_same(change, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError) as caught:
        export(change(plan([13, 26, 30, 34])), lossy=True)
    assert says in str(caught.value)


def test_shares_that_cannot_be_evened_out_are_refused() -> None:
    made = replace(uneven(plan([13, 26, 30, 34], samples=2)), micro_batch_size=5)
    with pytest.raises(InputError, match="5 samples do not divide by 2"):
        export(made, lossy=True)


def test_models_of_other_shapes_are_refused() -> None:
    chain = load_model("t5-base")
    with pytest.raises(InputError, match=r"t5-base with encoder\.0"):
        export_megatron(
            plan([7, 14, 20, 27], model="t5-base"), chain, load_architecture("t5-base"), lossy=True
        )


def preset(name: str, *, lossy: bool = False, length: int = 512) -> Export:
    chain, shape = (
        load_model(name, sequence_length=None if "vit" in name else length),
        load_architecture(name),
    )
    count = len(chain.layers)
    made = plan([count // 4, count // 2, 3 * count // 4, count], model=name)
    made = replace(made, model=replace(made.model, sequence_length=chain.sequence_length))
    return export_megatron(made, chain, shape, lossy=lossy)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("bert-base", "layers between its last block and the logits"),
        ("vit-base", "images"),
        ("gpt-neox-20b", "attention and feed-forward side by side"),
        ("opt-350m", "norms behind the residual sums"),
    ],
)
def test_models_that_are_no_gpt_are_refused(name: str, what: str) -> None:
    with pytest.raises(
        InputError, match=f"{name} with {what}, expected a model in the shape of Megatron-LM's GPT"
    ):
        preset(name, lossy=True)


@pytest.mark.parametrize(
    ("name", "length", "says"),
    [
        ("gpt-neo-2.7b", 512, "attention to 256 tokens in some blocks"),
        ("opt-30b", 512, "the activation relu, expected gelu"),
        ("gpt-neo-2.7b", 512, "biases of the attention's output and the feed-forward"),
        ("olmoe-1b-7b", 512, "one norm of the queries of all heads"),
    ],
)
def test_shapes_that_come_close_are_lost_by_name(name: str, length: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        preset(name, length=length)
    assert any(says in str(problem) for problem in preset(name, length=length, lossy=True).lost)


SAID = [
    "gpt2",
    "gpt3-175b",
    "llama-2-70b",
    "llama-3-8b",
    "mistral-7b",
    "mixtral-8x7b",
    "opt-30b",
    "qwen2.5-7b",
    "qwen3-8b",
]


@pytest.mark.parametrize("name", SAID)
def test_a_block_made_from_the_flags_has_the_weights_of_the_model(name: str) -> None:
    """Counted as Megatron-LM's layers are built from its flags."""
    ((_, script),) = preset(name, lossy=True).files
    found = options_of(run_script(script)[0])
    hidden, heads = int(found["hidden-size"]), int(found["num-attention-heads"])
    kept = heads * int(found.get("kv-channels", hidden // heads))
    shared = kept * int(found.get("num-query-groups", heads)) // heads
    bias = "disable-bias-linear" not in found
    attention = (
        hidden * (2 * kept + 2 * shared)
        + bias * hidden
        + (bias or "add-qkv-bias" in found) * (kept + 2 * shared)
    )
    attention += 2 * (kept // heads) * ("qk-layernorm" in found)
    experts, inner = (
        int(found.get("num-experts", 0)),
        int(found.get("moe-ffn-hidden-size", found["ffn-hidden-size"])),
    )
    up = 2 if "swiglu" in found else 1
    feed_forward = (up + 1) * hidden * inner + bias * (up * inner + hidden)
    norms = 2 * hidden * (1 if found.get("normalization") == "RMSNorm" else 2)
    shape = load_architecture(name)
    weights = attention + max(1, experts) * feed_forward + experts * hidden + norms
    assert weights == shape.blocks[0].parameters(shape.hidden)


def test_positions_reach_as_far_as_the_sequence() -> None:
    """Megatron-LM asserts it, of positions that are computed too."""
    ((_, script),) = preset("llama-2-7b", length=8192).files
    found = options_of(run_script(script)[0])
    assert int(found["max-position-embeddings"]) >= int(found["seq-length"]) == 8192


MIXTURE = {
    "model_type": "qwen2_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "vocab_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
"""A mixture of experts in the words of its config.json."""


def mixture(folder: Path, **changes: object) -> dict[str, str | bool]:
    path = folder / "config.json"
    path.write_text(json.dumps(MIXTURE | changes))
    chain, shape = load_model(path, sequence_length=128), load_architecture(path)
    ((_, script),) = export_megatron(plan([2, 3, 4, 6]), chain, shape).files
    return options_of(run_script(script)[0])


def test_experts_are_said_in_full(tmp_path: Path) -> None:
    found = mixture(tmp_path)
    assert (found["num-experts"], found["moe-router-topk"], found["moe-ffn-hidden-size"]) == (
        "8",
        "2",
        "24",
    )
    assert (
        found["moe-shared-expert-intermediate-size"] == "40"
        and found["moe-shared-expert-gate"] is True
    )
    alone = mixture(tmp_path, model_type="qwen3_moe")
    assert not [name for name in alone if name.startswith("moe-shared")]
    assert alone["kv-channels"] == "32", "heads that are wider than the stream's share"


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    """Flags of grouped-query attention would make another model of it."""
    sizes = {
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "first_k_dense_replace": 0,
    }
    with pytest.raises(
        InputError, match=r"with latent attention, expected a model in the shape of"
    ):
        mixture(tmp_path, model_type="deepseek_v3", n_routed_experts=8, **sizes)


def test_blocks_of_two_kinds_are_refused(tmp_path: Path) -> None:
    """Blocks with experts between blocks without: one set of flags would make all of them alike."""
    with pytest.raises(
        InputError, match=r"with block\.3, expected an embedding, blocks of one kind"
    ):
        mixture(tmp_path, mlp_only_layers=[3])


def test_fp8_needs_a_recipe() -> None:
    made = plan([13, 26, 30, 34])
    made = replace(made, model=replace(made.model, dtype=Dtype.FP8))
    for attempt in (
        lambda: export_megatron(made, CHAIN, SHAPE, lossy=True),
        lambda: export_deepspeed(made, CHAIN, lossy=True),
        lambda: export_flagscale(made, CHAIN, SHAPE, cluster(), lossy=True),
    ):
        with pytest.raises(
            InputError, match=r"model.dtype: found fp8, expected bf16, fp16 or fp32"
        ):
            attempt()
