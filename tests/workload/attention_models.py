"""Models whose attention torch computes by another operation on another device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from argosy.workload.capture.initial import FakeModel, Recording
from argosy.workload.capture.trace import trace

HEADS, ELEMENTS = 4, 8
WIDTH = HEADS * ELEMENTS

Attention = Callable[[Tensor, Tensor], Tensor]


def _masked(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    tokens = q.shape[2]
    mask = torch.ones(tokens, tokens, dtype=dtype, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


def _multi_head(q: Tensor, k: Tensor) -> Tensor:
    weights = [q.new_ones(rows, WIDTH) for rows in (3 * WIDTH, WIDTH)]
    return F.multi_head_attention_forward(
        *(heads.transpose(1, 2).flatten(2).transpose(0, 1) for heads in (q, k, k)),
        embed_dim_to_check=WIDTH,
        num_heads=HEADS,
        in_proj_weight=weights[0],
        in_proj_bias=None,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=weights[1],
        out_proj_bias=None,  # type: ignore[arg-type]
        need_weights=False,
        attn_mask=torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1),
    )[0]


ATTENTIONS: Mapping[str, Attention] = {
    "causal": lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.3),
    "shared heads": lambda q, k: F.scaled_dot_product_attention(
        q, k[:, ::2], k[:, ::2], is_causal=True, enable_gqa=True
    ),
    "mask of truth values": lambda q, k: _masked(q, k, torch.bool),
    "mask of numbers": lambda q, k: _masked(q, k, q.dtype),
    "mask of truth values, by a function of torch": _multi_head,
    "dropout": lambda q, k: F.scaled_dot_product_attention(q, k, k, dropout_p=0.1),
    "keys of one head for all": lambda q, k: F.scaled_dot_product_attention(q, k[:, :1], k[:, :1]),
    "one head": lambda q, k: F.scaled_dot_product_attention(q[:, 0], k[:, 0], k[:, 0]),
    "mask with gradients": lambda q, k: F.scaled_dot_product_attention(
        q, k, k, attn_mask=q @ k.transpose(-1, -2)
    ),
}


class AttentionModel(nn.Module):
    """Queries and keys by a linear layer each, and one kind of attention."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = ATTENTIONS[kind]

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], HEADS, ELEMENTS)
        q, k = (layer(x).view(heads).transpose(1, 2) for layer in (self.query, self.key))
        return self.attention(q, k)


def captured_operations(
    kind: str, dtype: torch.dtype, device: str, autocast: torch.dtype | None = None
) -> list[str]:
    """The operations of such a model's forward, as a trace on a device finds them."""
    fake = FakeModel(
        model=AttentionModel(kind).to(dtype),
        loss=lambda model, batch: model(batch).sum(),
        batch=torch.zeros(2, 6, WIDTH, dtype=dtype),
        recording=Recording(),
    )
    writer = trace(
        fake, name=kind, forward_only=True, device=torch.device(device), autocast=autocast
    )
    return [node.op for node in writer.graph().nodes]
