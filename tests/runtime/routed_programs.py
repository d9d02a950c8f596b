"""Training programs that send tokens to experts by numbers that they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from runtime.own_programs import BATCH, TIME, WIDTH, WORDS, Built, perceptron, program
from torch import Tensor, nn

EXPERTS, CHOICES = 4, 2


class Routed(nn.Module):
    """A mixture of experts as textbooks write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(perceptron() for _ in range(EXPERTS))

    def chosen(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, numbers = self.gate(rows).softmax(-1).topk(CHOICES, -1)
        return weights / weights.sum(-1, keepdim=True), numbers

    def forward(self, x: Tensor) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        weights, numbers = self.chosen(rows)
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(numbers == number)
            made.index_add_(0, token, expert(rows[token]) * weights[token, place, None])
        return made.view_as(x)


class Hit(Routed):
    """Only experts that have tokens run, as in Hugging Face's older mixtures."""

    def forward(self, x: Tensor) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        weights, numbers = self.chosen(rows)
        mask = F.one_hot(numbers, EXPERTS).permute(2, 1, 0)
        made = torch.zeros_like(rows)
        for hit in mask.sum((-1, -2)).nonzero():
            number = int(hit.item())
            place, token = torch.where(mask[number])
            made.index_add_(
                0, token, self.experts[number](rows[token]) * weights[token, place, None]
            )
        return made.view_as(x), self.gate(rows)


class Sorted(Routed):
    """Tokens are sorted by expert and split by counts."""

    def forward(self, x: Tensor) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        weights, numbers = self.chosen(rows)
        order = numbers.flatten().argsort(stable=True)
        counts = numbers.flatten().bincount(minlength=EXPERTS).tolist()
        parts = rows[order // CHOICES].split(counts)
        results = torch.cat([e(part) for e, part in zip(self.experts, parts, strict=True)])
        weighted = results * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // CHOICES, weighted).view_as(x)


class Limited(Routed):
    """An expert takes so many tokens of the batch, and the others are dropped."""

    def forward(self, x: Tensor) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        shares, numbers = self.gate(rows).softmax(-1).max(-1)
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token = torch.where(numbers == number)[0][: len(rows) // (2 * EXPERTS)]
            made = made.index_add(0, token, expert(rows[token]) * shares[token, None])
        return made.view_as(x)


class Threshold(Routed):
    """As many experts as have a share above a limit."""

    def forward(self, x: Tensor) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        shares, made = self.gate(rows).softmax(-1), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token = torch.where(shares[:, number] > 0.2)[0]
            made = made.index_add(0, token, expert(rows[token]) * shares[token, number, None])
        return made.view_as(x)


class Dropping(Routed):
    def forward(self, x: Tensor) -> Any:
        return F.dropout(super().forward(x), 0.1, self.training)


class Language(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.word, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.mixing = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.routed = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made = self.word(x)
        for mixing, routed in zip(self.mixing, self.routed, strict=True):
            made = made + mixing(made).cumsum(1) / TIME
            result = routed(made)
            made = made + (result[0] if isinstance(result, tuple) else result)
        return self.head(made)


def _next_word(model: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def _language(kind: Callable[[], nn.Module]) -> Built:
    return Language(kind), _next_word, torch.randint(WORDS, (BATCH, TIME))


@program
def experts_in_a_list() -> Built:
    return _language(Routed)


@program
def experts_that_are_hit() -> Built:
    return _language(Hit)


@program
def experts_of_sorted_tokens() -> Built:
    return _language(Sorted)


@program
def experts_of_limited_capacity() -> Built:
    return _language(Limited)


@program
def experts_by_a_threshold() -> Built:
    return _language(Threshold)


@program
def experts_with_dropout() -> Built:
    return _language(Dropping)


@program
def experts_that_are_the_model() -> Built:
    return Routed(), lambda model, x: model(x).square().mean(), torch.randn(BATCH, TIME, WIDTH)


def _hugging_face(name: str, **settings: Any) -> Built:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        num_experts_per_tok=CHOICES,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **settings,
    )

    config._experts_implementation = "eager"  # grouped products have no double precision

    def loss(model: Any, x: Tensor) -> Tensor:
        made: Tensor = model(input_ids=x, labels=x, use_cache=False).loss
        return made

    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model, loss, torch.randint(WORDS, (BATCH, TIME))


@program
def mixtral_of_hugging_face() -> Built:
    return _hugging_face("Mixtral", intermediate_size=24, num_local_experts=EXPERTS)


@program
def olmoe_of_hugging_face() -> Built:
    return _hugging_face("Olmoe", intermediate_size=24, num_experts=EXPERTS)


@program
def qwen2_mixture_of_hugging_face() -> Built:
    return _hugging_face(
        "Qwen2Moe",
        intermediate_size=24,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=24,
        num_experts=EXPERTS,
    )


@program
def qwen3_mixture_of_hugging_face() -> Built:
    return _hugging_face(
        "Qwen3Moe", intermediate_size=24, moe_intermediate_size=8, num_experts=EXPERTS, head_dim=8
    )
