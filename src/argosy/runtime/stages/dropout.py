"""Draw dropout masks that depend on seed, step, layer and sample and on nothing else, so that every
plan draws the same.

Within a layer, the c-th mask of a portion that begins with sample s of the global batch keeps
element e of sample i if

    (1)  hash(seed, step, layer, c; (s + i) E + e) < 1 - p         with E elements for each sample

so a layer that is recomputed draws the same mask, and so does a replica with another share. The
samples must be the first dim of the masked tensor, or the outer part of it.

The modules of a layer, or its first run, show whether it drops at all (``Randomness``). Other
random numbers, such as noise, come from torch's generators and differ from plan to plan; a layer
that is recomputed draws the same ones again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from argosy.errors import invalid
from argosy.runtime.graphs.calls import mask_key, random_mask
from argosy.runtime.stages.moment import Moment

# The most masks that one layer may draw in a run, which keeps the keys of layers apart.
_MOST_MASKS = 2**16


class Masks(TorchFunctionMode):
    """A mode in which dropout draws its masks by (1)."""

    def __init__(self, seed: int, layer: int, moment: Moment) -> None:
        super().__init__()
        self.seed, self.layer, self.moment = seed, layer, moment
        self.count = 0
        self.drew = False
        """True if anything was dropped."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.dropout:
            return self._dropout(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            probability = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if probability > 0:
                return self._attention(*args, **kwargs)
        return function(*args, **kwargs)

    def _dropout(
        self,
        input: Tensor,  # noqa: A002
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0:
            return input
        self.drew = True
        kept = input * self._mask(input, 1 - p) / (1 - p) if p < 1 else torch.zeros_like(input)
        return input.copy_(kept) if inplace else kept

    def _mask(self, like: Tensor, keep: float) -> Tensor:
        moment = self.moment
        if like.dim() == 0 or like.shape[0] % moment.samples:
            actual = f"dropout of a tensor of shape {tuple(like.shape)}"
            expected = f"the {moment.samples} samples as its first dim, or as the outer part of it"
            raise invalid(f"layer {self.layer}", actual, expected)
        key = mask_key(self.seed, moment.step, self.layer * _MOST_MASKS + self.count)
        self.count += 1
        first = moment.first_sample * (like.numel() // moment.samples)
        positions = torch.arange(first, first + like.numel(), device=like.device).view(like.shape)
        return random_mask(positions, keep, key=key, dtype=like.dtype)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute attention without a fused kernel, because fused kernels draw masks of their
        own."""
        if enable_gqa:
            key, value = (
                part.repeat_interleave(query.shape[-3] // part.shape[-3], -3)
                for part in (key, value)
            )
        scores = (
            query
            @ key.transpose(-2, -1)
            * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        )
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        if attn_mask is not None:
            masked = attn_mask.dtype is torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value


@dataclass
class Randomness:
    """A record of the random numbers that a layer draws; None is for its first run to find out."""

    masks: bool | None
    others: bool | None = None
    """True if it draws from torch's generators."""

    @contextlib.contextmanager
    def watched(self, device: torch.device) -> Iterator[None]:
        """Watch a run of the layer; the first one sets ``others``."""
        if self.others is not None:
            yield
            return
        before = _states(device)
        yield
        self.others = any(
            not torch.equal(old, new) for old, new in zip(before, _states(device), strict=True)
        )


def _states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a layer may draw from."""
    return [
        torch.get_rng_state(),
        *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else []),
    ]


def masking(
    seed: int, index: int, moment: Moment, layer: Callable[..., Any], known: Randomness
) -> Callable[..., Any]:
    """Return a layer whose masks are drawn by (1), and again equally when it is recomputed."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        with Masks(seed, index, moment) as masks:
            result = layer(*arguments, **keywords)
        known.masks = known.masks or masks.drew
        return result

    return run
