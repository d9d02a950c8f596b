"""Training programs of many kinds as people write them: ``build() -> (model, loss, batch)``.

Every batch has 6 samples. A program that cannot be divided or captured is here too: it has to be
refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

BATCH, WIDTH, TIME, WORDS = 6, 8, 5, 17
Built = tuple[nn.Module, Callable[[Any, Any], Tensor], Any]
PROGRAMS: dict[str, Callable[[], Built]] = {}


def program(build: Callable[[], Built]) -> Callable[[], Built]:
    PROGRAMS[build.__name__] = build
    return build


def perceptron(outputs: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, outputs))


class Net(nn.Module):
    """A model that is no ``nn.Sequential``, so that it is captured."""

    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__()
        self.inner = perceptron(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def points() -> Tensor:
    return torch.randn(BATCH, WIDTH)


def squared(model: Any, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x)


# losses


@program
def mean_loss() -> Built:
    return Net(), squared, points()


@program
def sum_loss() -> Built:
    return Net(), lambda model, x: ((model(x) - x) ** 2).sum(), points()


@program
def sum_over_a_number() -> Built:
    return Net(), lambda model, x: ((model(x) - x) ** 2).sum() / 10, points()


@program
def mean_with_a_penalty_on_weights() -> Built:
    def loss(model: Any, x: Tensor) -> Tensor:
        return squared(model, x) + 0.1 * sum(p.square().sum() for p in model.parameters())

    return Net(), loss, points()


@program
def root_of_the_mean() -> Built:
    return Net(), lambda model, x: squared(model, x).sqrt(), points()


@program
def contrastive() -> Built:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = (F.normalize(model(x), dim=-1) for x in batch)
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))

    return Net(), loss, (points(), points())


@program
def sample_in_its_place() -> Built:
    return Net(), lambda model, x: (model(x).sum(-1) * torch.arange(len(x))).mean(), points()


@program
def largest_of_the_batch() -> Built:
    return Net(), lambda model, x: (model(x) - x).abs().max(), points()


@program
def shuffled_negatives() -> Built:
    def loss(model: Any, x: Tensor) -> Tensor:
        made = model(x)
        return F.relu(1 + (made * x).sum(-1) - (made * x.roll(1, 0)).sum(-1)).mean()

    return Net(), loss, points()


@program
def labels_that_do_not_count() -> Built:
    labels = torch.randint(0, 4, (BATCH, TIME))
    labels[0, 1:] = -100
    labels[3, 3:] = -100

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return Net(4), loss, (torch.randn(BATCH, TIME, WIDTH), labels)


@program
def mean_over_what_is_masked() -> Built:
    mask = (torch.rand(BATCH, TIME) > 0.3).double()

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        each = (model(batch["x"]) - batch["x"]).square().mean(-1)
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    return Net(), loss, {"x": torch.randn(BATCH, TIME, WIDTH), "mask": mask}


@program
def classes_with_weights() -> Built:
    weight = torch.tensor([0.1, 1.0, 3.0, 0.5])
    x, labels = points(), torch.randint(0, 4, (BATCH,))
    return Net(4), lambda model, b: F.cross_entropy(model(b[0]), b[1], weight=weight), (x, labels)


@program
def smoothed_labels() -> Built:
    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(b[0]), b[1], label_smoothing=0.1)

    return Net(4), loss, (points(), torch.randint(0, 4, (BATCH,)))


@program
def connectionist_temporal() -> Built:
    labels = torch.randint(1, 4, (BATCH, 2))

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        log = model(b[0]).log_softmax(-1).transpose(0, 1)
        count = log.shape[1]
        return F.ctc_loss(log, b[1], torch.full((count,), TIME), torch.full((count,), 2))

    return Net(4), loss, (torch.randn(BATCH, TIME, WIDTH), labels)


# reinforcement


@program
def clipped_policy() -> Built:
    """Advantages are normalised over the batch, which they are part of."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.act, self.value = perceptron(), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            seen = torch.relu(self.body(x))
            return self.act(seen).log_softmax(-1), self.value(seen).squeeze(-1)

    def loss(model: Any, b: dict[str, Tensor]) -> Tensor:
        log, value = model(b["x"])
        gain = (b["gain"] - b["gain"].mean()) / (b["gain"].std() + 1e-8)
        ratio = (log.gather(-1, b["action"][:, None]).squeeze(-1) - b["old"]).exp()
        clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        entropy = -(log.exp() * log).sum(-1).mean()
        return -clipped + 0.5 * F.mse_loss(value, b["return"]) - 0.01 * entropy

    batch = {"x": points(), "gain": torch.randn(BATCH), "action": torch.randint(0, 3, (BATCH,))}
    return Policy(), loss, batch | {"old": -torch.rand(BATCH), "return": torch.randn(BATCH)}


@program
def target_network() -> Built:
    """A target by the same network under ``no_grad``, and one by a frozen copy."""

    class Values(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = perceptron(3)
            self.target = copy.deepcopy(self.online).requires_grad_(False)

    def loss(model: Any, b: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            best = model.online(b["next"]).argmax(-1, keepdim=True)
            goal = b["reward"] + 0.9 * model.target(b["next"]).gather(-1, best).squeeze(-1)
            goal = goal + 0.1 * model.online(b["next"]).mean(-1)
        return F.smooth_l1_loss(model.online(b["x"])[:, 0], goal)

    return Values(), loss, {"x": points(), "next": points(), "reward": torch.randn(BATCH)}


# custom differentiation


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.scale * grad, None


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


@program
def gradient_reversal() -> Built:
    class Domains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.task, self.domain = (
                perceptron(),
                nn.Linear(WIDTH, 3),
                nn.Linear(WIDTH, 2),
            )

    def loss(model: Any, b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        seen = model.body(b[0])
        other = F.cross_entropy(model.domain(Reversed.apply(seen, 0.7)), b[2])
        return F.cross_entropy(model.task(seen), b[1]) + other

    return Domains(), loss, (points(), torch.randint(0, 3, (BATCH,)), torch.randint(0, 2, (BATCH,)))


@program
def binary_neurons() -> Built:
    class Binary(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner[2](Straight.apply(self.inner[0](x)))

    return Binary(), squared, points()


@program
def nearest_codes() -> Built:
    class Codes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Embedding(9, WIDTH)
            self.back = nn.Linear(WIDTH, WIDTH)

    def loss(model: Any, x: Tensor) -> Tensor:
        made = model(x)
        code = model.codes(torch.cdist(made, model.codes.weight).argmin(-1))
        through = made + (code - made).detach()
        commit = F.mse_loss(made, code.detach()) + F.mse_loss(code, made.detach())
        return F.mse_loss(model.back(through), x) + 0.25 * commit

    return Codes(), loss, points()


@program
def gradient_penalty() -> Built:
    def loss(model: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * (slope.norm(dim=-1) - 1).square().mean()

    return Net(1), loss, points()


# random numbers


@program
def variational() -> Built:
    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = perceptron(2 * WIDTH), perceptron()

    def loss(model: Any, x: Tensor) -> Tensor:
        mean, log = model.into(x).chunk(2, -1)
        made = model.out(mean + torch.randn_like(mean) * (0.5 * log).exp())
        prior = -0.5 * (1 + log - mean.square() - log.exp()).sum(-1).mean()
        return F.mse_loss(made, x) + 0.1 * prior

    return Variational(), loss, points()


@program
def diffusion() -> Built:
    def loss(model: Any, x: Tensor) -> Tensor:
        time = torch.randint(0, 10, (len(x),))
        noise = torch.randn(x.shape)
        share = (time / 10).to(x.dtype)[:, None]
        return F.mse_loss(model(x * (1 - share) + noise * share), noise)

    return Net(), loss, points()


@program
def dropout() -> Built:
    class Dropping(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner[2](F.dropout(torch.tanh(self.inner[0](x)), 0.3, self.training))

    return Dropping(), squared, points()


@program
def sampled_actions() -> Built:
    """Actions are drawn in the loss, weighed by what they are worth."""

    def loss(model: Any, x: Tensor) -> Tensor:
        log = model(x).log_softmax(-1)
        action = torch.distributions.Categorical(logits=log.detach()).sample()
        worth = x.gather(-1, action[:, None]).squeeze(-1)
        return -(log.gather(-1, action[:, None]).squeeze(-1) * worth).mean()

    return Net(), loss, points()


@program
def shuffled_pairs() -> Built:
    """Mixup: samples of the batch are combined with others before any weight is used."""

    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        other, share = torch.randperm(len(b[0])), torch.rand(len(b[0]), 1)
        made = model(b[0] * share + b[0][other] * (1 - share))
        one, two = (
            F.cross_entropy(made, b[1], reduction="none"),
            F.cross_entropy(made, b[1][other], reduction="none"),
        )
        return (one * share.squeeze(-1) + two * (1 - share.squeeze(-1))).mean()

    return Net(4), loss, (points(), torch.randint(0, 4, (BATCH,)))


# what has to be refused


@program
def generator_in_the_loss() -> Built:
    own = torch.Generator().manual_seed(2)
    return Net(), lambda model, x: squared(model, x + torch.randn(x.shape, generator=own)), points()


@program
def counter_that_is_no_buffer() -> Built:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.steps = torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return self.inner(x) / self.steps

    return Counting(), squared, points()


@program
def weights_changed_in_the_loss() -> Built:
    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.inner[0].weight.clamp_(-0.1, 0.1)
        return squared(model, x)

    return Net(), loss, points()
