"""Read configs of DeepSeek-V3: latent attention, shared and routed experts after dense blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import AliasChoices, Field

from argosy.workload.architecture import Attention, Experts, FeedForward, Latent
from argosy.workload.families.config import AtMost
from argosy.workload.families.rotary import RotaryDecoder
from argosy.workload.fields import Count, Natural


class DeepseekV3(RotaryDecoder):
    """Return the model without the modules that predict tokens beyond the next one.

    A head's query and key have ``qk_nope_head_dim`` elements and ``qk_rope_head_dim`` rotary ones.
    Keys that choose experts (groups, sigmoid scores, scaling) change no size and are not read.
    """

    rules: ClassVar = (AtMost("num_experts_per_tok", "n_routed_experts"),)

    max_position_embeddings: Count = 4096
    attention_bias: bool = False
    q_lora_rank: Count | None = 1536
    kv_lora_rank: Count = 512
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count = 128
    first_k_dense_replace: Natural = 3
    n_routed_experts: Count = Field(
        default=256, validation_alias=AliasChoices("n_routed_experts", "num_local_experts")
    )
    n_shared_experts: Natural = 1
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 2048
    norm_topk_prob: bool = True

    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, False

    def attention(self, index: int) -> Attention:
        latent = Latent(
            query_rank=self.q_lora_rank,
            key_value_rank=self.kv_lora_rank,
            rotary_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
        )
        return replace(
            super().attention(index),
            kv_heads=self.num_attention_heads,
            head_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            latent=latent,
        )

    def feed_forward(self, index: int) -> FeedForward | Experts:
        if index < self.first_k_dense_replace:
            return super().feed_forward(index)
        shared_width = self.n_shared_experts * self.moe_intermediate_size
        return Experts(
            expert=FeedForward(inner=self.moe_intermediate_size, gated=True),
            count=self.n_routed_experts,
            active=self.num_experts_per_tok,
            shared=FeedForward(inner=shared_width, gated=True) if shared_width else None,
            shared_gate=False,
            normalized=self.norm_topk_prob,
        )
