"""Rewrite functions of torch that mix samples in how they compute, not in what they compute.

(1)  bags of embeddings of equal lengths: as offsets they would depend on the order of samples,
     so they are looked up as rows and combined
(2)  a normalisation of every channel of every sample, which torch computes as that of a batch of
     one sample, is a normalisation of groups of one channel

These are functions in Python: the operations that a trace shows are what they are made of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def rewritten(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a call by (1) or (2); ``NotImplemented`` if it is to be called as it
    is."""
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


_REWRITTEN: dict[Any, Callable[[Mapping[str, Any]], Tensor]] = {
    F.embedding_bag: _embedding_bag,
    F.instance_norm: _instance_norm,
}
