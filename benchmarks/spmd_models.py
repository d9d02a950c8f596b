"""Models whose steps are shared: HAP's transformer and mixture of experts, ViT, VGG-19, T5."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Experts(nn.Module):
    """Two experts per word as long as they have room, words sent and fetched by products with
    one-hot tensors."""

    def __init__(self, width: int, inner: int, experts: int, room: int) -> None:
        super().__init__()
        self.num, self.room = experts, room
        self.gate = nn.Linear(width, experts, bias=False)
        self.rise = nn.Parameter(torch.randn(experts, width, inner))
        self.fall = nn.Parameter(torch.randn(experts, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        weight, chosen = self.gate(x).softmax(-1).topk(2, -1)
        hot = functional.one_hot(chosen, self.num).to(x.dtype)
        order = (
            hot.reshape(batch, 2 * time, self.num).cumsum(1).reshape(batch, time, 2, self.num) - 1
        )
        place = (order * hot).sum(-1).long()
        inside = (place < self.room).unsqueeze(-1)
        seat = functional.one_hot(place.clamp(max=self.room - 1), self.room).to(x.dtype) * inside
        send = torch.einsum("btke,btkc->btec", hot, seat)
        back = torch.einsum("btke,btkc->btec", hot * weight.unsqueeze(-1), seat)
        words = torch.einsum("btec,btd->becd", send, x)
        words = torch.einsum("becd,edh->bech", words, self.rise)
        words = torch.einsum("bech,ehd->becd", functional.relu(words), self.fall)
        return torch.einsum("btec,becd->btd", back, words)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, feed: nn.Module) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.between, self.feed = nn.LayerNorm(width), feed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.feed(self.between(x))


def feed_forward(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))


class Language(nn.Module):
    def __init__(
        self,
        words: int,
        time: int,
        *,
        width: int,
        inner: int,
        heads: int,
        layers: int,
        experts: int,
    ) -> None:
        super().__init__()
        self.word = nn.Embedding(words, width)
        room = 2 * math.ceil(time / experts * 1.25) if experts else 0
        feeds = [
            Experts(width, inner, experts, room)
            if experts and layer % 2
            else feed_forward(width, inner)
            for layer in range(layers)
        ]
        self.blocks = nn.ModuleList(Block(width, heads, feed) for feed in feeds)
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        h = self.word(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.last(h))


class Vision(nn.Module):
    def __init__(
        self, *, side: int, patch: int, width: int, inner: int, heads: int, layers: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.place = nn.Parameter(torch.zeros(1, (side // patch) ** 2, width))
        self.blocks = nn.ModuleList(
            Block(width, heads, feed_forward(width, inner)) for _ in range(layers)
        )
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            h = block(h)
        return self.head(self.last(h).mean(1))


class Vgg(nn.Module):
    """VGG-19 for images of 224 x 224."""

    CHANNELS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for channels, count in self.CHANNELS:
            for _ in range(count):
                layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
                before = channels
            layers.append(nn.MaxPool2d(2))
        self.body = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, 1000),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def _word_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def language(
    batch: int, *, experts: int = 0, words: int = 33278, time: int = 128, layers: int = 12
) -> Any:
    model = Language(words, time, width=768, inner=3072, heads=12, layers=layers, experts=experts)
    ids = torch.zeros(batch, time, dtype=torch.int64)
    return model, _word_loss, (ids, ids)


def vision(batch: int) -> Any:
    model = Vision(side=224, patch=16, width=768, inner=3072, heads=12, layers=12)
    return (
        model,
        _class_loss,
        (torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.int64)),
    )


def vgg(batch: int) -> Any:
    return (
        Vgg(),
        _class_loss,
        (torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.int64)),
    )


def t5(batch: int, *, time: int = 128) -> Any:
    """Hugging Face's T5 of the base model's sizes, without dropout."""
    import transformers

    config = transformers.T5Config(
        d_model=768, d_ff=3072, d_kv=64, num_heads=12, num_layers=12, vocab_size=32128, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.zeros(batch, time, dtype=torch.int64)
    model = transformers.T5ForConditionalGeneration(config)
    return model, lambda net, given: net(input_ids=given[0], labels=given[1]).loss, (ids, ids)
