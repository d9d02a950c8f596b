"""Training programs as strangers write them: many parts at once, views, shapes, losses of two
kinds, and state of their own."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from runtime.model_programs import sequence, words
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


@program
def two_towers_with_one_scale() -> Built:
    """CLIP: two towers and a learned scale; similarities of all pairs of the batch."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = perceptron(), nn.EmbeddingBag(WORDS, WIDTH)
            self.scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        image, text = F.normalize(model.image(b[0])), F.normalize(model.text(b[1]))
        alike = model.scale.exp() * image @ text.T
        goal = torch.arange(len(alike))
        return (F.cross_entropy(alike, goal) + F.cross_entropy(alike.T, goal)) / 2

    return Towers(), loss, (points(), words())


@program
def padded_lstm_with_last_state() -> Built:
    """The last real step of each sequence is found by its length."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word = nn.Embedding(WORDS, WIDTH, padding_idx=0)
            self.inner = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            states, _ = self.inner(self.word(x))
            last = (x != 0).sum(1).clamp(min=1) - 1
            return self.head(states[torch.arange(len(x)), last])

    x = words()
    x[0, 3:] = 0
    x[4, 1:] = 0

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(b[0]), b[1])

    return Last(), loss, (x, torch.randint(0, 3, (BATCH,)))


@program
def mixing_by_fourier() -> Built:
    """FNet: tokens are mixed by a transform instead of attention."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(WIDTH), perceptron()

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x + torch.fft.fft2(x, dim=(-2, -1)).real)
            return x + self.inner(x)

    return Mixing(), squared, sequence()


class Clipped(torch.autograd.Function):
    """A custom function with two inputs, one of them a parameter, as of learned quantisation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: Tensor) -> Tensor:
        ctx.save_for_backward(x, bound)
        return torch.maximum(torch.minimum(x, bound), -bound)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, bound = ctx.saved_tensors
        within = x.abs() <= bound
        outside = (grad * x.sign() * ~within).sum(0)
        return grad * within, outside


@program
def learned_clipping() -> Built:
    class Quantised(Net):
        def __init__(self) -> None:
            super().__init__()
            self.bound = nn.Parameter(torch.full((2 * WIDTH,), 0.4))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[2](Clipped.apply(self.inner[0](x), self.bound))

    return Quantised(), squared, points()


@program
def control_flow_on_shapes() -> Built:
    class Shapes(Net):
        def forward(self, x: Tensor) -> Tensor:
            while x.shape[1] > 2:
                even = x.shape[1] - x.shape[1] % 2
                joined = x[:, :even].unflatten(1, (-1, 2)).mean(2)
                x = torch.cat([self.inner(joined), x[:, even:]], 1)
            return x.flatten(1) if x.ndim > 2 and x.shape[-1] == WIDTH else x

    return Shapes(), lambda model, x: model(x).square().mean(), sequence()


@program
def summed_loss_over_its_labels() -> Built:
    """A sum over labels that count, divided by how many there are in the batch."""
    labels = torch.randint(0, WORDS, (BATCH, TIME))
    labels[1, 2:] = -100
    labels[5] = -100

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        summed = F.cross_entropy(
            model(b[0]).flatten(0, 1), b[1].flatten(), reduction="sum", ignore_index=-100
        )
        return summed / (b[1] != -100).sum()

    return Net(WORDS), loss, (sequence(), labels)


@program
def experts_by_top_two() -> Built:
    """A mixture of experts by masks, with a loss that balances them over the batch."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(perceptron() for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            share = self.gate(x).softmax(-1)
            best = share.topk(2, -1)
            kept = torch.zeros_like(share).scatter(-1, best.indices, best.values)
            made = torch.stack([expert(x) for expert in self.experts], -1)
            return (made * kept.unsqueeze(-2)).sum(-1), share

    def loss(model: Any, x: Tensor) -> Tensor:
        made, share = model(x)
        return F.mse_loss(made, x) + 0.01 * 3 * share.mean(0).square().sum()

    return Experts(), loss, points()


@program
def triplets_with_a_margin() -> Built:
    def loss(model: Any, b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.triplet_margin_loss(*(model(x) for x in b), margin=0.5)

    return Net(), loss, (points(), points(), points())


@program
def matrix_factors_with_biases() -> Built:
    """Recommendation: users, items and a global mean."""

    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(9, WIDTH), nn.Embedding(13, WIDTH)
            self.bias = nn.ParameterDict(
                {"user": nn.Parameter(torch.zeros(9)), "item": nn.Parameter(torch.zeros(13))}
            )
            self.register_buffer("mean", torch.tensor(3.5))

        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            fit = torch.einsum("bd,bd->b", self.user(user), self.item(item))
            return fit + self.bias["user"][user] + self.bias["item"][item] + self.mean

    def loss(model: Any, b: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(b["user"], b["item"]), b["stars"])

    batch = {"user": torch.randint(0, 9, (BATCH,)), "item": torch.randint(0, 13, (BATCH,))}
    return Factors(), loss, batch | {"stars": torch.randint(1, 6, (BATCH,)).double()}


@program
def attention_by_hand_with_a_cache_of_masks() -> Built:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.masks: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            count, time, _ = x.shape
            if time not in self.masks:
                self.masks[time] = torch.ones(time, time).tril() == 0
            q, k, v = self.mix(x).view(count, time, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
            scores = q @ k.mT / math.sqrt(WIDTH // 2)
            scores = scores.masked_fill(self.masks[time], -torch.inf)
            return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))

    return Attend(), squared, sequence()


@program
def distilled_from_a_frozen_teacher() -> Built:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = perceptron(5), perceptron(5).requires_grad_(False)
            self.teacher.eval()

    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            goal = (model.teacher(x) / 2).log_softmax(-1)
        made = (model.student(x) / 2).log_softmax(-1)
        return 4 * F.kl_div(made, goal, log_target=True, reduction="batchmean")

    return Distilled(), loss, points()


@program
def variance_and_covariance() -> Built:
    """VICReg: the variance and the covariance of the batch are part of the loss."""

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        one, two = model(b[0]), model(b[1])
        spread = F.relu(1 - one.var(0).add(1e-4).sqrt()).mean()
        centred = one - one.mean(0)
        mixed = centred.T @ centred / (len(one) - 1)
        return F.mse_loss(one, two) + spread + mixed.fill_diagonal_(0).square().sum() / WIDTH

    return Net(), loss, (points(), points())


@program
def wasserstein_critic_with_clipped_weights() -> Built:
    """The weights are clipped by a parametrisation instead of in place."""

    class Bounded(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.clamp(-0.3, 0.3)

    class Critic(Net):
        def __init__(self) -> None:
            super().__init__(1)
            nn.utils.parametrize.register_parametrization(self.inner[0], "weight", Bounded())

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        return model(b[0]).mean() - model(b[1]).mean()

    return Critic(), loss, (points(), points())


@program
def counted_by_a_buffer() -> Built:
    """A running mean, as of value normalisation, updated in ``forward`` from the batch."""

    class Running(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(WIDTH))
            self.register_buffer("count", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.count += 1
                self.seen += (x.mean(0) - self.seen) / self.count
            return self.inner(x - self.seen)

    return Running(), squared, points()


@program
def images_with_instance_norm() -> Built:
    """Every channel of every sample is normalised, which torch writes as a norm of the batch."""

    class Styled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=2)
            self.norm, self.bare = nn.InstanceNorm2d(4, affine=True), nn.InstanceNorm2d(4)
            self.head = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu6(self.norm(self.first(x)))
            return self.head(self.bare(self.second(x)).amax((2, 3)))

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(b[0]), b[1], label_smoothing=0.1)

    return Styled(), loss, (torch.randn(BATCH, 3, 8, 8), torch.randint(0, 5, (BATCH,)))


@program
def answers_at_positions() -> Built:
    """Each sample has several positions of its own, which are read with its number."""

    class Answers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word = nn.Embedding(WORDS, WIDTH)
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            states = torch.tanh(self.inner(self.word(x)))
            return self.head(states[torch.arange(len(x))[:, None], at])

    def loss(model: Any, b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(b[0], b[1]).flatten(0, 1), b[2].flatten())

    x = words()
    at = torch.randint(0, x.shape[1], (BATCH, 2))
    return Answers(), loss, (x, at, torch.randint(0, 3, (BATCH, 2)))


@program
def rows_of_neighbours() -> Built:
    """Each sample is compared with the one before it, whose number is its own less 1."""

    class Neighbours(Net):
        def forward(self, x: Tensor) -> Tensor:
            states = self.inner(x)
            return states - states[torch.arange(len(x)) - 1]

    return Neighbours(), squared, points()
