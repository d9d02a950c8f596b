"""A transformer's shape in Megatron-LM's words, which FlagScale shares: numbers, text, or True for a flag.

The words are those of its GPT: token and position tables, blocks of causal attention and feed-forward with a norm
before each, logits over words. ``shape_has_words`` names what of a shape they cannot say. Which activation function a
model has is not part of a shape: gated ones are written as SwiGLU, others are left at the target's default.
"""

from __future__ import annotations

from collections.abc import Iterator

from argosy.dtype import Dtype
from argosy.export.form import Limit, limit
from argosy.plan.plan import Plan
from argosy.workload.architecture import Architecture, Block, Experts, FeedForward, NormKind, TokenEmbedding

Value = int | float | str | bool


def model_arguments(architecture: Architecture, plan: Plan) -> dict[str, Value]:
    """Names with underscores, as in a YAML file; a command line has hyphens."""
    block = architecture.blocks[0]
    attention, part = block.attention, block.feed_forward
    inner = _inner(block)
    found: dict[str, Value] = {
        "num_layers": len(architecture.blocks),
        "hidden_size": architecture.hidden,
        "ffn_hidden_size": inner.inner,
        "num_attention_heads": attention.heads,
        "seq_length": plan.model.sequence_length,
        "max_position_embeddings": max(architecture.context, plan.model.sequence_length),
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


def shape_has_words(architecture: Architecture, plan: Plan, target: str) -> Iterator[Limit]:
    """What of a shape the words above cannot say."""
    block, head, embedding = architecture.blocks[0], architecture.head, architecture.embedding
    other = {
        "images": not isinstance(embedding, TokenEmbedding),
        "a table of token types": isinstance(embedding, TokenEmbedding) and embedding.token_types > 0,
        "a norm of its embedding": isinstance(embedding, TokenEmbedding) and embedding.norm is not None,
        "a token table narrower than its blocks": head.width != architecture.hidden,
        "layers between its last block and the logits": head.transform is not None or head.pooled_classes > 0,
        "norms behind the residual sums": not block.pre_norm,
        "norms that learn nothing": block.norm is NormKind.PLAIN,
        f"{block.num_norms} norms in a block": block.num_norms > 2,
        "attention and feed-forward side by side": block.parallel,
    }
    for what in (what for what, is_so in other.items() if is_so):
        expected = f"a model in the shape of {target}'s GPT"
        yield limit("model.name", f"{plan.model.name} with {what}", expected, final=True)
    window = min(each.attention.window or plan.model.sequence_length for each in architecture.blocks)
    if window < plan.model.sequence_length:
        yield limit(
            "model.name", f"attention to {window} tokens", f"attention to all: no window is written for {target}"
        )
    if block.attention.qk_norm == "all":
        found = "one norm of the queries of all heads, and one of the keys"
        yield limit("model.name", found, f"norms per head, which are written for {target}")
    if _biases(block) not in ((True, True, True), (True, False, False), (False, False, False)):
        names = ("queries, keys and values", "the attention's output", "the feed-forward")
        found = " and ".join(name for name, has in zip(names, _biases(block), strict=True) if has)
        expected = f"none, those of queries, keys and values, or all, which {target} has; what comes closest is written"
        yield limit("model.name", f"biases of {found}", expected)


def _biases(block: Block) -> tuple[bool, bool, bool]:
    return block.attention.qkv_bias, block.attention.output_bias, _inner(block).bias


def _inner(block: Block) -> FeedForward:
    """The feed-forward, or that of an expert."""
    part = block.feed_forward
    return part if isinstance(part, FeedForward) else part.expert


def precision_arguments(dtype: Dtype) -> dict[str, Value]:
    """Nothing for fp32, which is the default."""
    return {str(dtype): True} if dtype in (Dtype.BF16, Dtype.FP16) else {}
