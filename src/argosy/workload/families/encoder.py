"""Read models with an encoder: bert, roberta, vit, and t5 with its decoder.

These heads are counted: BERT's pooler, sentence-pair classifier and masked-language head, as in its
pre-training checkpoint; RoBERTa's masked-language head, without a pooler; ViT's classifier; T5's
language head.
"""

from __future__ import annotations

from typing import Any, ClassVar

from argosy.workload.architecture import (
    Architecture,
    Attention,
    Block,
    FeedForward,
    Head,
    Length,
    NormKind,
    PatchEmbedding,
    TokenEmbedding,
)
from argosy.workload.families.config import AtMost, Config, Divides
from argosy.workload.fields import Count, Depth, Natural, Share


class _Encoder(Config):
    """A base class for BERT and ViT, whose blocks have layer norms, biases, and attention over all
    tokens."""

    rules: ClassVar[tuple[Divides | AtMost, ...]] = (Divides("hidden_size", "num_attention_heads"),)

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Depth
    num_attention_heads: Count
    hidden_dropout_prob: Share = 0.1
    attention_probs_dropout_prob: Share = 0.1

    def encoder_blocks(self, *, pre_norm: bool, qkv_bias: bool = True) -> tuple[Block, ...]:
        attention = Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_attention_heads,
            head_dim=self.hidden_size // self.num_attention_heads,
            qkv_bias=qkv_bias,
            output_bias=True,
            dropout=self.attention_probs_dropout_prob > 0,
        )
        block = Block(
            attention=attention,
            feed_forward=FeedForward(inner=self.intermediate_size, bias=True),
            norm=NormKind.LAYER,
            pre_norm=pre_norm,
            dropout=self.hidden_dropout_prob > 0,
        )
        return (block,) * self.num_hidden_layers


class Bert(_Encoder):
    pooled_classes: ClassVar[int] = 2

    vocab_size: Count
    max_position_embeddings: Count = 512
    type_vocab_size: Natural = 2
    tie_word_embeddings: bool = True

    @property
    def context(self) -> int:
        return self.max_position_embeddings

    def architecture(self) -> Architecture:
        embedding = TokenEmbedding(
            vocabulary=self.vocab_size,
            width=self.hidden_size,
            position_rows=self.max_position_embeddings,
            token_types=self.type_vocab_size,
            norm=NormKind.LAYER,
            dropout=self.hidden_dropout_prob > 0,
        )
        head = Head(
            outputs=self.vocab_size,
            width=self.hidden_size,
            norm=None,
            tied=self.tie_word_embeddings,
            bias=True,
            transform=NormKind.LAYER,
            pooled_classes=self.pooled_classes,
        )
        return Architecture(
            hidden=self.hidden_size,
            embedding=embedding,
            blocks=self.encoder_blocks(pre_norm=False),
            head=head,
            context=self.context,
            length=Length.AT_MOST,
        )


class Roberta(Bert):
    """A RoBERTa config that counts positions from the padding token on, so that some rows are never
    used."""

    pooled_classes: ClassVar[int] = 0

    pad_token_id: Natural = 1

    @property
    def context(self) -> int:
        return max(1, self.max_position_embeddings - self.pad_token_id - 1)


class Vit(_Encoder):
    rules: ClassVar = (*_Encoder.rules, AtMost("patch_size", "image_size"))

    hidden_dropout_prob: Share = 0.0
    attention_probs_dropout_prob: Share = 0.0
    image_size: Count
    patch_size: Count
    num_channels: Count = 3
    qkv_bias: bool = True
    num_labels: Count | None = None
    id2label: dict[str, Any] | None = None

    @property
    def classes(self) -> int:
        """Return ``num_labels``, the length of ``id2label``, or the 2 that transformers assumes."""
        return self.num_labels or len(self.id2label or ()) or 2

    def architecture(self) -> Architecture:
        patches = (self.image_size // self.patch_size) ** 2
        embedding = PatchEmbedding(
            patches=patches,
            values=self.num_channels * self.patch_size**2,
            dropout=self.hidden_dropout_prob > 0,
        )
        head = Head(
            outputs=self.classes,
            width=self.hidden_size,
            norm=NormKind.LAYER,
            tied=False,
            bias=True,
            first_token_only=True,
        )
        return Architecture(
            hidden=self.hidden_size,
            embedding=embedding,
            blocks=self.encoder_blocks(pre_norm=True, qkv_bias=self.qkv_bias),
            head=head,
            context=patches + 1,
            length=Length.EXACTLY,
        )


class T5(Config):
    """A T5 config, which has relative positions in the first block of each side; the encoder's
    final norm is counted in its last block.

    ``tie_word_embeddings = false`` (from T5 1.1 on) means a head of its own, as in the published
    checkpoints.
    """

    vocab_size: Count
    d_model: Count
    d_kv: Count
    d_ff: Count
    num_layers: Depth
    num_heads: Count
    num_decoder_layers: Depth | None = None
    n_positions: Count = 512
    relative_attention_num_buckets: Count = 32
    feed_forward_proj: str = "relu"
    dropout_rate: Share = 0.1
    tie_word_embeddings: bool = True

    def attention(self, *, buckets: int = 0) -> Attention:
        return Attention(
            heads=self.num_heads,
            kv_heads=self.num_heads,
            head_dim=self.d_kv,
            relative_buckets=buckets,
            dropout=self.dropout_rate > 0,
        )

    def side(self, count: int, *, is_decoder: bool) -> tuple[Block, ...]:
        """Return the blocks of the encoder or the decoder."""
        feed_forward = FeedForward(
            inner=self.d_ff, gated=self.feed_forward_proj.startswith("gated")
        )
        return tuple(
            Block(
                attention=self.attention(
                    buckets=self.relative_attention_num_buckets if index == 0 else 0
                ),
                cross=self.attention() if is_decoder else None,
                feed_forward=feed_forward,
                norm=NormKind.RMS,
                num_norms=3 if is_decoder or index == count - 1 else 2,
                dropout=self.dropout_rate > 0,
            )
            for index in range(count)
        )

    def architecture(self) -> Architecture:
        return Architecture(
            hidden=self.d_model,
            embedding=TokenEmbedding(
                vocabulary=self.vocab_size, width=self.d_model, dropout=self.dropout_rate > 0
            ),
            encoder=self.side(self.num_layers, is_decoder=False),
            blocks=self.side(self.num_decoder_layers or self.num_layers, is_decoder=True),
            head=Head(
                outputs=self.vocab_size,
                width=self.d_model,
                norm=NormKind.RMS,
                tied=self.tie_word_embeddings,
            ),
            context=self.n_positions,
        )
