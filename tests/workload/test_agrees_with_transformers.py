"""Parameter counts against transformers' own modules, on the meta device, where nothing is
allocated."""

from __future__ import annotations

import json
import random
import tomllib
from importlib.resources import files
from typing import Any

import pytest

from argosy.document import parse_json
from argosy.dtype import Dtype
from argosy.workload.huggingface import FAMILIES, read_config
from argosy.workload.preset import preset_names, read_preset
from argosy.workload.transformer import build_chain

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

MODEL_CLASSES = {
    "bert": "AutoModelForPreTraining",
    "roberta": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}


def counted(config: dict[str, Any]) -> int:
    """Unique parameters of the model that transformers builds; buffers are none."""
    keys = {key: value for key, value in config.items() if key != "model_type"}
    hugging = transformers.AutoConfig.for_model(config["model_type"], **keys)
    model_class = getattr(
        transformers, MODEL_CLASSES.get(config["model_type"], "AutoModelForCausalLM")
    )
    with torch.device("meta"):
        model = model_class.from_config(hugging)
    return sum(parameter.numel() for parameter in model.parameters())


def ours(config: dict[str, Any]) -> int:
    return read_config(parse_json(json.dumps(config), file="config.json")).architecture.parameters


def rotary(pick: random.Random) -> dict[str, Any]:
    kv_heads = pick.choice([1, 2, 4])
    return {
        "vocab_size": pick.randint(50, 500),
        "hidden_size": 16 * pick.randint(1, 4) * kv_heads,
        "intermediate_size": pick.randint(10, 200),
        "num_hidden_layers": pick.randint(1, 4),
        "num_attention_heads": 2 * kv_heads,
        "num_key_value_heads": kv_heads,
        "pad_token_id": 0,
        "tie_word_embeddings": pick.random() < 0.5,
    } | ({"head_dim": 2 * pick.randint(2, 20)} if pick.random() < 0.5 else {})


def gpt_like(pick: random.Random, hidden: str, layers: str, heads: str) -> dict[str, Any]:
    return {
        "vocab_size": pick.randint(50, 500),
        hidden: 16 * pick.randint(1, 6),
        layers: 2 * pick.randint(1, 2),
        heads: pick.choice([1, 2, 4]),
        "tie_word_embeddings": pick.random() < 0.5,
    }


def random_config(model_type: str, pick: random.Random) -> dict[str, Any]:
    yes = pick.random() < 0.5
    wide = {"intermediate_size": pick.randint(10, 200)}
    named = gpt_like(pick, "hidden_size", "num_hidden_layers", "num_attention_heads")
    extra: dict[str, Any] = {}
    match model_type:
        case "gpt2":
            base = gpt_like(pick, "n_embd", "n_layer", "n_head")
            extra = {"n_positions": pick.randint(8, 64)} | ({"n_inner": 33} if yes else {})
        case "gpt_neo":
            base = gpt_like(pick, "hidden_size", "num_layers", "num_heads")
            extra = {"attention_types": [[["global", "local"], base["num_layers"] // 2]]}
        case "gpt_neox":
            base, extra = named | wide, {"attention_bias": yes}
        case "opt":
            base = named | {"ffn_dim": pick.randint(10, 200), "pad_token_id": 1}
            extra = {"do_layer_norm_before": yes, "enable_bias": pick.random() < 0.5}
            extra |= {"word_embed_proj_dim": 8} if pick.random() < 0.5 else {}
            extra |= {"layer_norm_elementwise_affine": pick.random() < 0.5}
        case "bert" | "roberta":
            base = named | wide | {"tie_word_embeddings": True}
            extra = {
                "type_vocab_size": pick.randint(1, 3),
                "max_position_embeddings": pick.randint(8, 64),
            }
        case "vit":
            base, extra = (
                named | wide,
                {"image_size": pick.randint(16, 40), "patch_size": pick.randint(4, 16)},
            )
            extra |= {
                "num_labels": pick.randint(2, 20),
                "qkv_bias": yes,
                "num_channels": pick.randint(1, 4),
            }
        case "t5":
            base = {
                "vocab_size": 99,
                "d_model": 24,
                "d_kv": pick.randint(3, 9),
                "d_ff": 40,
                "num_layers": 3,
            }
            extra = {"num_heads": 4, "num_decoder_layers": pick.randint(1, 4)}
            extra |= {"feed_forward_proj": "gated-gelu" if yes else "relu"}
        case "deepseek_v3":
            base = rotary(pick) | {"qk_nope_head_dim": pick.randint(2, 9), "v_head_dim": 7}
            base |= {"num_key_value_heads": base["num_attention_heads"], "kv_lora_rank": 11}
            extra = {"q_lora_rank": 13 if yes else None, "qk_rope_head_dim": 4, "n_group": 1}
            extra |= {"attention_bias": pick.random() < 0.5, "first_k_dense_replace": 1}
            extra |= {"n_routed_experts": 4, "n_shared_experts": pick.randint(1, 2)}
            extra |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "topk_group": 1}
        case _:
            base = rotary(pick)
            if model_type == "olmoe":
                base.pop("head_dim", None)  # its norms assume hidden_size / num_attention_heads
            extra = {
                "attention_bias": yes,
                "mlp_bias": pick.random() < 0.5,
                "qkv_bias": pick.random() < 0.5,
            }
            extra |= {
                "num_local_experts" if model_type == "mixtral" else "num_experts": pick.randint(
                    2, 6
                )
            }
            extra |= {
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "decoder_sparse_step": pick.randint(1, 2),
            }
            extra |= {
                "shared_expert_intermediate_size": 30,
                "mlp_only_layers": [0] if pick.random() < 0.3 else [],
            }
    return {"model_type": model_type} | base | extra


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model_type", FAMILIES)
def test_random_small_models(model_type: str, seed: int) -> None:
    config = random_config(model_type, random.Random(f"{model_type} {seed}"))
    assert ours(config) == counted(config), config


@pytest.mark.parametrize("name", preset_names())
def test_presets(name: str) -> None:
    config = tomllib.loads((files("argosy") / "data" / "models" / f"{name}.toml").read_text())[
        "config"
    ]
    config.pop(
        "rope_scaling", None
    )  # angles have no parameters, and lists of factors are not in presets
    assert read_preset(name).config.architecture.parameters == counted(config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_as_transformers_saves_it(model_type: str) -> None:
    """Unknown keys, nested tables and nulls included."""
    config = random_config(model_type, random.Random(model_type))
    keys = {key: value for key, value in config.items() if key != "model_type"}
    saved = transformers.AutoConfig.for_model(model_type, **keys).to_json_string(use_diff=False)
    assert ours(json.loads(saved)) == counted(config)


@pytest.mark.parametrize("query_rank", [None, 24])
def test_latent_attention_multiplies_as_transformers_does(query_rank: int | None) -> None:
    """A dense block and one with experts, counted by torch while a batch of one sample runs."""
    config = {
        "model_type": "deepseek_v3",
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": query_rank,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    keys = {key: value for key, value in config.items() if key != "model_type"}
    hugging = transformers.AutoConfig.for_model("deepseek_v3", **keys)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(hugging, **options)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(9)[None])
    architecture = read_config(parse_json(json.dumps(config), file="config.json")).architecture
    chain = build_chain(architecture, name="small", sequence_length=9, dtype=Dtype.FP32)
    assert counter.get_total_flops() == chain.forward_flop


def test_an_untied_t5_has_a_head_of_its_own() -> None:
    """transformers 5 ties T5's head whatever the config says; checkpoints from T5 1.1 on hold it
    apart."""
    config = random_config("t5", random.Random(0))
    assert ours(config | {"tie_word_embeddings": False}) == counted(config) + 99 * 24
