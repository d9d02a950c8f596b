"""Describe a transformer by the arguments of Megatron-LM, which FlagScale shares.

Values are numbers, text, or True for a flag. The arguments describe Megatron-LM's GPT: token and
position tables, blocks of causal attention and feed-forward with a norm before each, logits over
words. ``shape_has_words`` lists the parts of a shape that they cannot express.
"""

from __future__ import annotations

from collections.abc import Iterator

from argosy.cost.remembered import remembered
from argosy.dtype import Dtype
from argosy.exporters.form import Limit, limit
from argosy.plan.plan import ModelRef, Plan
from argosy.workload.architecture import (
    Architecture,
    Block,
    Experts,
    FeedForward,
    NormKind,
    Rotary,
    TokenEmbedding,
)

# The value of an argument.
Value = int | float | str | bool
# Names of the tanh form of GELU, and the activation functions that can be exported, gated and not.
_TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_GATED, _PLAIN = ("silu", "swish"), ("gelu", *_TANH_GELU)


def model_arguments(architecture: Architecture, model: ModelRef) -> dict[str, Value]:
    """Return the model's arguments; names have underscores, as in a YAML file, and not hyphens."""
    block = architecture.blocks[0]
    attention, part = block.attention, block.feed_forward
    inner = _inner(block)
    arguments: dict[str, Value] = {
        "num_layers": len(architecture.blocks),
        "hidden_size": architecture.hidden,
        "ffn_hidden_size": inner.inner,
        "num_attention_heads": attention.heads,
        "seq_length": model.sequence_length,
        "max_position_embeddings": max(architecture.context, model.sequence_length),
    }
    if attention.kv_heads != attention.heads:
        arguments |= {"group_query_attention": True, "num_query_groups": attention.kv_heads}
    if attention.query_width != architecture.hidden:
        arguments["kv_channels"] = attention.head_dim
    learned = (
        isinstance(architecture.embedding, TokenEmbedding)
        and architecture.embedding.position_rows > 0
    )
    arguments["position_embedding_type"] = "learned_absolute" if learned else "rope"
    arguments |= _rotary_arguments(architecture.rotary)
    arguments |= {
        "norm_epsilon": architecture.norm_epsilon,
        "vocab_size": architecture.head.outputs,
    }
    arguments["make_vocab_size_divisible_by"] = 1  # the plan's memory has no padding
    flags = {
        "swiglu": inner.gated,
        # The fused kernel is the tanh form of GELU, the other one the exact form.
        "no_bias_gelu_fusion": not inner.gated and architecture.activation not in _TANH_GELU,
        "disable_bias_linear": not inner.bias,
        "add_qkv_bias": attention.qkv_bias and not inner.bias,
        "qk_layernorm": attention.qk_norm != "none",
        "untie_embeddings_and_output_weights": not architecture.head.tied,
    }
    arguments |= {name: True for name, wanted in flags.items() if wanted}
    if block.norm is NormKind.RMS:
        arguments["normalization"] = "RMSNorm"
    if isinstance(part, Experts):
        arguments |= _expert_arguments(part, inner)
    arguments["hidden_dropout"] = 0.1 * block.dropout
    arguments["attention_dropout"] = 0.1 * attention.dropout
    window = _window(architecture, model)
    if window is not None:
        # The number of keys before a query and after it, besides its own.
        arguments["window_size"] = f"{window - 1},0"
    return arguments


def _expert_arguments(experts: Experts, inner: FeedForward) -> dict[str, Value]:
    """Return the arguments of a mixture of experts."""
    arguments: dict[str, Value] = {
        "num_experts": experts.count,
        "moe_router_topk": experts.active,
        "moe_ffn_hidden_size": inner.inner,
    }
    if not experts.normalized:
        arguments["moe_router_pre_softmax"] = True
    if experts.shared is not None:
        arguments["moe_shared_expert_intermediate_size"] = experts.shared.inner
        arguments["moe_shared_expert_gate"] = True
    return arguments


def _rotary_arguments(rotary: Rotary | None) -> dict[str, Value]:
    """Return the arguments of rotary position embeddings."""
    if rotary is None:
        return {}
    arguments: dict[str, Value] = {"rotary_base": round(rotary.base)}
    if rotary.share != 1:
        arguments["rotary_percent"] = rotary.share
    if rotary.scaling is not None:
        arguments |= {"use_rope_scaling": True, "rope_scaling_factor": rotary.scaling}
    return arguments


def _window(architecture: Architecture, model: ModelRef) -> int | None:
    """Return the attention window in tokens, if it is equal in all blocks and shorter than a
    sequence."""
    windows = {block.attention.window or model.sequence_length for block in architecture.blocks}
    narrowest = min(windows)
    return narrowest if len(windows) == 1 and narrowest < model.sequence_length else None


def shape_has_words(architecture: Architecture, model: ModelRef, target: str) -> Iterator[Limit]:
    """Yield the parts of a shape that the arguments cannot express."""
    block, head, embedding = architecture.blocks[0], architecture.head, architecture.embedding
    unsupported = {
        "images": not isinstance(embedding, TokenEmbedding),
        "a table of token types": isinstance(embedding, TokenEmbedding)
        and embedding.token_types > 0,
        "a norm of its embedding": isinstance(embedding, TokenEmbedding)
        and embedding.norm is not None,
        "a token table narrower than its blocks": head.width != architecture.hidden,
        "layers between its last block and the logits": head.transform is not None
        or head.pooled_classes > 0,
        "norms behind the residual sums": not block.pre_norm,
        "norms that learn nothing": block.norm is NormKind.PLAIN,
        f"{block.num_norms} norms in a block": block.num_norms > 2,
        "attention and feed-forward side by side": block.parallel,
        "a learned score beside the keys": block.attention.sinks,
        "latent attention": block.attention.latent is not None,
        "a bias of its router": isinstance(block.feed_forward, Experts)
        and block.feed_forward.router_bias,
    }
    for part in (part for part, is_present in unsupported.items() if is_present):
        expected = f"a model in the shape of {target}'s GPT"
        yield limit("model.name", f"{model.name} with {part}", expected, final=True)
    yield from _replaced_parts(architecture, model, target)


def _replaced_parts(architecture: Architecture, model: ModelRef, target: str) -> Iterator[Limit]:
    """Yield the parts of a shape in place of which something similar can be written."""
    block = architecture.blocks[0]
    windows = sorted(
        {block.attention.window or model.sequence_length for block in architecture.blocks}
    )
    if len(windows) > 1 and windows[0] < model.sequence_length:
        expected = f"one window for all blocks: none is written for {target}"
        yield limit("model.name", f"attention to {windows[0]} tokens in some blocks", expected)
    rotary = architecture.rotary
    if rotary is not None and (
        rotary.other_scaling is not None or rotary.base != round(rotary.base)
    ):
        actual = f"rotary positions with {rotary.other_scaling or 'a base of'} {rotary.base:g}"
        yield limit(
            "model.name",
            actual,
            f"a whole base, unscaled or by Llama 3.1's factor, which {target} has",
        )
    wanted = _GATED if _inner(block).gated else _PLAIN
    if architecture.activation not in wanted:
        expected = f"{' or '.join(wanted)}, which {target} has; {wanted[0]} is written"
        yield limit("model.name", f"the activation {architecture.activation}", expected)
    if block.attention.qk_norm == "all":
        actual = "one norm of the queries of all heads, and one of the keys"
        yield limit("model.name", actual, f"norms per head, which are written for {target}")
    if _biases(block) not in ((True, True, True), (True, False, False), (False, False, False)):
        names = ("queries, keys and values", "the attention's output", "the feed-forward")
        actual = " and ".join(name for name, has in zip(names, _biases(block), strict=True) if has)
        expected = (
            f"none, those of queries, keys and values, or all, which {target} has; what comes "
            "closest is written"
        )
        yield limit("model.name", f"biases of {actual}", expected)


def _biases(block: Block) -> tuple[bool, bool, bool]:
    """Return whether queries, keys and values, the attention's output, and the feed-forward have
    biases."""
    return block.attention.qkv_bias, block.attention.output_bias, _inner(block).bias


def _inner(block: Block) -> FeedForward:
    """Return the feed-forward, or that of an expert."""
    part = block.feed_forward
    return part if isinstance(part, FeedForward) else part.expert


def precision_arguments(plan: Plan) -> dict[str, Value]:
    """Return the dtype of weights, and that of gradients as the plan's cost model keeps them.

    The result is empty for fp32.
    """
    dtype = plan.model.dtype
    if dtype is Dtype.FP32:
        return {}
    arguments: dict[str, Value] = {str(dtype): True}
    if remembered(plan).calibration.gradient_dtype is Dtype.FP32:
        arguments["accumulate_allreduce_grads_in_fp32"] = True
    elif dtype is Dtype.BF16:
        arguments["grad_reduce_in_bf16"] = True
    return arguments
