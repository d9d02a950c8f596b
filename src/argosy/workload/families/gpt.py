"""Read decoders with layer norms and biases: gpt2, gpt_neo, gpt_neox, opt."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AliasChoices, Field, Strict

from argosy.workload.architecture import (
    Architecture,
    Attention,
    Block,
    FeedForward,
    Head,
    Length,
    NormKind,
    TokenEmbedding,
)
from argosy.workload.families.config import Config, Divides, RotaryScaling
from argosy.workload.fields import Amount, Count, Depth, Name, Share


class Gpt2(Config):
    rules: ClassVar = (Divides("n_embd", "n_head"),)

    vocab_size: Count
    n_positions: Count
    n_embd: Count
    n_layer: Depth
    n_head: Count
    n_inner: Count | None = None
    resid_pdrop: Share = 0.1
    embd_pdrop: Share = 0.1
    attn_pdrop: Share = 0.1
    layer_norm_epsilon: Amount = 1e-5
    activation_function: Name = "gelu_new"
    tie_word_embeddings: bool = True

    def architecture(self) -> Architecture:
        attention = Attention(
            heads=self.n_head,
            kv_heads=self.n_head,
            head_dim=self.n_embd // self.n_head,
            qkv_bias=True,
            output_bias=True,
            dropout=self.attn_pdrop > 0,
        )
        block = Block(
            attention=attention,
            feed_forward=FeedForward(inner=self.n_inner or 4 * self.n_embd, bias=True),
            norm=NormKind.LAYER,
            dropout=self.resid_pdrop > 0,
        )
        embedding = TokenEmbedding(
            vocabulary=self.vocab_size,
            width=self.n_embd,
            position_rows=self.n_positions,
            dropout=self.embd_pdrop > 0,
        )
        return Architecture(
            hidden=self.n_embd,
            embedding=embedding,
            blocks=(block,) * self.n_layer,
            head=Head(
                outputs=self.vocab_size,
                width=self.n_embd,
                norm=NormKind.LAYER,
                tied=self.tie_word_embeddings,
            ),
            context=self.n_positions,
            length=Length.AT_MOST,
            norm_epsilon=self.layer_norm_epsilon,
            activation=self.activation_function,
        )


class GptNeo(Config):
    """A GPT-Neo config, which is like GPT-2 without query, key and value biases; blocks alternate
    between all keys and a window."""

    rules: ClassVar = (Divides("hidden_size", "num_heads"),)

    vocab_size: Count
    hidden_size: Count
    num_layers: Depth
    num_heads: Count
    max_position_embeddings: Count = 2048
    intermediate_size: Count | None = None
    window_size: Count = 256
    attention_types: list[Annotated[tuple[list[str], Depth], Strict(False)]] | None = None
    resid_dropout: Share = 0.0
    embed_dropout: Share = 0.0
    attention_dropout: Share = 0.0
    layer_norm_epsilon: Amount = 1e-5
    activation_function: Name = "gelu_new"
    tie_word_embeddings: bool = True

    def window(self, index: int) -> int | None:
        types = [name for names, times in self.attention_types or [] for name in names * times]
        name = types[index] if index < len(types) else ("global", "local")[index % 2]
        return self.window_size if name == "local" else None

    def block(self, index: int) -> Block:
        attention = Attention(
            heads=self.num_heads,
            kv_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads,
            output_bias=True,
            window=self.window(index),
            dropout=self.attention_dropout > 0,
        )
        return Block(
            attention=attention,
            feed_forward=FeedForward(
                inner=self.intermediate_size or 4 * self.hidden_size, bias=True
            ),
            norm=NormKind.LAYER,
            dropout=self.resid_dropout > 0,
        )

    def architecture(self) -> Architecture:
        embedding = TokenEmbedding(
            vocabulary=self.vocab_size,
            width=self.hidden_size,
            position_rows=self.max_position_embeddings,
            dropout=self.embed_dropout > 0,
        )
        head = Head(
            outputs=self.vocab_size,
            width=self.hidden_size,
            norm=NormKind.LAYER,
            tied=self.tie_word_embeddings,
        )
        return Architecture(
            hidden=self.hidden_size,
            embedding=embedding,
            blocks=tuple(self.block(index) for index in range(self.num_layers)),
            head=head,
            context=self.max_position_embeddings,
            length=Length.AT_MOST,
            norm_epsilon=self.layer_norm_epsilon,
            activation=self.activation_function,
        )


class GptNeox(Config):
    """A GPT-NeoX config, which has rotary positions; attention and feed-forward are parallel unless
    ``use_parallel_residual`` is false."""

    rules: ClassVar = (Divides("hidden_size", "num_attention_heads"),)

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Depth
    num_attention_heads: Count
    max_position_embeddings: Count = 2048
    attention_bias: bool = True
    use_parallel_residual: bool = True
    attention_dropout: Share = 0.0
    hidden_dropout: Share = 0.0
    rotary_pct: Amount = 0.25
    rotary_emb_base: Amount = Field(
        10_000.0, validation_alias=AliasChoices("rotary_emb_base", "rope_theta")
    )
    rope_scaling: RotaryScaling | None = Field(
        None, validation_alias=AliasChoices("rope_scaling", "rope_parameters")
    )
    layer_norm_eps: Amount = 1e-5
    hidden_act: Name = "gelu"
    tie_word_embeddings: bool = False

    def architecture(self) -> Architecture:
        attention = Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_attention_heads,
            head_dim=self.hidden_size // self.num_attention_heads,
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            dropout=self.attention_dropout > 0,
        )
        block = Block(
            attention=attention,
            feed_forward=FeedForward(inner=self.intermediate_size, bias=True),
            norm=NormKind.LAYER,
            parallel=self.use_parallel_residual,
            dropout=self.hidden_dropout > 0,
        )
        head = Head(
            outputs=self.vocab_size,
            width=self.hidden_size,
            norm=NormKind.LAYER,
            tied=self.tie_word_embeddings,
        )
        return Architecture(
            hidden=self.hidden_size,
            embedding=TokenEmbedding(
                vocabulary=self.vocab_size, width=self.hidden_size, dropout=self.hidden_dropout > 0
            ),
            blocks=(block,) * self.num_hidden_layers,
            head=head,
            context=self.max_position_embeddings,
            rotary=(self.rope_scaling or RotaryScaling()).rotary(
                self.rotary_emb_base, self.rotary_pct
            ),
            norm_epsilon=self.layer_norm_eps,
            activation=self.hidden_act,
        )


class Opt(Config):
    """An OPT config, which has two rows more than positions; OPT-350m projects a narrow token table
    and has norms after the sums."""

    rules: ClassVar = (Divides("hidden_size", "num_attention_heads"),)

    vocab_size: Count
    hidden_size: Count
    ffn_dim: Count
    num_hidden_layers: Depth
    num_attention_heads: Count
    max_position_embeddings: Count = 2048
    word_embed_proj_dim: Count | None = None
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = Field(
        default=False, validation_alias="_remove_final_layer_norm"
    )
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    dropout: Share = 0.1
    attention_dropout: Share = 0.0
    activation_function: Name = "relu"
    tie_word_embeddings: bool = True

    def block(self, norm: NormKind) -> Block:
        attention = Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_attention_heads,
            head_dim=self.hidden_size // self.num_attention_heads,
            qkv_bias=self.enable_bias,
            output_bias=self.enable_bias,
            dropout=self.attention_dropout > 0,
        )
        return Block(
            attention=attention,
            feed_forward=FeedForward(inner=self.ffn_dim, bias=self.enable_bias),
            norm=norm,
            pre_norm=self.do_layer_norm_before,
            dropout=self.dropout > 0,
        )

    def architecture(self) -> Architecture:
        norm = NormKind.LAYER if self.layer_norm_elementwise_affine else NormKind.PLAIN
        width = self.word_embed_proj_dim or self.hidden_size
        has_final_norm = self.do_layer_norm_before and not self.remove_final_layer_norm
        embedding = TokenEmbedding(
            vocabulary=self.vocab_size,
            width=width,
            position_rows=self.max_position_embeddings + 2,
            dropout=False,
        )
        head = Head(
            outputs=self.vocab_size,
            width=width,
            norm=norm if has_final_norm else None,
            tied=self.tie_word_embeddings,
        )
        return Architecture(
            hidden=self.hidden_size,
            embedding=embedding,
            blocks=(self.block(norm),) * self.num_hidden_layers,
            head=head,
            context=self.max_position_embeddings,
            length=Length.AT_MOST,
            activation=self.activation_function,
        )
