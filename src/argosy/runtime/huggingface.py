"""Families of Hugging Face models as layers, through the modules that they are made of.

Each family is three kinds of layer: what turns inputs into hidden states, the blocks, and a head that ends in the
model's own output, with a loss where labels are given. Sequences are taken to be whole: a padding mask is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from argosy.errors import InputError, Problem


class Inputs(nn.Module):
    """Tokens or pixels to hidden states."""

    def __init__(
        self, embed: nn.Module, name: str, *, positions: nn.Module | None = None, drop: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.embed = embed
        self.positions = positions
        self.drop = drop
        self.name = name

    def forward(self, inputs: Tensor | None = None, **keywords: Any) -> Tensor:
        values = keywords.pop(self.name, inputs)
        keywords.pop("labels", None)
        given = [name for name, value in keywords.items() if value is not None and value is not False]
        if given or values is None:
            found = given[0] if given else f"no {self.name}"
            raise InputError([Problem(path="model", found=found, expected=f"only {self.name} and labels")])
        hidden: Tensor = self.embed(values)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(values.shape[1], device=values.device)[None])
        return hidden if self.drop is None else self.drop(hidden)


class Block(nn.Module):
    """One block; some give their result inside a tuple, some take the angles of rotary positions."""

    def __init__(self, block: nn.Module, *, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.block = block
        self.rotary = rotary

    def forward(self, hidden: Tensor) -> Tensor:
        keywords: dict[str, Any] = {}
        if self.rotary is not None:
            places = torch.arange(hidden.shape[1], device=hidden.device)[None]
            keywords = {"position_embeddings": self.rotary(hidden, places), "position_ids": places}
        result: Any = self.block(hidden, **keywords)
        first: Tensor = result[0] if isinstance(result, tuple) else result
        return first


class Head(nn.Module):
    """The last norm and the projection; called by ``finish`` alone, with what the model is called with."""

    def __init__(self, norm: nn.Module, project: nn.Module, model: nn.Module, *, pools: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.project = project
        self.pools = pools
        self.settings: Any = model.config
        self.loss: Any = model.loss_function

    def finish(self, hidden: Tensor, *_: Any, labels: Tensor | None = None, **__: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutput, ImageClassifierOutput

        hidden = self.norm(hidden)
        logits = self.project(hidden[:, 0] if self.pools else hidden)
        if self.pools:
            loss = None if labels is None else self.loss(labels, logits, self.settings)
            return ImageClassifierOutput(loss=loss, logits=logits)
        loss = None if labels is None else self.loss(logits, labels, vocab_size=self.settings.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


def _gpt2(model: Any) -> tuple[nn.Module, ...]:
    inside = model.transformer
    first = Inputs(inside.wte, "input_ids", positions=inside.wpe, drop=inside.drop)
    return (first, *map(Block, inside.h), Head(inside.ln_f, model.lm_head, model))


def _rotary(model: Any) -> tuple[nn.Module, ...]:
    inside = model.model
    blocks = [Block(block, rotary=inside.rotary_emb) for block in inside.layers]
    return (Inputs(inside.embed_tokens, "input_ids"), *blocks, Head(inside.norm, model.lm_head, model))


def _vit(model: Any) -> tuple[nn.Module, ...]:
    inside = model.vit
    blocks = inside.layers if hasattr(inside, "layers") else inside.encoder.layer
    head = Head(inside.layernorm, model.classifier, model, pools=True)
    return (Inputs(inside.embeddings, "pixel_values"), *map(Block, blocks), head)


FAMILIES: dict[str, Callable[[nn.Module], tuple[nn.Module, ...]]] = {
    "GPT2LMHeadModel": _gpt2,
    "LlamaForCausalLM": _rotary,
    "MistralForCausalLM": _rotary,
    "Qwen2ForCausalLM": _rotary,
    "Qwen3ForCausalLM": _rotary,
    "ViTForImageClassification": _vit,
}
"""By the name of the class."""


def check_attention(model: nn.Module) -> None:
    """Blocks are called without a mask, which only the fused attention takes to mean a causal one."""
    settings = getattr(model, "config", None)
    way = getattr(settings, "_attn_implementation", None)
    if type(model).__name__ in FAMILIES and way not in (None, "sdpa"):
        suggestion = 'build it with attn_implementation="sdpa"'
        problem = Problem(path="model", found=f"attention {way}", expected="sdpa", suggestion=suggestion)
        raise InputError([problem])
