"""More training programs: tables of clicks, odd control flow, odd batches, and odd ways to write
``build``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from runtime.model_programs import sequence
from runtime.own_programs import (
    BATCH,
    TIME,
    WIDTH,
    Built,
    Net,
    perceptron,
    points,
    program,
    squared,
)
from torch import Tensor, nn


@program
def tables_of_clicks() -> Built:
    class Clicks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(11, WIDTH, mode="sum") for _ in range(2))
            self.dense, self.head = perceptron(), nn.Linear(WIDTH + 3, 1)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            each = torch.stack(
                [self.dense(x), *(table(ids[:, at]) for at, table in enumerate(self.tables))], 1
            )
            pairs = (each @ each.transpose(1, 2))[:, [0, 0, 1], [1, 2, 2]]
            return self.head(torch.cat([each[:, 0], pairs], -1)).squeeze(-1)

    def loss(model: Any, b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(b[0], b[1]), b[2])

    return (
        Clicks(),
        loss,
        (points(), torch.randint(0, 11, (BATCH, 2, 3)), torch.rand(BATCH).round()),
    )


@program
def branch_on_contents() -> Built:
    def loss(model: Any, x: Tensor) -> Tensor:
        made = model(x)
        return made.square().mean() if made.mean() > 0 else made.abs().mean()

    return Net(), loss, points()


@program
def rows_by_condition() -> Built:
    def loss(model: Any, x: Tensor) -> Tensor:
        made = model(x)
        return made[x > 0].square().mean()

    return Net(), loss, points()


@program
def lists_of_numbers() -> Built:
    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        made = model(b[0])
        return torch.stack(
            [row[:size].square().mean() for row, size in zip(made, b[1].tolist(), strict=True)]
        ).mean()

    return Net(), loss, (points(), torch.tensor([1, 2, 3, 4, 5, 6]))


@program
def layers_that_drop_out() -> Built:
    class Dropped(Net):
        def forward(self, x: Tensor) -> Tensor:
            return (
                self.inner[0](x).mean() if self.training and torch.rand([]) < 0.4 else self.inner(x)
            )

    return Dropped(), lambda model, x: model(x).mean(), points()


@program
def layers_that_never_drop_out() -> Built:
    class Dropped(Net):
        drop = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return x if self.training and torch.rand([]) < self.drop else x + self.inner(x)

    return Dropped(), squared, points()


@program
def batch_changed_in_place() -> Built:
    def loss(model: Any, b: dict[str, Tensor]) -> Tensor:
        b["x"].sub_(0.5).mul_(2.0)
        b["x"][:, 0] = 0.0
        return squared(model, b["x"])

    return Net(), loss, {"x": points()}


@program
def batch_edited_in_build() -> Built:
    x, labels = sequence(), torch.randint(0, 4, (BATCH, TIME))
    x[2, 3:] = 0.0
    labels.masked_fill_(torch.rand(BATCH, TIME) < 0.2, 0)
    x -= x.mean(0)

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(b[0]).flatten(0, 1), b[1].flatten())

    return Net(4), loss, (x, labels)


@program
def numbers_read_in_build() -> Built:
    lengths = torch.tensor([2, 4, 3, 5, 1, 5]).tolist()
    x = torch.stack([F.pad(torch.ones(n), (0, WIDTH - n)) for n in lengths])
    scale = torch.arange(1, 5).sum().item()
    order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(3)).tolist()
    return Net(), lambda model, b: squared(model, b) / scale, x[order]


@program
def drawn_by_generator() -> Built:
    generator = torch.Generator().manual_seed(11)
    model = Net()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2, generator=generator)
    return model, squared, torch.randn(BATCH, WIDTH, generator=generator)


@program
def state_loaded() -> Built:
    torch.manual_seed(5)
    trained = Net()
    model = Net()
    model.load_state_dict(trained.state_dict())
    return model, squared, points()


@program
def state_assigned_from_a_file() -> Built:
    with tempfile.TemporaryDirectory() as folder:
        state = {name: torch.full_like(value, 0.1) for name, value in Net().state_dict().items()}
        torch.save(state, Path(folder) / "state.pt")
        model = Net()
        model.load_state_dict(torch.load(Path(folder) / "state.pt"), assign=True)
    return model, squared, points()


@program
def state_from_numpy() -> Built:
    import numpy as np

    table = np.random.default_rng(4)
    model = Net()
    with torch.no_grad():
        model.inner[0].weight.copy_(torch.from_numpy(table.normal(size=(2 * WIDTH, WIDTH))))
    return model, squared, torch.from_numpy(table.normal(size=(BATCH, WIDTH)))


@program
def data_loader() -> Built:
    data = torch.utils.data.TensorDataset(torch.randn(20, WIDTH), torch.randint(0, 4, (20,)))
    loader = torch.utils.data.DataLoader(
        data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(1)
    )

    def loss(model: Any, b: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(b[0]), b[1])

    return Net(4), loss, next(iter(loader))


@program
def numbers_in_the_batch() -> Built:
    batch = {"x": points(), "options": {"scale": 0.5, "names": ("a", "b")}, "nothing": None}
    return Net(), lambda model, b: squared(model, b["x"]) * b["options"]["scale"], batch


@program
def buffer_as_the_whole_model() -> Built:
    class Constant(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.linspace(0, 1, WIDTH), persistent=False)
            self.offset = torch.full((WIDTH,), 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * self.scale + self.offset)

    return Constant(), squared, points()
