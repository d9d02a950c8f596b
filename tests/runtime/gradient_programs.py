"""Programs in which gradients take another way than values: writes under ``no_grad``, hooks,
complex numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from runtime.own_programs import BATCH, WIDTH, Built, Net, perceptron, points, program, squared
from torch import Tensor, nn


@program
def similar_views() -> Built:
    """Two networks whose outputs are compared by their cosine, which torch clamps in place under
    ``no_grad``."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = perceptron(), perceptron()

    def loss(model: Any, views: tuple[Tensor, Tensor]) -> Tensor:
        one, two = (model.first(view) for view in views)
        forth = F.cosine_similarity(model.second(one), two.detach()).mean()
        return -forth - F.cosine_similarity(model.second(two), one.detach()).mean()

    return Pair(), loss, (points(), points())


@program
def clamped_without_gradients() -> Built:
    class Clamped(Net):
        def forward(self, x: Tensor) -> Tensor:
            made = self.inner(x) + 0
            with torch.no_grad():
                made.clamp_(-0.2, 0.2)
            return made * 2

    return Clamped(), lambda model, x: (model(x) * x).mean(), points()


@program
def frequencies_written_in_parts() -> Built:
    class Frequencies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex128) * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            waves = torch.fft.rfft(x)
            kept = torch.zeros_like(waves)
            kept[:, :3] = waves[:, :3] * self.filter
            kept[:, 4] = waves[:, 4]
            return torch.fft.irfft(kept, n=WIDTH)

    return Frequencies(), squared, points()


@program
def columns_replaced() -> Built:
    class Replaced(Net):
        def forward(self, x: Tensor) -> Tensor:
            made = self.inner(x).clone()
            made[:, 0] = x[:, 1]
            made[:, 2:4] = made[:, 4:6].clone() * 2
            return made

    return Replaced(), squared, points()


@program
def complex_noise() -> Built:
    def loss(model: Any, x: Tensor) -> Tensor:
        return (model(x) * torch.randn(x.shape, dtype=torch.complex128)).abs().mean()

    return Net(), loss, points()


# what has to be refused


@program
def changed_through_data() -> Built:
    class Changed(Net):
        def forward(self, x: Tensor) -> Tensor:
            made = self.inner(x)
            made.data.clamp_(-0.3, 0.3)
            return made

    return Changed(), lambda model, x: (model(x) * x).mean(), points()


@program
def hook_on_a_tensor() -> Built:
    def loss(model: Any, x: Tensor) -> Tensor:
        made = model(x)
        made.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return F.mse_loss(made, x)

    return Net(), loss, points()


@program
def hook_on_a_parameter() -> Built:
    model = Net()
    model.inner[0].weight.register_hook(lambda gradient: gradient * 0.5)
    return model, squared, points()


@program
def hook_on_a_module() -> Built:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    model[1].register_full_backward_hook(lambda *given: tuple(part * 0.1 for part in given[1]))
    batch = (points(), torch.randint(0, 2, (BATCH,)))
    return model, lambda model, b: F.cross_entropy(model(b[0]), b[1]), batch
