"""Divide BERT and T5 of Hugging Face into layers, using the models' own modules.

BERT's layers are its embeddings, its blocks, and a head: everything behind the encoder, computed by
the ``forward`` of the model's own class, so that every head and every loss of the family is there.

T5's layers are the embedding of the source, the encoder's blocks, the embedding of the target, the
decoder's blocks, and the head. The target's tokens pass the encoder's blocks, and the encoder's
result passes the decoder's. Only the first block of each half has weights for relative positions;
every block here reads them, so they are tied across stages.

Both families compute a mean over their targets and ignore ``num_items_in_batch``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from argosy.errors import invalid
from argosy.runtime.stages.huggingface import HuggingFaceBlock, Padding

# Arguments of BERT that its embeddings read.
_EMBEDDED = ("token_type_ids", "position_ids")
# Arguments of a model that only its head reads.
_HEAD = ("labels", "num_items_in_batch", "start_positions", "end_positions")


def _check_given(keywords: dict[str, Any], taken: tuple[str, ...]) -> None:
    """Raise an ``InputError`` for an argument that no layer takes."""
    for name, value in keywords.items():
        if name not in taken and value is not None and value is not False:
            raise invalid("model", name, f"only {', '.join(taken)} and labels")


class EncoderInputs(nn.Module):
    """A layer that runs the embeddings of BERT."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **keywords: Any
    ) -> tuple[Tensor, Tensor | None]:
        _check_given(keywords, (*_EMBEDDED, *_HEAD))
        embedded = {name: keywords.get(name) for name in _EMBEDDED}
        return self.embeddings(input_ids=input_ids, **embedded), attention_mask


class _Encoded(nn.Module):
    """A layer that takes the encoder's place inside the head: the encoder's result is its input."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, input_ids: None = None, *, inputs_embeds: Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)


class EncoderHead(nn.Module):
    """A layer that runs the model's own ``forward`` behind the encoder."""

    def __init__(self, model: Any, encoder: str) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, _Encoded(child.pooler) if name == encoder else child)
        self.config = model.config
        self.num_labels = getattr(model, "num_labels", None)
        self.compute: Callable[..., Any] = type(model).forward

    def finish(self, carry: tuple[Tensor, Tensor | None], *_: Any, **keywords: Any) -> Any:
        given = {name: keywords[name] for name in _HEAD if name in keywords}
        given.pop("num_items_in_batch", None)
        return self.compute(self, inputs_embeds=carry[0], **given)


def bert_layers(model: Any) -> tuple[nn.Module, ...]:
    """Return the layers of a BERT with any head."""
    padding = Padding(model.config, causal=model.config.is_decoder)
    blocks = [HuggingFaceBlock(block, padding=padding) for block in model.bert.encoder.layer]
    return (EncoderInputs(model.bert.embeddings), *blocks, EncoderHead(model, "bert"))


class SourceInputs(nn.Module):
    """A layer that embeds T5's source, and passes on the tokens of its target."""

    def __init__(self, stack: Any, shift: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.drop = stack.embed_tokens, stack.dropout
        self.shift = shift

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Tensor | None, ...]:
        _check_given(keywords, _HEAD)
        if decoder_input_ids is None:
            if labels is None:
                raise invalid("model", "no labels", "labels or decoder_input_ids")
            decoder_input_ids = self.shift(labels)
        hidden = self.drop(self.embed(input_ids))
        return hidden, attention_mask, decoder_input_ids, decoder_attention_mask


class RelativeBlock(nn.Module):
    """A layer that runs a block of T5 with the relative positions of its half."""

    def __init__(self, block: Any, first: Any, padding: Padding, cross: Padding | None) -> None:
        super().__init__()
        attention = first.layer[0].SelfAttention
        self.block, self.padding, self.cross = block, padding, cross
        self.relative_attention_bias = attention.relative_attention_bias
        self.compute_bias: Callable[..., Tensor] = type(attention).compute_bias
        self.settings = SimpleNamespace(
            is_decoder=attention.is_decoder,
            relative_attention_num_buckets=attention.relative_attention_num_buckets,
            relative_attention_max_distance=attention.relative_attention_max_distance,
            _relative_position_bucket=attention._relative_position_bucket,
        )

    def forward(self, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, padding, other, other_padding = carry
        length = hidden.shape[1]
        places = SimpleNamespace(
            **vars(self.settings), relative_attention_bias=self.relative_attention_bias
        )
        keywords: dict[str, Any] = {
            "attention_mask": self.padding.attention_mask(hidden, padding),
            "position_bias": self.compute_bias(places, length, length, device=hidden.device),
        }
        if self.cross is not None:
            mask = self.cross.attention_mask(hidden, other_padding, source=other)
            keywords |= {"encoder_hidden_states": other, "encoder_attention_mask": mask}
        return self.block(hidden, **keywords)[0], padding, other, other_padding


class TargetInputs(nn.Module):
    """A layer that ends T5's encoder and embeds the target."""

    def __init__(self, encoder: Any, decoder: Any) -> None:
        super().__init__()
        self.norm, self.drop = encoder.final_layer_norm, encoder.dropout
        self.embed, self.drop_target = decoder.embed_tokens, decoder.dropout

    def forward(self, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, padding, tokens, token_padding = carry
        encoded = self.drop(self.norm(hidden))
        return self.drop_target(self.embed(tokens)), token_padding, encoded, padding


class TargetHead(nn.Module):
    """A layer that ends T5's decoder and computes the loss of the target's tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.drop = model.decoder.final_layer_norm, model.decoder.dropout
        self.project = model.lm_head
        self.scale = model.model_dim**-0.5 if model.config.scale_decoder_outputs else 1.0

    def finish(
        self, carry: tuple[Any, ...], *_: Any, labels: Tensor | None = None, **__: Any
    ) -> Any:
        from transformers.modeling_outputs import Seq2SeqLMOutput

        hidden, _padding, encoded, _source = carry
        logits = self.project(self.drop(self.norm(hidden)) * self.scale)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Seq2SeqLMOutput(loss=loss, logits=logits, encoder_last_hidden_state=encoded)


def t5_layers(model: Any) -> tuple[nn.Module, ...]:
    """Return the layers of a T5."""
    encoder, decoder = model.encoder, model.decoder
    settings = SimpleNamespace(config=model.config)

    def shift(labels: Tensor) -> Tensor:
        return shift_right(settings, labels)

    shift_right = type(model)._shift_right
    padding = Padding(encoder.config, causal=False)
    causal = Padding(decoder.config)
    cross = Padding(decoder.config, causal=False)
    return (
        SourceInputs(encoder, shift),
        *(RelativeBlock(block, encoder.block[0], padding, None) for block in encoder.block),
        TargetInputs(encoder, decoder),
        *(RelativeBlock(block, decoder.block[0], causal, cross) for block in decoder.block),
        TargetHead(model),
    )
