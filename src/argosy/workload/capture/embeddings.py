"""Reject embeddings that a plan would train in another way than one process."""

from __future__ import annotations

from torch import nn

from argosy.errors import Problem, raise_any

# Arguments of an embedding that are refused, and the reason.
_REFUSED = {
    "max_norm": "no max_norm, which changes weights in a forward, on one replica only",
    "scale_grad_by_freq": "gradients that do not depend on how a plan divides the batch",
    "sparse": "dense gradients, which replicas can sum",
}


def check_embeddings(model: nn.Module) -> None:
    """Raise an ``InputError`` that names every embedding with an argument that is refused."""
    raise_any(
        Problem(name or "model", f"{type(module).__name__} with {argument}={value}", expected)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for argument, expected in _REFUSED.items()
        if (value := getattr(module, argument)) not in (None, False)
    )
