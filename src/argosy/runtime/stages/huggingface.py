"""Divide families of Hugging Face models into layers, using the models' own modules.

Each family has three kinds of layer: one that turns inputs into hidden states, the blocks, and a
head that returns the model's own output, with a loss if labels are given. A padding mask is passed
from layer to layer beside the hidden states, and blocks get the attention mask that the model
itself would make from it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from argosy.errors import invalid

Hidden = Tensor | tuple[Tensor, Tensor | None]
"""Hidden states, or a pair of these and the padding mask of their sequences."""


class Inputs(nn.Module):
    """A layer that turns tokens or pixels into hidden states."""

    def __init__(
        self,
        embed: nn.Module,
        name: str,
        *,
        positions: nn.Module | None = None,
        drop: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embed = embed
        self.positions = positions
        self.drop = drop
        self.name = name

    def forward(self, inputs: Tensor | None = None, **keywords: Any) -> Hidden:
        values = keywords.pop(self.name, inputs)
        for head_keyword in ("labels", "num_items_in_batch"):
            keywords.pop(head_keyword, None)
        padding = keywords.pop("attention_mask", None) if self.name == "input_ids" else None
        given = [
            name for name, value in keywords.items() if value is not None and value is not False
        ]
        if given or values is None:
            actual = given[0] if given else f"no {self.name}"
            taken = "input_ids, attention_mask" if self.name == "input_ids" else self.name
            raise invalid("model", actual, f"only {taken} and labels")
        hidden: Tensor = self.embed(values)
        if self.positions is not None:
            hidden = hidden + self.positions(
                torch.arange(values.shape[1], device=values.device)[None]
            )
        hidden = hidden if self.drop is None else self.drop(hidden)
        return hidden if padding is None else (hidden, padding)


class Padding:
    """An attention mask that a model uses for padded sequences, computed once for all blocks of a
    stage."""

    def __init__(self, settings: Any, *, causal: bool = True) -> None:
        self.settings = settings
        self.causal = causal
        self.known: tuple[Tensor, Tensor | None] | None = None
        """A padding mask, and the attention mask made from it."""

    def attention_mask(
        self, hidden: Tensor, padding: Tensor | None, *, source: Tensor | None = None
    ) -> Tensor | None:
        """Return the mask of hidden states that attend to themselves, or to a ``source``."""
        if padding is None:
            return self._made(hidden, None, source)
        if self.known is None or self.known[0] is not padding:
            self.known = (padding, self._made(hidden, padding, source))
        return self.known[1]

    def check_window(self, hidden: Tensor) -> None:
        """Raise an ``InputError`` if sequences are longer than the model's sliding window, since
        blocks attend to all earlier tokens."""
        window = getattr(self.settings, "sliding_window", None)
        if window is not None and hidden.shape[1] > window:
            actual = f"sequences of {hidden.shape[1]} tokens"
            raise invalid("model", actual, f"at most its sliding window of {window}")

    def _made(self, hidden: Tensor, padding: Tensor | None, source: Tensor | None) -> Tensor | None:
        from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

        places = torch.arange(hidden.shape[1], device=hidden.device)
        create: Any = create_causal_mask if self.causal else create_bidirectional_mask
        known = inspect.signature(create).parameters
        given: dict[str, Any] = {
            "config": self.settings,
            "inputs_embeds": hidden,
            "input_embeds": hidden,
            "attention_mask": padding,
            "cache_position": places,
            "past_key_values": None,
            "position_ids": places[None],
            "encoder_hidden_states": source,
        }
        made: Any = create(**{name: value for name, value in given.items() if name in known})
        assert made is None or isinstance(made, Tensor), "sdpa takes a tensor"
        return made


class HuggingFaceBlock(nn.Module):
    """A layer that runs one block; some blocks return their result inside a tuple, some take
    rotary position embeddings."""

    def __init__(
        self, block: nn.Module, *, rotary: nn.Module | None = None, padding: Padding | None = None
    ) -> None:
        super().__init__()
        self.block = block
        self.rotary = rotary
        self.padding = padding

    def forward(self, carry: Hidden) -> Hidden:
        hidden = carry if isinstance(carry, Tensor) else carry[0]
        if self.padding is not None:
            self.padding.check_window(hidden)
        if isinstance(carry, Tensor):
            return self._run(hidden, {})
        padding = carry[1]
        assert self.padding is not None, "models of pixels have no padding"
        return self._run(
            hidden, {"attention_mask": self.padding.attention_mask(hidden, padding)}
        ), padding

    def _run(self, hidden: Tensor, keywords: dict[str, Any]) -> Tensor:
        if self.rotary is not None:
            places = torch.arange(hidden.shape[1], device=hidden.device)[None]
            keywords |= {"position_embeddings": self.rotary(hidden, places), "position_ids": places}
        result: Any = self.block(hidden, **keywords)
        return result[0] if isinstance(result, tuple) else result


class HuggingFaceHead(nn.Module):
    """A layer that runs the last norm and the projection; only its ``finish`` is called, with the
    arguments of the model."""

    def __init__(
        self, norm: nn.Module, project: nn.Module, model: nn.Module, *, pools: bool = False
    ) -> None:
        super().__init__()
        self.norm = norm
        self.project = project
        self.pools = pools
        self.settings: Any = model.config
        self.loss: Any = model.loss_function

    def finish(
        self,
        carry: Hidden,
        *_: Any,
        labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **__: Any,
    ) -> Any:
        from transformers.modeling_outputs import CausalLMOutput, ImageClassifierOutput

        hidden = self.norm(carry if isinstance(carry, Tensor) else carry[0])
        logits = self.project(hidden[:, 0] if self.pools else hidden)
        loss = None
        counted = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        if self.pools:
            if labels is not None:
                loss = self.loss(labels, logits, self.settings, **counted)
            return ImageClassifierOutput(loss=loss, logits=logits)
        if labels is not None:
            loss = self.loss(logits, labels, vocab_size=self.settings.vocab_size, **counted)
        return CausalLMOutput(loss=loss, logits=logits)


def gpt2_layers(model: Any) -> tuple[nn.Module, ...]:
    """Return the layers of a GPT-2."""
    inside = model.transformer
    first = Inputs(inside.wte, "input_ids", positions=inside.wpe, drop=inside.drop)
    padding = Padding(model.config)
    blocks = [HuggingFaceBlock(block, padding=padding) for block in inside.h]
    return (first, *blocks, HuggingFaceHead(inside.ln_f, model.lm_head, model))


def rotary_layers(model: Any) -> tuple[nn.Module, ...]:
    """Return the layers of a causal model with rotary position embeddings."""
    inside = model.model
    padding = Padding(model.config)
    blocks = [
        HuggingFaceBlock(block, rotary=inside.rotary_emb, padding=padding)
        for block in inside.layers
    ]
    return (
        Inputs(inside.embed_tokens, "input_ids"),
        *blocks,
        HuggingFaceHead(inside.norm, model.lm_head, model),
    )


def vit_layers(model: Any) -> tuple[nn.Module, ...]:
    """Return the layers of a ViT that classifies images."""
    inside = model.vit
    blocks = inside.layers if hasattr(inside, "layers") else inside.encoder.layer
    head = HuggingFaceHead(inside.layernorm, model.classifier, model, pools=True)
    return (Inputs(inside.embeddings, "pixel_values"), *map(HuggingFaceBlock, blocks), head)


def check_settings(model: nn.Module) -> None:
    """Raise an ``InputError`` if a model's attention is not sdpa, since blocks are called without a
    mask, which only sdpa treats as causal; or if its loss contains what routers return."""
    settings = getattr(model, "config", None)
    way = getattr(settings, "_attn_implementation", None)
    if way not in (None, "sdpa"):
        suggestion = 'build it with attn_implementation="sdpa"'
        raise invalid("model", f"attention {way}", "sdpa", suggestion=suggestion)
    if getattr(settings, "output_router_logits", False):
        actual = "output_router_logits=True, which adds a loss of the routers"
        raise invalid("model", actual, "output_router_logits=False to train by layers")
