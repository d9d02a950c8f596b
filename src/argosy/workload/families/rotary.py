"""Read decoders with rotary positions: llama, mistral, qwen, gemma, phi3, gpt-oss, and mixtures of
experts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import AliasChoices, Field

from argosy.workload.architecture import (
    Architecture,
    Attention,
    Block,
    Experts,
    FeedForward,
    Head,
    NormKind,
    TokenEmbedding,
)
from argosy.workload.families.config import AtMost, Config, Divides, RotaryScaling
from argosy.workload.fields import Amount, Count, Depth, Name, Natural, Share

# Rules of all these models.
_SHAPE = (
    Divides("hidden_size", "num_attention_heads", unless="head_dim"),
    Divides("num_attention_heads", "num_key_value_heads"),
)


class RotaryDecoder(Config):
    """A base class for decoders that have root-mean-square norms, gated feed-forward and no biases;
    subclasses state what differs."""

    rules: ClassVar[tuple[Divides | AtMost, ...]] = _SHAPE
    num_norms: ClassVar[int] = 2
    qk_norm: ClassVar[Literal["none", "head", "all"]] = "none"

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Depth
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count = 2048
    tie_word_embeddings: bool = False
    attention_dropout: Share = 0.0
    sliding_window: Natural | None = None
    layer_types: list[str] | None = None
    rope_theta: Amount = 10_000.0
    rope_scaling: RotaryScaling | None = Field(
        default=None, validation_alias=AliasChoices("rope_scaling", "rope_parameters")
    )
    partial_rotary_factor: Share = 1.0
    rms_norm_eps: Amount = 1e-6
    hidden_act: Name = "silu"

    def slides(self, index: int) -> bool:
        """Return whether block ``index`` uses ``sliding_window`` if ``layer_types`` does not state
        it."""
        return True

    def biases(self) -> tuple[bool, bool, bool]:
        """Return whether there are biases on queries, keys and values; on the attention's output;
        in the feed-forward."""
        return False, False, False

    def feed_forward(self, index: int) -> FeedForward | Experts:
        return FeedForward(inner=self.intermediate_size, gated=True, bias=self.biases()[2])

    def window(self, index: int) -> int | None:
        types = self.layer_types or []
        slides = types[index] == "sliding_attention" if index < len(types) else self.slides(index)
        return self.sliding_window or None if slides else None

    def attention(self, index: int) -> Attention:
        qkv_bias, output_bias, _ = self.biases()
        return Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=self.qk_norm,
            window=self.window(index),
            dropout=self.attention_dropout > 0,
        )

    def architecture(self) -> Architecture:
        blocks = tuple(
            Block(
                attention=self.attention(index),
                feed_forward=self.feed_forward(index),
                norm=NormKind.RMS,
                num_norms=self.num_norms,
            )
            for index in range(self.num_hidden_layers)
        )
        head = Head(
            outputs=self.vocab_size,
            width=self.hidden_size,
            norm=NormKind.RMS,
            tied=self.tie_word_embeddings,
        )
        return Architecture(
            hidden=self.hidden_size,
            embedding=TokenEmbedding(vocabulary=self.vocab_size, width=self.hidden_size),
            blocks=blocks,
            head=head,
            context=self.max_position_embeddings,
            rotary=(self.rope_scaling or RotaryScaling()).rotary(
                self.rope_theta, self.partial_rotary_factor
            ),
            norm_epsilon=self.rms_norm_eps,
            activation=self.hidden_act,
        )


class Llama(RotaryDecoder):
    attention_bias: bool = False
    mlp_bias: bool = False

    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, self.mlp_bias


class Mistral(RotaryDecoder):
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131072
    sliding_window: Natural | None = 4096


class Phi3(RotaryDecoder):
    max_position_embeddings: Count = 4096
    rms_norm_eps: Amount = 1e-5


class Gemma(RotaryDecoder):
    num_key_value_heads: Count | None = 16
    head_dim: Count | None = 256
    max_position_embeddings: Count = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    hidden_act: Name = Field(
        default="gelu_pytorch_tanh",
        validation_alias=AliasChoices("hidden_activation", "hidden_act"),
    )

    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, False


class Gemma2(Gemma):
    num_norms: ClassVar[int] = 4

    num_key_value_heads: Count | None = 4
    sliding_window: Natural | None = 4096

    def slides(self, index: int) -> bool:
        return index % 2 == 0


class Gemma3(Gemma2):
    """A Gemma 3 config, which has norms on queries and keys; five of six blocks use a window."""

    qk_norm: ClassVar[Literal["none", "head", "all"]] = "head"

    max_position_embeddings: Count = 131072
    sliding_window_pattern: Count = 6

    def slides(self, index: int) -> bool:
        return (index + 1) % self.sliding_window_pattern != 0


class GptOss(RotaryDecoder):
    """A gpt-oss config, which has biases everywhere, a learned sink per head and experts in every
    block; every second block uses a window."""

    rules: ClassVar = (*_SHAPE, AtMost("num_experts_per_tok", "num_local_experts"))

    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 64
    max_position_embeddings: Count = 131072
    sliding_window: Natural | None = 128
    attention_bias: bool = True
    num_local_experts: Count = Field(
        default=128, validation_alias=AliasChoices("num_local_experts", "num_experts")
    )
    num_experts_per_tok: Count = 4

    def slides(self, index: int) -> bool:
        return index % 2 == 0

    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, True

    def attention(self, index: int) -> Attention:
        return replace(super().attention(index), sinks=True)

    def feed_forward(self, index: int) -> FeedForward | Experts:
        expert = FeedForward(inner=self.intermediate_size, gated=True, bias=True)
        return Experts(
            expert=expert,
            count=self.num_local_experts,
            active=self.num_experts_per_tok,
            router_bias=True,
        )


class Qwen2(RotaryDecoder):
    """A Qwen2 config with biases on queries, keys and values, which no key of the config names."""

    num_key_value_heads: Count | None = 32
    max_position_embeddings: Count = 32768
    use_sliding_window: bool = False
    sliding_window: Natural | None = 4096
    max_window_layers: Natural = 28

    def slides(self, index: int) -> bool:
        return self.use_sliding_window and index >= self.max_window_layers

    def biases(self) -> tuple[bool, bool, bool]:
        return True, False, False


class Qwen3(Qwen2):
    """A Qwen3 config with norms on queries and keys, per head, which no key of the config names."""

    qk_norm: ClassVar[Literal["none", "head", "all"]] = "head"

    head_dim: Count | None = 128
    attention_bias: bool = False

    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, False


class Mixtral(Mistral):
    rules: ClassVar = (*_SHAPE, AtMost("num_experts_per_tok", "num_local_experts"))

    sliding_window: Natural | None = None
    rope_theta: Amount = 1_000_000.0
    rms_norm_eps: Amount = 1e-5
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2

    def feed_forward(self, index: int) -> FeedForward | Experts:
        expert = FeedForward(inner=self.intermediate_size, gated=True)
        return Experts(expert=expert, count=self.num_local_experts, active=self.num_experts_per_tok)


class Olmoe(RotaryDecoder):
    rules: ClassVar = (*_SHAPE, AtMost("num_experts_per_tok", "num_experts"))
    qk_norm: ClassVar[Literal["none", "head", "all"]] = "all"

    max_position_embeddings: Count = 4096
    rms_norm_eps: Amount = 1e-5
    attention_bias: bool = False
    num_experts: Count = 64
    num_experts_per_tok: Count = 8
    norm_topk_prob: bool = False

    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, False

    def feed_forward(self, index: int) -> FeedForward | Experts:
        expert = FeedForward(inner=self.intermediate_size, gated=True)
        return Experts(
            expert=expert,
            count=self.num_experts,
            active=self.num_experts_per_tok,
            normalized=self.norm_topk_prob,
        )


class QwenMoe(RotaryDecoder):
    """A base class for Qwen models with experts in every ``decoder_sparse_step``-th block that
    ``mlp_only_layers`` does not name."""

    rules: ClassVar = (*_SHAPE, AtMost("num_experts_per_tok", "num_experts"))

    max_position_embeddings: Count = 32768
    num_experts: Count = Field(
        default=128, validation_alias=AliasChoices("num_experts", "num_local_experts")
    )
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None
    use_sliding_window: bool = False

    def slides(self, index: int) -> bool:
        return self.use_sliding_window

    def shared_expert(self) -> FeedForward | None:
        return None

    def feed_forward(self, index: int) -> FeedForward | Experts:
        if index in (self.mlp_only_layers or ()) or (index + 1) % self.decoder_sparse_step:
            return super().feed_forward(index)
        return Experts(
            expert=FeedForward(inner=self.moe_intermediate_size, gated=True),
            count=self.num_experts,
            active=self.num_experts_per_tok,
            shared=self.shared_expert(),
            normalized=self.norm_topk_prob,
        )


class Qwen2Moe(QwenMoe):
    num_key_value_heads: Count | None = 16
    num_experts: Count = Field(
        default=60, validation_alias=AliasChoices("num_experts", "num_local_experts")
    )
    num_experts_per_tok: Count = 4
    moe_intermediate_size: Count = 1408
    shared_expert_intermediate_size: Count = 5632
    qkv_bias: bool = True

    def biases(self) -> tuple[bool, bool, bool]:
        return self.qkv_bias, False, False

    def shared_expert(self) -> FeedForward | None:
        return FeedForward(inner=self.shared_expert_intermediate_size, gated=True)


class Qwen3Moe(QwenMoe):
    qk_norm: ClassVar[Literal["none", "head", "all"]] = "head"

    num_key_value_heads: Count | None = 4
    attention_bias: bool = False

    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, False
