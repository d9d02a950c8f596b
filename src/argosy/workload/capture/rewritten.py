"""Rewrite functions of torch whose operations depend on more than what they compute.

(1)  bags of embeddings of equal lengths: as offsets they would depend on the order of samples,
     so they are looked up as rows and combined
(2)  a normalisation of every channel of every sample, which torch computes as that of a batch of
     one sample, is a normalisation of groups of one channel
(3)  attention, for which torch chooses an operation by device, dtype and its own version, is the
     kernel of CPUs, or matrix products if it is not four-dimensional or that kernel does not
     compute it: so a plan made on a CPU fits a run on GPUs

These are functions in Python: the operations that a trace shows are what they are made of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_attention = F.scaled_dot_product_attention


@contextmanager
def attention_as_on_cpus() -> Iterator[None]:
    """Apply (3) also to calls by functions of torch, such as that of nn.MultiheadAttention, which
    a mode does not see."""
    with patch.object(F, "scaled_dot_product_attention", attention):
        yield


def rewritten(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a call by (1) to (3); ``NotImplemented`` if it is to be called as it
    is."""
    if function is _attention:
        return attention(*args, **(kwargs or {}))
    if function not in _REWRITTEN:
        return NotImplemented
    bound = inspect.signature(function).bind(*args, **(kwargs or {}))
    bound.apply_defaults()
    return _REWRITTEN[function](bound.arguments)


def _embedding_bag(given: Mapping[str, Any]) -> Tensor:
    """Return the combined rows of every bag (1)."""
    changes_rows = given["max_norm"] is not None or given["padding_idx"] is not None
    if given["input"].dim() != 2 or changes_rows:
        return NotImplemented
    rows = F.embedding(
        given["input"], given["weight"], scale_grad_by_freq=given["scale_grad_by_freq"]
    )
    if given["per_sample_weights"] is not None:
        rows = rows * given["per_sample_weights"].unsqueeze(-1)
    match given["mode"]:
        case "sum":
            return rows.sum(1)
        case "mean":
            return rows.mean(1)
    return rows.max(1).values


def _instance_norm(given: Mapping[str, Any]) -> Tensor:
    """Return the normalised channels (2). A norm that keeps running averages, which are means over
    samples, is called as it is."""
    if given["running_mean"] is not None or not given["use_input_stats"]:
        return NotImplemented
    x = given["input"]
    return F.group_norm(x, x.shape[1], given["weight"], given["bias"], given["eps"])


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return attention by (3)."""
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (operand.to(dtype) for operand in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if dropout_p or not _kernel_takes(query, key, value, attn_mask, is_causal, enable_gqa):
        with sdpa_kernel(SDPBackend.MATH):
            return _attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        shown, hidden = (
            torch.scalar_tensor(n, dtype=query.dtype, device=device) for n in (0.0, -inf)
        )
        attn_mask = torch.where(attn_mask, shown, hidden)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


def _kernel_takes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """Return whether the kernel of CPUs computes this attention."""
    operands = (query, key, value)
    return (
        all(operand.dim() == 4 and operand.is_floating_point() for operand in operands)
        and len({operand.dtype for operand in operands}) == 1
        and len({operand.shape[-1] for operand in operands}) == 1
        and len({operand.shape[0] for operand in operands}) == 1
        and (enable_gqa or query.shape[1] == key.shape[1] == value.shape[1])
        and min(operand.numel() for operand in operands) > 0
        and not (is_causal and mask is not None)
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
    )


_REWRITTEN: dict[Any, Callable[[Mapping[str, Any]], Tensor]] = {
    F.embedding_bag: _embedding_bag,
    F.instance_norm: _instance_norm,
}
