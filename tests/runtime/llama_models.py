"""Small models as llama's: rotary positions, fewer heads of keys than of queries, gated
feed-forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, KEY_HEADS, LENGTH = 19, 16, 4, 2, 9
"""An odd number of tokens."""
EXPERTS = 6


def turned(x: Tensor) -> Tensor:
    """Rotary positions of (samples, heads, tokens, elements)."""
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), rates).to(x.dtype)
    one, other = x.chunk(2, -1)
    return torch.cat(
        [one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        each = WIDTH // HEADS
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * each, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for project, heads in ((self.q, HEADS), (self.k, KEY_HEADS), (self.v, KEY_HEADS))
        )
        mixed = F.scaled_dot_product_attention(
            turned(q), turned(k), v, is_causal=True, enable_gqa=True
        )
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


def next_token_loss(model: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def llama(samples: int, *, tied: bool = False) -> Any:
    """Six layers."""
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    if tied:
        head.weight = embedding.weight
    model = nn.Sequential(
        embedding, *(Block() for _ in range(4)), nn.Sequential(nn.RMSNorm(WIDTH), head)
    )
    return model, next_token_loss, torch.randint(VOCABULARY, (samples, LENGTH + 1))


class Experts(nn.Module):
    """As Hugging Face's: matrices of all experts as one parameter, called with tokens, numbers and
    weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)

    def forward(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for number in numbers.unique().tolist():
            row, choice = torch.where(numbers == number)
            made = F.silu(tokens[row] @ self.up[number]) @ self.down[number]
            result = result.index_add(0, row, made * weights[row, choice, None])
        return result


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention, self.router, self.experts = (
            Attention(),
            nn.Linear(WIDTH, EXPERTS, bias=False),
            Experts(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        tokens = self.norms[1](x).flatten(0, 1)
        weights, numbers = self.router(tokens).softmax(-1).topk(2)
        return x + self.experts(tokens, numbers, weights / weights.sum(-1, keepdim=True)).view(
            x.shape
        )


def mixture(samples: int, *, tied: bool = False) -> Any:
    """Six layers, of which two have experts, one of them hardly ever used."""
    model, loss_fn, tokens = llama(samples, tied=tied)
    model[2], model[3] = MixtureBlock(), MixtureBlock()
    with torch.no_grad():
        model[2].router.weight[-1] = -model[2].router.weight[0]
    return model, loss_fn, tokens


def mixture_of_blocks(samples: int) -> Any:
    """Six layers, all four blocks of which have experts."""
    model, loss_fn, tokens = llama(samples)
    for at in range(1, 5):
        model[at] = MixtureBlock()
    return model, loss_fn, tokens


class Chosen(nn.Module):
    """Modules of experts, of which only those that have tokens run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, numbers = self.router(tokens).softmax(-1).max(-1)
        result = torch.zeros_like(tokens)
        for number in numbers.unique().tolist():
            (row,) = torch.where(numbers == number)
            made = self.experts[number](tokens[row]) * weights[row, None]
            result = result.index_add(0, row, made)
        return result.view_as(x)


class ChosenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention, self.experts = Attention(), Chosen()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        result: Tensor = x + self.experts(self.norms[1](x))
        return result


def chosen_mixture(samples: int, *, tied: bool = False) -> Any:
    """Six layers; devices can share the experts of one, and tokens choose modules of another."""
    model, loss_fn, tokens = llama(samples, tied=tied)
    model[2], model[4] = MixtureBlock(), ChosenBlock()
    return model, loss_fn, tokens


class DenseMixtureBlock(MixtureBlock):
    """A block that multiplies by all experts at once, so that no operation depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        made = F.silu(torch.einsum("btw,ewf->betf", y, self.experts.up))
        weighted = torch.einsum("betf,bte->betf", made, self.router(y).softmax(-1))
        return x + torch.einsum("betf,efw->btw", weighted, self.experts.down)


def dense_mixture(samples: int, *, tied: bool = False) -> Any:
    """Six layers, of which two have experts that all tokens meet."""
    model, loss_fn, tokens = llama(samples, tied=tied)
    model[2], model[3] = DenseMixtureBlock(), DenseMixtureBlock()
    return model, loss_fn, tokens


def hf_mixtral(samples: int, *, tied: bool = False) -> Any:
    from runtime.small_models import labelled_loss
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = MixtralConfig(
        **sizes,
        intermediate_size=WIDTH,
        num_local_experts=EXPERTS,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
    )
    tokens = torch.randint(VOCABULARY, (samples, LENGTH))
    return MixtralForCausalLM(config), labelled_loss, {"input_ids": tokens, "labels": tokens}


EXPERT_LAYERS = {"mixture": (2, 3), "chosen-mixture": (2,), "hf-mixtral": (1, 2, 3, 4)}
"""Layers that have experts."""
LLAMA_MODELS: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "mixture": mixture,
    "chosen-mixture": chosen_mixture,
    "dense-mixture": dense_mixture,
    "hf-mixtral": hf_mixtral,
}
