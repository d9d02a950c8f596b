"""Training programs around models of transformers, small."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from runtime.own_programs import BATCH, Built, program
from torch import Tensor

WORDS, TIME = 40, 7


def language_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def padded(*, left: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(4, WORDS, (BATCH, TIME))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[4, :5] = 0
    if not left:
        mask = mask.flip(1)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def plain() -> dict[str, Tensor]:
    ids = torch.randint(4, WORDS, (BATCH, TIME))
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2_config() -> Any:
    from transformers import GPT2Config

    zero = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False, **zero
    )


@program
def gpt2_padded() -> Built:
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel(gpt2_config()), language_loss, padded()


@program
def gpt2_gradient_checkpointing() -> Built:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(gpt2_config())
    if hasattr(model, "activation_checkpointing_enable"):  # its name in newer versions
        model.activation_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable()
    return model.train(), language_loss, plain()


@functools.cache
def pretrained() -> str:
    """A folder with a model that was trained elsewhere; call it before ``build`` runs."""
    from safetensors.torch import save_file
    from transformers import GPT2LMHeadModel

    folder = tempfile.mkdtemp(prefix="argosy-pretrained-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # in every process, so that all draw the same weights
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = GPT2LMHeadModel(gpt2_config())
    finally:
        torch.set_default_dtype(default)
    state = {
        name: value for name, value in model.state_dict().items() if name != "lm_head.weight"
    }  # it is tied
    save_file(state, Path(folder) / "model.safetensors", {"format": "pt"})
    gpt2_config().save_pretrained(folder)
    return folder


@program
def gpt2_from_pretrained() -> Built:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(pretrained(), dtype=torch.float64)
    return model.train(), language_loss, plain()


@program
def llama_padded_left() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config), language_loss, padded(left=True)


@program
def gpt2_classifier() -> Built:
    """A class for each sequence, by the state of its last real token."""
    from transformers import GPT2ForSequenceClassification

    config = gpt2_config()
    config.num_labels, config.pad_token_id = 3, 0
    batch = padded()
    batch["input_ids"] = batch["input_ids"] * batch["attention_mask"]
    batch["labels"] = torch.randint(0, 3, (BATCH,))
    return GPT2ForSequenceClassification(config), language_loss, batch


@program
def opt() -> Built:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=WORDS,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        word_embed_proj_dim=16,
        dropout=0.0,
        layerdrop=0.0,
        use_cache=False,
    )
    return OPTForCausalLM(config).train(), language_loss, padded()


@program
def bart() -> Built:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=WORDS,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=16,
        dropout=0.0,
        use_cache=False,
    )
    return BartForConditionalGeneration(config).train(), language_loss, plain()


@program
def whisper() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=WORDS,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        dropout=0.0,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    batch = {
        "input_features": torch.randn(BATCH, 8, 20),
        "labels": torch.randint(3, WORDS, (BATCH, TIME)),
    }
    return WhisperForConditionalGeneration(config).train(), language_loss, batch


@program
def deberta() -> Built:
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    config = DebertaV2Config(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return DebertaV2ForMaskedLM(config).train(), language_loss, padded()


@program
def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).train(), language_loss, padded()


@program
def swin() -> Built:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=16,
        patch_size=2,
        num_channels=3,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=2,
        num_labels=3,
        drop_path_rate=0.0,
    )
    batch = {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 3, (BATCH,))}
    return SwinForImageClassification(config).train(), language_loss, batch


@program
def prompt_tuning() -> Built:
    from transformers import GPT2LMHeadModel

    class Prompted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = GPT2LMHeadModel(gpt2_config()).requires_grad_(False)
            self.prompt = torch.nn.Parameter(torch.randn(3, 16) * 0.1)

        def forward(self, ids: Tensor) -> Tensor:
            words = self.inner.transformer.wte(ids)
            made = torch.cat([self.prompt.expand(len(ids), -1, -1), words], 1)
            labels = torch.cat([ids.new_full((len(ids), 3), -100), ids], 1)
            return self.inner(inputs_embeds=made, labels=labels).loss

    return Prompted().train(), lambda model, ids: model(ids), torch.randint(4, WORDS, (BATCH, TIME))
