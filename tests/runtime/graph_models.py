"""Models that do not say where they can be cut: they run in stages of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from support.spmd_models import ResidualNet, Unet
from torch import Tensor, nn

SIDE = 16


def unet(samples: int, *, tied: bool = False) -> Any:
    del tied
    return Unet(), lambda model, x: F.mse_loss(model(x), x), torch.randn(samples, 3, SIDE, SIDE)


class Forked(nn.Module):
    """Two ways through, of which one gets no gradient and one is divided by dropout; a table that
    both read."""

    def __init__(self, *, drop: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 12))
        self.rise, self.fall = nn.Linear(12, 24), nn.Linear(24, 12)
        self.teacher, self.head = nn.Linear(12, 24), nn.Linear(12, 5)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table @ self.table.t()
        hidden = self.rise((x @ bias).transpose(0, 1)).transpose(0, 1)
        target = torch.sigmoid(self.teacher(x)).detach()
        hidden = self.drop(torch.tanh(hidden)) * target
        return self.head(self.fall(hidden.flatten(0, 1)).unflatten(0, x.shape[:2]) @ bias)


def forked(samples: int, *, tied: bool = False, drop: float = 0.0) -> Any:
    del tied

    def loss(model: Any, batch: Any) -> Tensor:
        x, classes = batch
        return F.cross_entropy(model(x).mean(1), classes)

    return Forked(drop=drop), loss, (torch.randn(samples, 7, 12), torch.randint(5, (samples,)))


def dropping(samples: int, *, tied: bool = False) -> Any:
    return forked(samples, tied=tied, drop=0.4)


class Tabled(nn.Module):
    """A table that is read by tokens and multiplied with; its first row gets no gradient where it
    is read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12, padding_idx=0)
        self.rise, self.fall, self.drop = nn.Linear(12, 24), nn.Linear(24, 12), nn.Dropout(0.4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return F.linear(x + self.fall(self.drop(torch.tanh(self.rise(x)))), self.table.weight)


def tabled(samples: int, *, tied: bool = False) -> Any:
    del tied

    def loss(model: Any, batch: Any) -> Tensor:
        tokens, wanted = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())

    return Tabled(), loss, tuple(torch.randint(20, (2, samples, 7)))


def residual(samples: int, *, tied: bool = False) -> Any:
    """With statistics over the batch."""
    del tied

    def loss(model: Any, batch: Any) -> Tensor:
        pixels, classes = batch
        return F.cross_entropy(model(pixels), classes)

    return ResidualNet(), loss, (torch.randn(samples, 3, SIDE, SIDE), torch.randint(10, (samples,)))


GRAPH_MODELS: dict[str, Callable[..., Any]] = {
    "unet": unet,
    "forked": forked,
    "dropping": dropping,
    "tabled": tabled,
    "residual": residual,
}
