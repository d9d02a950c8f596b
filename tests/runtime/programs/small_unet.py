"""A user's program for the tests of ``argosy run``: a U-Net that names no layers, with dropout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from support.spmd_models import Unet


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unet, self.drop = Unet(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unet(self.drop(x))


def build() -> Any:
    pixels = torch.randn(8, 3, 16, 16)
    return Dropping(), lambda model, x: (model(x) - x).square().mean(), pixels
