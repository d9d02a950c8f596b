"""What the number of steps between exchanges does to the loss of a small GPT on real text.

``python -m benchmarks.islands_loss [STEPS [NAME ...]]``, all rows or those whose names contain one
of these: two islands with shares of 3:1 of every batch, each with AdamW, and the outer optimizer of
the product (``runtime.islands.outer``), against AdamW on the whole batch, with exact gradients and
with those of PowerSGD (``runtime.weights.powersgd``). The text is the Markdown of this repository's
``docs/``; its last tenth is held out. All runs see the same batches in the same order, so that
losses are compared after the same number of tokens. One process stands for all islands and
replicas: tests/runtime/test_islands.py and test_powersgd.py show that processes compute the same.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from argosy.plan.islands import Compression, OuterOptimizer
from argosy.runtime.islands.codec import decode, encode
from argosy.runtime.islands.outer import OuterState
from argosy.runtime.stages.parameters import Weight
from argosy.runtime.weights.powersgd import FactoredSum
from argosy.runtime.weights.summing import Done, Way

WIDTH, LENGTH, LAYERS, HEADS = 48, 32, 2, 4
SAMPLES = 16
SHARES = (12, 4)
SEEDS = (0, 1)
RATE = 2e-3


NESTEROV = OuterOptimizer()
PLAIN = OuterOptimizer(learning_rate=1.0, momentum=0.0, nesterov=False)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One algorithm."""

    name: str
    every: int = 0
    """Steps between exchanges; 0: synchronous."""
    outer: OuterOptimizer = NESTEROV
    overlap: int = 0
    compression: Compression = Compression.NONE
    shares: tuple[int, ...] = SHARES
    powersgd: int = 0
    """Rank of the matrices as which synchronous gradients are summed; 0: as they are."""


SETTINGS = (
    Setting(name="synchronous"),
    Setting(name="synchronous, PowerSGD 1", powersgd=1),
    Setting(name="synchronous, PowerSGD 4", powersgd=4),
    Setting(name="H = 1, mean", every=1, outer=PLAIN),
    Setting(name="H = 10, mean", every=10, outer=PLAIN),
    Setting(name="H = 50, mean", every=50, outer=PLAIN),
    Setting(name="H = 100, mean", every=100, outer=PLAIN),
    Setting(name="H = 10, Nesterov 0.7, 0.9", every=10),
    Setting(name="H = 50, Nesterov 0.7, 0.9", every=50),
    Setting(name="H = 100, Nesterov 0.7, 0.9", every=100),
    Setting(name="H = 50, mean, equal shares", every=50, outer=PLAIN, shares=(8, 8)),
    Setting(name="H = 50, mean, int8", every=50, outer=PLAIN, compression=Compression.INT8),
    Setting(name="H = 50, mean, 10 steps late", every=50, outer=PLAIN, overlap=10),
)


class Gpt(nn.Module):
    """Embedding, blocks of attention and feed-forward, head."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, codes: Tensor) -> Tensor:
        hidden = self.letters(codes) + self.places
        result: Tensor = self.head(self.norm(self.blocks(hidden, mask=self.mask, is_causal=True)))
        return result


class Text:
    """Letters of the documentation as numbers, cut into what is trained on and what is held out."""

    def __init__(self) -> None:
        folder = Path(__file__).parents[1] / "docs"
        text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md")))
        letters = sorted(set(text))
        index = {letter: at for at, letter in enumerate(letters)}
        codes = torch.tensor([index[letter] for letter in text])
        self.num_letters = len(letters)
        end = len(codes) * 9 // 10
        self.trained, self.held_out = codes[:end], codes[end:]

    def batch(self, seed: int, step: int) -> Tensor:
        return _windows(
            self.trained, SAMPLES, torch.Generator().manual_seed(1_000_003 * seed + step)
        )

    def test_batch(self) -> Tensor:
        return _windows(self.held_out, 256, torch.Generator().manual_seed(7))


def _windows(codes: Tensor, count: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(codes) - LENGTH - 1, (count,), generator=generator)
    return torch.stack([codes[start : start + LENGTH + 1] for start in starts.tolist()])


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(setting: Setting, text: Text, seed: int, steps: int) -> float:
    """The loss on held-out text after so many steps."""
    torch.manual_seed(seed)
    shared = Gpt(text.num_letters)
    shares = setting.shares if setting.every else (SAMPLES,)
    islands = [copy.deepcopy(shared) for _ in shares]
    inner = [torch.optim.AdamW(island.parameters(), lr=RATE) for island in islands]
    outer = OuterState(optimizer=setting.outer, theta=[_flat(shared)])
    factored = _factored(islands[0], setting.powersgd) if setting.powersgd else None
    due = -1
    for step in range(1, steps + 1):
        parts = text.batch(seed, step).split(shares)
        for island, optimizer, rows in zip(islands, inner, parts, strict=True):
            loss_of(island, rows).backward()
            if factored is not None:
                factored.finish()
            optimizer.step()
            optimizer.zero_grad()
        if step == due:
            _use(outer, islands, mixing=0.5)
        if setting.every and (step % setting.every == 0 or step == steps):
            late = setting.overlap if step < steps else 0
            _exchange(outer, islands, shares, setting.compression)
            due = step + late
            if not late:
                _use(outer, islands, mixing=0.0)
    with torch.no_grad():
        return loss_of(islands[0], text.test_batch()).item()


class _Alone:
    """A sum over one holder."""

    def begin(self, vector: Tensor) -> Done:
        return Done()


def _factored(model: nn.Module, rank: int) -> FactoredSum:
    """The gradients of one process through the factors of the product
    (``runtime.weights.powersgd``)."""
    weights = [Weight(name, parameter, (0,), ()) for name, parameter in model.named_parameters()]
    return FactoredSum(cast(Way, _Alone()), weights, rank, 0, 1)


def _flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _exchange(
    outer: OuterState, islands: Sequence[nn.Module], shares: Sequence[int], code: Compression
) -> None:
    mean = torch.zeros_like(outer.theta[0])
    for island, share in zip(islands, shares, strict=True):
        delta = outer.theta[0] - _flat(island)
        rounded = decode(encode(delta, code), delta.numel(), delta.dtype, code)
        mean.add_(rounded, alpha=share / sum(shares))
    outer.apply(0, mean)


def _use(outer: OuterState, islands: Sequence[nn.Module], *, mixing: float) -> None:
    for island in islands:
        value = torch.lerp(outer.theta[0], _flat(island), mixing)
        nn.utils.vector_to_parameters(value, island.parameters())


def main(steps: int, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    text = Text()
    sys.stdout.write(f"{steps} steps of {SAMPLES} x {LENGTH} tokens, {len(SEEDS)} seeds\n")
    for setting in SETTINGS:
        if names and not any(name in setting.name for name in names):
            continue
        losses = [train(setting, text, seed, steps) for seed in SEEDS]
        spread = max(losses) - min(losses)
        sys.stdout.write(f"{setting.name:<28} {statistics.mean(losses):.3f}  spread {spread:.3f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400, sys.argv[2:])
