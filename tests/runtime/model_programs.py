"""More training programs: recurrent, attending, tied, checkpointed, normalised; images, sounds,
graphs, tables."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from runtime.own_programs import (
    BATCH,
    TIME,
    WIDTH,
    WORDS,
    Built,
    Net,
    perceptron,
    points,
    program,
    squared,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def words() -> Tensor:
    return torch.randint(0, WORDS, (BATCH, TIME))


def sequence() -> Tensor:
    return torch.randn(BATCH, TIME, WIDTH)


def next_word(model: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


# recurrence


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.inner = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.word(x))[0])


@program
def lstm() -> Built:
    return Recurrent(nn.LSTM, num_layers=2), next_word, words()


@program
def gru_both_ways() -> Built:
    return Recurrent(nn.GRU, bidirectional=True), next_word, words()


@program
def cell_in_a_loop() -> Built:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            state, made = x.new_zeros(x.shape[0], WIDTH), []
            for step in range(x.shape[1]):
                state = self.cell(x[:, step], state)
                made.append(self.head(state) if step % 2 else state)
            return torch.stack(made, 1)

    return Cell(), squared, sequence()


@program
def packed_sequences() -> Built:
    class Packed(Recurrent):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
            packed = nn.utils.rnn.pack_padded_sequence(
                self.word(x), lengths, batch_first=True, enforce_sorted=False
            )
            return self.head(
                nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0]
            )

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        return model(*b).square().mean()

    return Packed(nn.LSTM), loss, (words(), torch.tensor([5, 3, 2, 5, 4, 1]))


# attention


@program
def transformer_of_torch() -> Built:
    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word = nn.Embedding(WORDS, WIDTH)
            self.inner = nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            later = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
            made = self.inner(
                self.word(x), self.word(y), tgt_mask=later, src_key_padding_mask=x == 0
            )
            return self.head(made)

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(b[0], b[1][:, :-1]).flatten(0, 1), b[1][:, 1:].flatten())

    source = words()
    source[:, 3:] = 0
    return Translate(), loss, (source, words())


@program
def encoder_of_torch() -> Built:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
            self.inner = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    return Encoder(), squared, sequence()


# how modules are put together


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.inner = nn.Embedding(WORDS, WIDTH), perceptron()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.word.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.word(x)))


@program
def tied_by_assignment() -> Built:
    return Tied(), next_word, words()


@program
def tied_by_data() -> Built:
    model = Tied()
    model.head = nn.Linear(WIDTH, WORDS, bias=False)
    model.head.weight.data = model.word.weight.data
    return model, next_word, words()


@program
def one_block_many_times() -> Built:
    class Same(Net):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + self.inner(x)
            return x

    return Same(), squared, points()


@program
def checkpointed() -> Built:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(self.inner, x, use_reentrant=False)

    return Checkpointed(), squared, points()


@program
def checkpointed_reentrant() -> Built:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(WIDTH, WIDTH), perceptron()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=True)

    return Checkpointed(), squared, points()


@program
def checkpointed_in_sequence() -> Built:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.inner, 2, x, use_reentrant=False)

    return Checkpointed(), squared, points()


@program
def spectral_norm() -> Built:
    class Spectral(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner[0] = parametrizations.spectral_norm(self.inner[0])

    return Spectral(), squared, points()


@program
def old_spectral_norm() -> Built:
    class Spectral(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner[0] = nn.utils.spectral_norm(self.inner[0])

    return Spectral(), squared, points()


@program
def weight_norm() -> Built:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner[0] = parametrizations.weight_norm(self.inner[0])

    return Normed(), squared, points()


@program
def orthogonal_weight() -> Built:
    class Orthogonal(Net):
        def __init__(self) -> None:
            super().__init__()
            nn.init.orthogonal_(self.inner[0].weight)
            nn.init.trunc_normal_(self.inner[2].weight, std=0.3)

    return Orthogonal(), squared, points()


@program
def adapters() -> Built:
    class Adapter(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(inner.in_features, 2) * 0.1)
            self.up = nn.Parameter(torch.zeros(2, inner.out_features))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + x @ self.down @ self.up * 2.0

    class Adapted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner[0], self.inner[2] = Adapter(self.inner[0]), Adapter(self.inner[2])

    return Adapted(), squared, points()


@program
def teacher_of_averages() -> Built:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = perceptron()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                for slow, fast in zip(
                    self.teacher.parameters(), self.student.parameters(), strict=True
                ):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
                goal = self.teacher(x)
            return self.student(x + 0.1), goal

    return Teacher(), lambda model, x: F.mse_loss(*model(x)), points()


@program
def teacher_in_buffers() -> Built:
    class Teacher(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("slow", self.inner[0].weight.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.slow.lerp_(self.inner[0].weight, 0.1)
            return self.inner(x) + F.linear(x, self.slow)[:, :WIDTH]

    return Teacher(), squared, points()


# vision, audio, graphs, tables


@program
def images_with_batch_norm() -> Built:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = (
                nn.Conv2d(3, 4, 3),
                nn.BatchNorm2d(4),
                nn.Linear(4, 5),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.norm(self.first(x))).mean((2, 3)))

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(b[0]), b[1])

    return Images(), loss, (torch.randn(BATCH, 3, 8, 8), torch.randint(0, 5, (BATCH,)))


@program
def segments_of_images() -> Built:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = (
                nn.Conv2d(3, 4, 3, stride=2, padding=1),
                nn.ConvTranspose2d(4, 5, 2, stride=2),
            )
            self.norm = nn.GroupNorm(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            made = self.up(F.silu(self.norm(self.down(x))))
            return F.interpolate(made, scale_factor=2, mode="bilinear")

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(b[0]), b[1], ignore_index=0)

    return Segments(), loss, (torch.randn(BATCH, 3, 8, 8), torch.randint(0, 5, (BATCH, 16, 16)))


@program
def waves() -> Built:
    """Complex numbers: a filter that is learned in frequencies."""

    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex128) * 0.3)
            self.head = nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=16))

    return Waves(), lambda model, x: model(x).square().mean(), torch.randn(BATCH, 16)


@program
def spectrogram() -> Built:
    class Sound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(9, 4)

        def forward(self, x: Tensor) -> Tensor:
            seen = torch.stft(x, 16, 8, window=torch.hann_window(16), return_complex=True).abs()
            return self.head(seen.transpose(1, 2).log1p()).mean(1)

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(b[0]), b[1])

    return Sound(), loss, (torch.randn(BATCH, 64), torch.randint(0, 4, (BATCH,)))


@program
def dense_graphs() -> Built:
    class Graphs(Net):
        def forward(self, x: Tensor, near: Tensor) -> Tensor:  # type: ignore[override]
            return self.inner(near @ x / near.sum(-1, keepdim=True).clamp(min=1)).amax(1)

    def loss(model: Any, b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(b[0], b[1]), b[2])

    near = (torch.rand(BATCH, TIME, TIME) > 0.5).double()
    return Graphs(3), loss, (sequence(), near, torch.randint(0, 3, (BATCH,)))


@program
def one_large_graph() -> Built:
    class Messages(Net):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:  # type: ignore[override]
            return self.inner(torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]))

    def loss(model: Any, b: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(b["x"], b["edges"]), b["x"])

    return Messages(), loss, {"x": points(), "edges": torch.randint(0, BATCH, (2, 11))}


@program
def neighbours_of_nodes() -> Built:
    class Messages(Net):
        def forward(self, x: Tensor, source: Tensor) -> Tensor:  # type: ignore[override]
            return self.inner(x + x[source].mean(1))

    def loss(model: Any, b: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(b["x"], b["source"]), b["x"])

    return Messages(), loss, {"x": points(), "source": torch.randint(0, BATCH, (BATCH, 3))}
