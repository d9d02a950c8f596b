"""Builds of the ten programs that ``benchmarks.programs`` plans, each on a batch of 64."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

SAMPLES = 64


def squared(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean square of what a model makes."""
    made: Tensor = model(batch)
    return made.square().mean()


def language_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that a model of transformers computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


class Down(nn.Module):
    """Two convolutions with a norm over groups."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.Conv2d(outer, outer, 3, padding=1),
        )
        self.norm = nn.GroupNorm(8, outer)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = functional.silu(self.norm(self.two(functional.silu(self.one(x)))))
        return made


class Unet(nn.Module):
    """Four depths, whose results skip to the way up."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(Down(a, b) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(
            Down(a + b, b) for a, b in zip(sizes[:1:-1], sizes[-2:0:-1], strict=True)
        )
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        x = kept.pop()
        for block in self.up:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        made: Tensor = self.last(x)
        return made


def unet() -> Any:
    return Unet(), squared, torch.randn(SAMPLES, 3, 64, 64)


def t5() -> Any:
    config = transformers.T5Config(dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
    ids = torch.zeros(SAMPLES, 256, dtype=torch.int64)
    return (
        transformers.T5ForConditionalGeneration(config),
        language_loss,
        {"input_ids": ids, "labels": ids},
    )


class Towers(nn.Module):
    """Two deep towers whose results meet at the end."""

    def __init__(self, width: int = 2048, depth: int = 6) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
            )
            for _ in range(2)
        )

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = (tower(x) for tower, x in zip(self.towers, batch, strict=True))
        made: Tensor = (one * other).sum(-1)
        return made


def towers() -> Any:
    return Towers(), squared, (torch.randn(SAMPLES, 2048), torch.randn(SAMPLES, 2048))


class Experts(nn.Module):
    """Every expert computes every token, weighed by a gate."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, number)
        self.rise = nn.Parameter(torch.randn(number, width, 2 * width))
        self.fall = nn.Parameter(torch.randn(number, 2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        inner = functional.relu(torch.einsum("btw,ewi->ebti", x, self.rise))
        return x + torch.einsum("ebti,eiw,bte->btw", inner, self.fall, weights)


def experts() -> Any:
    model = nn.Sequential(*(Experts(512, 8) for _ in range(4)))
    return model, squared, torch.randn(SAMPLES, 64, 512)


class Recurrent(nn.Module):
    """Layers of an LSTM between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells, self.head = (
            nn.Embedding(8000, 512),
            nn.LSTM(512, 512, 2),
            nn.Linear(512, 8000),
        )

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.head(self.cells(self.words(ids).transpose(0, 1))[0])
        return made


def lstm() -> Any:
    return Recurrent(), squared, torch.zeros(SAMPLES, 24, dtype=torch.int64)


class Graphs(nn.Module):
    """Messages between all nodes of dense graphs, whose adjacency every layer reads."""

    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        adjacency, x = batch
        for layer in self.layers:
            x = x + functional.relu(layer(adjacency @ x))
        return x


def graphs() -> Any:
    return Graphs(), squared, (torch.rand(SAMPLES, 128, 128), torch.randn(SAMPLES, 128, 512))


class Recommender(nn.Module):
    """Tables of sparse features and a perceptron of dense ones, which interact in pairs."""

    def __init__(self, tables: int = 16, rows: int = 100_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width))
        self.top = nn.Sequential(
            nn.Linear((tables + 1) ** 2 + width, 1024), nn.ReLU(), nn.Linear(1024, 1)
        )

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        dense, ids = batch
        own = self.dense(dense)
        features = torch.stack(
            [own, *(table(ids[:, at]) for at, table in enumerate(self.tables))], 1
        )
        pairs = (features @ features.transpose(1, 2)).flatten(1)
        made: Tensor = self.top(torch.cat([own, pairs], 1))
        return made


def dlrm() -> Any:
    return (
        Recommender(),
        squared,
        (torch.randn(SAMPLES, 13), torch.zeros(SAMPLES, 16, dtype=torch.int64)),
    )


class Modulated(nn.Module):
    """A transformer's block whose norms a condition shifts and scales."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.condition = nn.Linear(width, 6 * width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.condition(c).unsqueeze(1).chunk(6, -1)
        q, k, v = (
            self.into(self.norm(x) * (1 + scale) + shift)
            .unflatten(-1, (3, self.heads, -1))
            .unbind(2)
        )
        made = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        )
        x = x + gate * self.out(made.transpose(1, 2).flatten(2))
        after: Tensor = x + gate2 * self.fall(
            functional.gelu(self.rise(self.norm(x) * (1 + scale2) + shift2))
        )
        return after


class Diffusion(nn.Module):
    """Blocks that all read one condition."""

    def __init__(self, width: int = 768, depth: int = 8) -> None:
        super().__init__()
        self.into, self.step = nn.Linear(16, width), nn.Linear(256, width)
        self.blocks = nn.ModuleList(Modulated(width, 12) for _ in range(depth))
        self.out = nn.Linear(width, 16)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, condition = self.into(batch[0]), functional.silu(self.step(batch[1]))
        for block in self.blocks:
            x = block(x, condition)
        made: Tensor = self.out(x)
        return made


def diffusion() -> Any:
    return Diffusion(), squared, (torch.randn(SAMPLES, 256, 16), torch.randn(SAMPLES, 256))


def swin() -> Any:
    config = transformers.SwinConfig(
        drop_path_rate=0.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        depths=[2, 2, 2, 2],
    )
    labels = torch.zeros(SAMPLES, dtype=torch.int64)
    batch = {"pixel_values": torch.randn(SAMPLES, 3, 224, 224), "labels": labels}
    return transformers.SwinForImageClassification(config), language_loss, batch


def whisper() -> Any:
    config = transformers.WhisperConfig(
        encoder_layers=4, decoder_layers=4, dropout=0.0, use_cache=False, max_source_positions=512
    )
    ids = torch.zeros(SAMPLES, 64, dtype=torch.int64)
    batch = {"input_features": torch.randn(SAMPLES, 80, 1024), "labels": ids}
    return transformers.WhisperForConditionalGeneration(config), language_loss, batch
