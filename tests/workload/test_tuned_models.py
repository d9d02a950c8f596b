"""Models with frozen weights: FLOP and kept bytes against torch's own counts, and what is
refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from argosy.errors import InputError
from argosy.workload.chain import Chain
from argosy.workload.load import load_model
from argosy.workload.tuning import TARGETS, BaseFormat, Tuning, parse_tuning

TOKENS, RANK = 32, 4
CONFIG: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 120, "max_position_embeddings": TOKENS, "tie_word_embeddings": False,
}  # fmt: skip
NAMES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
}
NAMES["down"] = "down_proj"


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.first = nn.Linear(base.in_features, RANK, bias=False)
        self.second = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.second(self.first(x))


def torch_model(tuning: Tuning) -> Any:
    """The same model by another library, with its weights frozen one by one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="eager", use_cache=False))
    parts = {"embedding": model.model.embed_tokens, "head": model.lm_head}
    parts |= {f"block.{at}": block for at, block in enumerate(model.model.layers)}
    if tuning.train == "lora":
        model.requires_grad_(False)
        for block in model.model.layers:
            for target in tuning.targets:
                holder = block.self_attn if target in "qkvo" else block.mlp
                setattr(holder, NAMES[target], Adapted(getattr(holder, NAMES[target])))
    for name, part in parts.items():
        if any(name == frozen for frozen in tuning.freeze):
            part.requires_grad_(False)
    return model


def chain_of(tuning: Tuning, folder: Any) -> Chain:
    import json

    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    return load_model(
        folder, sequence_length=TOKENS, dtype="fp32", tuning=tuning, fused_attention=False
    )


def flop_of(model: Any) -> tuple[float, float]:
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=tokens).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


TUNINGS = [
    parse_tuning(lora=f"rank={RANK}"),
    parse_tuning(lora=f"rank={RANK},targets=all"),
    parse_tuning(lora=f"rank={RANK},targets=o"),
    parse_tuning(lora=f"rank={RANK},targets=up,down"),
    parse_tuning(freeze=("embedding",)),
    parse_tuning(freeze=("embedding", "block.0", "block.1")),
    parse_tuning(freeze=("block.1", "head")),
]


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_flop_and_weights_are_those_of_torch(tuning: Tuning, tmp_path: Any) -> None:
    """Of matrix products, forward and backward, to rounding; trained and frozen weights to the last
    one."""
    model, chain = torch_model(tuning), chain_of(tuning, tmp_path)
    forward, backward = flop_of(model)
    assert forward == pytest.approx(chain.forward_flop, rel=1e-9)
    assert backward == pytest.approx(sum(layer.backward_flop for layer in chain.layers), rel=1e-9)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert chain.parameters + _final_norm(tuning) == trained
    assert chain.parameters + chain.frozen_parameters == sum(p.numel() for p in model.parameters())


def _final_norm(tuning: Tuning) -> int:
    """The head of a chain has the final norm, which ``torch_model`` does not freeze with it."""
    return CONFIG["hidden_size"] if "head" in tuning.freeze else 0


def test_nf4_takes_its_bits_and_int8_its_bytes() -> None:
    """4.127 bits per weight with double quantisation (Dettmers et al., QLoRA, 2023); a scale per
    row for int8."""
    full, nf4, int8 = (
        load_model("llama-3-8b", sequence_length=512, tuning=parse_tuning(lora="", base=base))
        for base in (None, "nf4", "int8")
    )
    block = full.layers[1].frozen
    assert block is not None
    matrices = block.parameters - 2 * 4096
    for chain, bits in ((nf4, 4.127), (int8, 8.008)):
        packed = chain.layers[1].frozen
        assert packed is not None
        assert packed.packed_parameters == matrices
        assert 8 * packed.packed_bytes / matrices == pytest.approx(bits, rel=1e-3)
        assert packed.bytes == packed.packed_bytes + 2 * 4096 * 2
    assert full.frozen_bytes == 2 * full.frozen_parameters
    assert set(BaseFormat) == {"nf4", "int8"}


def test_tied_tables_are_frozen_together() -> None:
    chain = load_model("gpt2", tuning=parse_tuning(lora=""))
    embedding, head = chain.layers[0], chain.layers[-1]
    assert embedding.frozen is not None and head.frozen is not None
    assert head.tied_parameters == 0 and not chain.shared
    assert head.frozen.tied_bytes == 50257 * 768 * 2
    assert chain.frozen_parameters == 124_439_808
    for name in ("head", "embedding"):  # one tensor, frozen wherever it is used
        assert (
            load_model("gpt2", tuning=parse_tuning(freeze=(name,))).frozen_parameters == 39_385_344
        )


def test_adapters_of_experts_are_as_many_as_experts() -> None:
    chain = load_model(
        "mixtral-8x7b", sequence_length=128, tuning=parse_tuning(lora="rank=8,targets=q,up")
    )
    block = chain.layers[1]
    assert block.parameters == 8 * (4096 + 4096) + 8 * 8 * (4096 + 14336)
    assert block.expert_parameters == 8 * 8 * (4096 + 14336)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": "lra"}, '--train: found "lra", expected one of full, lora'),
        (
            {"train": "full", "lora": "rank=8"},
            "--lora cannot be combined with --train full",
        ),
        ({"lora": "rank=0"}, '--lora rank: found "0", expected a whole number from 1 to 65536'),
        ({"lora": "rank=²"}, '--lora rank: found "²", expected a whole number from 1 to 65536'),
        ({"lora": "rank=" + "9" * 5000}, "expected a whole number from 1 to 65536"),
        (
            {"lora": "targets=q,w"},
            '--lora targets: found "w", expected one of q, k, v, o, gate, up, down, all',
        ),
        ({"lora": "alpha=16"}, '--lora: found "alpha=16", expected rank=R,targets=q,v,...'),
        ({"lora": "rank=4,rank=8"}, '--lora: found "rank=4,rank=8", expected one rank'),
        ({"lora": "q,v"}, '--lora: found "q,v", expected rank=R,targets=q,v,...'),
        ({"base": "nf4"}, "--base-weights needs --train lora or --freeze"),
        ({"lora": "", "base": "fp4"}, '--base-weights: found "fp4", expected one of int8, nf4'),
        ({"freeze": [""]}, '--freeze: found "", expected a pattern of layer names'),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_tuning(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": ["block.99"]}, 'found "block.99", expected a pattern of layer names of gpt2'),
        ({"freeze": ["*"]}, "leaves no weight to train"),
        (
            {"lora": "targets=q,gate"},
            '--lora targets: found "gate", expected matrices of gpt2: q, k, v, o, up, down',
        ),
        ({"lora": "", "freeze": ["block.*"]}, "leaves no weight to train"),
    ],
)
def test_nothing_left_to_train_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model("gpt2", tuning=parse_tuning(**options))
    assert message in str(caught.value)


@pytest.mark.parametrize("options", [{"lora": ""}, {"freeze": ["block.0"]}])
def test_frozen_latent_attention_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="frozen latent attention is not modelled"):
        load_model("deepseek-v3", tuning=parse_tuning(**options))


def test_options_are_what_is_parsed() -> None:
    tuning = parse_tuning(lora="rank=8,targets=v,q", freeze=["block.0"], base="int8")
    assert (
        tuning.options
        == "--train lora --lora rank=8,targets=q,v --freeze 'block.0' --base-weights int8"
    )
    assert parse_tuning(lora="targets=all").targets == TARGETS
    assert parse_tuning(lora="targets=q,all").targets == TARGETS
