"""A transformer's shape in Megatron-LM's words, which FlagScale shares: numbers, text, or True for a flag."""

from __future__ import annotations

from argosy.dtype import Dtype
from argosy.plan.plan import Plan
from argosy.workload.architecture import Architecture, Experts, FeedForward, NormKind, TokenEmbedding

Value = int | float | str | bool


def model_arguments(architecture: Architecture, plan: Plan) -> dict[str, Value]:
    """Names with underscores, as in a YAML file; a command line has hyphens."""
    block = architecture.blocks[0]
    attention, part = block.attention, block.feed_forward
    inner = part if isinstance(part, FeedForward) else part.expert
    found: dict[str, Value] = {
        "num_layers": len(architecture.blocks),
        "hidden_size": architecture.hidden,
        "ffn_hidden_size": inner.inner,
        "num_attention_heads": attention.heads,
        "seq_length": plan.model.sequence_length,
        "max_position_embeddings": architecture.context,
    }
    if attention.kv_heads != attention.heads:
        found |= {"group_query_attention": True, "num_query_groups": attention.kv_heads}
    if attention.query_width != architecture.hidden:
        found["kv_channels"] = attention.head_dim
    learned = isinstance(architecture.embedding, TokenEmbedding) and architecture.embedding.position_rows > 0
    found["position_embedding_type"] = "learned_absolute" if learned else "rope"
    flags = {
        "swiglu": inner.gated,
        "disable_bias_linear": not inner.bias,
        "add_qkv_bias": attention.qkv_bias and not inner.bias,
        "qk_layernorm": attention.qk_norm != "none",
        "untie_embeddings_and_output_weights": not architecture.head.tied,
    }
    found |= {name: True for name, wanted in flags.items() if wanted}
    if block.norm is NormKind.RMS:
        found["normalization"] = "RMSNorm"
    if isinstance(part, Experts):
        found |= {"num_experts": part.count, "moe_router_topk": part.active, "moe_ffn_hidden_size": inner.inner}
        if part.shared is not None:
            found |= {"moe_shared_expert_intermediate_size": part.shared.inner, "moe_shared_expert_gate": True}
    found |= {"hidden_dropout": 0.1 * block.dropout, "attention_dropout": 0.1 * attention.dropout}
    return found


def precision_arguments(dtype: Dtype) -> dict[str, Value]:
    """Nothing for fp32, which is the default."""
    return {str(dtype): True} if dtype in (Dtype.BF16, Dtype.FP16) else {}
