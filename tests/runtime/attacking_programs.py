"""Training programs that hide statistics of the batch: in counts, in gradients, in seeds, in
buffers and in backwards of their own."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from runtime.model_programs import sequence, words
from runtime.own_programs import (
    BATCH,
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
from torch.func import functional_call, jacrev, vmap


def errors(model: Any, x: Tensor) -> Tensor:
    """One number per sample."""
    return (model(x) - x).square().mean(-1)


def counted() -> Tensor:
    return torch.tensor([1, 0, 1, 1, 0, 1.0])


class Normed(torch.autograd.Function):
    """A backward that is not linear in its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] / gradients[0].norm()


class BySize(torch.autograd.Function):
    """A backward that depends on the number of samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.count = len(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.count


@program
def normed_gradient() -> Built:
    def loss(model: Any, x: Tensor) -> Tensor:
        first, act, last = model.inner
        return F.mse_loss(last(Normed.apply(act(first(x)))), x)

    return Net(), loss, points()


@program
def gradient_by_the_size() -> Built:
    return Net(), lambda model, x: BySize.apply(model(x)).square().mean(), points()


@program
def sum_over_a_count_and_a_half() -> Built:
    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        return (errors(model, b[0]) * b[1]).sum() / (b[1].sum() + 0.5)

    return Net(), loss, (points(), counted())


@program
def two_masked_means() -> Built:
    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        found, other = errors(model, b[0]), 1 - b[1]
        return (found * b[1]).sum() / b[1].sum() + 0.3 * (found * other).sum() / other.sum()

    return Net(), loss, (points(), counted())


@program
def means_over_own_lengths() -> Built:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word = nn.Embedding(WORDS, WIDTH, padding_idx=0)
            self.inner = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(2 * WIDTH, WORDS)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(self.word(x))[0])

    x = words()
    x[:, 0], x[0, 3:], x[4, 1:] = 3, 0, 0

    def loss(model: Any, x: Tensor) -> Tensor:
        found, real = F.cross_entropy(model(x).transpose(1, 2), x, reduction="none"), x != 0
        return ((found * real).sum(1) / real.sum(1)).mean()

    return Both(), loss, x


@program
def correlations_of_two_views() -> Built:
    """Barlow twins."""

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        one, two = ((out - out.mean(0)) / out.std(0) for out in map(model, b))
        both = one.T @ two / len(one)
        return (both - torch.eye(WIDTH)).square().sum()

    return Net(), loss, (points(), points())


@program
def running_sums_over_the_batch() -> Built:
    return Net(), lambda model, x: model(x).cumsum(0).square().mean(), points()


@program
def weighted_by_rank() -> Built:
    def loss(model: Any, x: Tensor) -> Tensor:
        return (errors(model, x).sort().values * torch.arange(1.0, len(x) + 1)).mean()

    return Net(), loss, points()


@program
def the_three_hardest() -> Built:
    return Net(), lambda model, x: errors(model, x).topk(3).values.mean(), points()


@program
def centred_teacher() -> Built:
    """DINO: a teacher of averages whose outputs are centred by a buffer."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = perceptron()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
            self.register_buffer("center", torch.zeros(WIDTH))

    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(model.teacher.parameters(), model.student.parameters(), strict=True)
            for old, new in pairs:
                old.mul_(0.9).add_(new, alpha=0.1)
            out = model.teacher(x)
            goal = ((out - model.center) / 0.1).softmax(-1)
            model.center.mul_(0.9).add_(out.mean(0), alpha=0.1)
        return -(goal * model.student(x).log_softmax(-1)).sum(-1).mean()

    return Centred(), loss, points()


@program
def one_inner_step() -> Built:
    """MAML: the loss after one step on the same samples."""

    def loss(model: Any, x: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        slopes = torch.autograd.grad(squared(model, x), list(weights.values()), create_graph=True)
        moved = {
            name: weight - 0.1 * slope
            for (name, weight), slope in zip(weights.items(), slopes, strict=True)
        }
        return F.mse_loss(functional_call(model, moved, (x,)), x)

    return Net(), loss, points()


@program
def slopes_of_every_sample() -> Built:
    def loss(model: Any, x: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        slopes = vmap(jacrev(lambda row: functional_call(model, weights, (row,))))(x)
        return squared(model, x) + 0.1 * slopes.square().mean()

    return Net(), loss, points()


@program
def seeded_in_forward() -> Built:
    class Seeded(Net):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(7)
            return self.inner(F.dropout(x, 0.5))

    return Seeded(), squared, points()


@program
def advantages_of_the_batch() -> Built:
    """Statistics of what is given, which no weight changes, are taken over the whole batch."""

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        gain = (b[1] - b[1].mean()) / (b[1].std() + 1e-8)
        return -(model(b[0]).log_softmax(-1)[:, 0] * gain).mean()

    return Net(), loss, (points(), torch.randn(BATCH))


@program
def samples_of_one_graph() -> Built:
    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        return torch.zeros(3, WIDTH).index_add(0, b[1], model(b[0])).square().mean()

    return Net(), loss, (points(), torch.tensor([0, 1, 0, 1, 2, 0]))


@program
def rows_kept_short() -> Built:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.inner = nn.Embedding(WORDS, WIDTH, max_norm=1.0), perceptron(WORDS)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.word(x))

    def loss(model: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), x.flatten())

    return Short(), loss, words()


@program
def two_players() -> Built:
    """A generator against frozen copies of the critic's weights."""

    class Players(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.critic = perceptron(), perceptron(1)

    def loss(model: Any, x: Tensor) -> Tensor:
        made = model.maker(x)
        critic = F.softplus(-model.critic(x)) + F.softplus(model.critic(made.detach()))
        frozen = {name: weight.detach() for name, weight in model.critic.named_parameters()}
        return (critic + F.softplus(-functional_call(model.critic, frozen, (made,)))).mean()

    return Players(), loss, points()


@program
def masked_tokens() -> Built:
    """A masked autoencoder: random tokens of every sample are hidden."""

    def loss(model: Any, x: Tensor) -> Tensor:
        kept = torch.rand(x.shape[:2]).argsort(1) < 3
        made = model(x * kept.unsqueeze(-1))
        return (errors(lambda _: made, x) * ~kept).sum() / (~kept).sum()

    return Net(), loss, sequence()


@program
def loss_over_its_own_mean() -> Built:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

    def loss(model: Any, x: Tensor) -> Tensor:
        found = squared(model, x)
        with torch.no_grad():
            model.scale.mul_(0.9).add_(found.detach(), alpha=0.1)
        return found / model.scale

    return Scaled(), loss, points()


@program
def loss_of_every_sample() -> Built:
    return Net(), errors, points()
