"""A loss computed on parts of a batch is that of the whole, or its division is refused: one
operation at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from argosy.errors import InputError
from argosy.plan.plan import Recompute
from argosy.runtime.graphs.cut import GraphCut
from argosy.runtime.stages.graph_stage import GraphStage
from argosy.runtime.stages.moment import Moment
from argosy.workload.capture.forward import capture_forward

SAMPLES, WIDTH = 6, 4
Loss = Callable[[Tensor, Tensor], Tensor]
DIVIDED: dict[str, Loss] = {
    "mean": lambda h, x: h.mean(),
    "sum": lambda h, x: h.sum(),
    "sum over a number of samples": lambda h, x: h.square().sum() / (len(h) - 1),
    "mean of each, then of all": lambda h, x: h.square().mean(-1).mean(0),
    "mean and a constant": lambda h, x: 3 - 2 * h.mean() + 1,
    "two means": lambda h, x: h.mean() - 0.3 * h.abs().sum(),
    "per column, then a number": lambda h, x: (h.mean(0) * torch.arange(WIDTH)).sum(),
    "weights of the batch": lambda h, x: (h * x).sum() / x.abs().sum(),
    "batch that is normalised": lambda h, x: (h * (x - x.mean(0)) / x.std(0)).mean(),
    "batch that is sorted": lambda h, x: (h * x.sort(0).values).mean(),
    "batch that is shifted": lambda h, x: (h - x.roll(1, 0)).square().mean(),
    "pairs in the batch": lambda h, x: (h.sum(-1) * torch.cdist(x, x).sum(-1)).mean(),
    "position in the batch": lambda h, x: (h.sum(-1) * torch.arange(len(h))).mean(),
    "size of the batch": lambda h, x: h.sum() * len(h),
    "softmax of each": lambda h, x: (h.softmax(-1) * x).sum(-1).mean(),
    "logarithm of sums of each": lambda h, x: h.logsumexp(-1).mean(),
    "norm of each": lambda h, x: F.normalize(h, dim=-1).norm(dim=-1, p=3).mean(),
    "largest of each": lambda h, x: h.max(-1).values.mean() + h.amin(1).mean(),
    "order of each": lambda h, x: (h.sort(-1).values * torch.arange(WIDTH)).mean(),
    "outer product of each": lambda h, x: (
        (h[:, :, None] * x[:, None, :]).flatten(1).square().mean()
    ),
    "reshaped and back": lambda h, x: (
        h.view(-1, 2, 2).transpose(0, 1).reshape(2, -1).view(2, -1, 2).square().mean()
    ),
    "transposed": lambda h, x: (h.T @ x).sum(),
    "in two halves": lambda h, x: torch.cat(torch.cat([h, x]).square().chunk(2), 1).mean(),
    "repeated": lambda h, x: h.repeat_interleave(3, 1).square().mean() + h.repeat(1, 2).mean(),
    "loop over columns": lambda h, x: torch.stack([c.square().sum() for c in h.unbind(1)]).mean(),
    "element by element": lambda h, x: torch.where(x > 0, F.softplus(h), h.clamp(-1, 1)).mean(),
    "index of each": lambda h, x: h.gather(1, x.argmax(-1, keepdim=True)).mean(),
    "smooth": lambda h, x: F.smooth_l1_loss(h, x) + F.huber_loss(h, x, reduction="sum"),
    "chances": lambda h, x: F.binary_cross_entropy(h.sigmoid(), x.sigmoid()),
    "divergence": lambda h, x: F.kl_div(h.log_softmax(-1), x.softmax(-1), reduction="batchmean"),
    "convolution": lambda h, x: (
        F.conv1d(h[:, None], torch.ones(1, 1, 3, dtype=h.dtype)).square().mean()
    ),
    "spectrum of each": lambda h, x: torch.fft.fft(h).abs().mean(),
    "determinant of each": lambda h, x: torch.linalg.det(h.view(-1, 2, 2)).mean(),
    "detached weight": lambda h, x: (h * h.detach().sigmoid()).mean(),
}
"""Losses that can be divided."""
MIXED: dict[str, Loss] = {
    "root of a mean": lambda h, x: h.square().mean().sqrt(),
    "product of means": lambda h, x: h.mean() * h.square().mean(),
    "ratio of sums": lambda h, x: h.sum() / h.square().sum(),
    "logarithm of a mean": lambda h, x: h.exp().mean().log(),
    "clamped mean": lambda h, x: h.mean().clamp(min=0.1),
    "variance": lambda h, x: h.var(0).sum(),
    "centred": lambda h, x: (h - h.mean(0)).abs().mean(),
    "softmax over samples": lambda h, x: (h.softmax(0) * x).sum(),
    "normalised over samples": lambda h, x: (F.normalize(h, dim=0) * x).sum(),
    "running sum": lambda h, x: h.cumsum(0).square().mean(),
    "sorted": lambda h, x: (h.sort(0).values * x).mean(),
    "largest": lambda h, x: h.max() + h.amax(0).sum(),
    "median": lambda h, x: h.median(),
    "product": lambda h, x: (h + 3).prod(0).sum(),
    "norm of all": lambda h, x: h.norm(),
    "first": lambda h, x: h[0].square().sum(),
    "all but the first": lambda h, x: h[1:].square().sum(),
    "every second": lambda h, x: h[::2].square().sum(),
    "neighbours": lambda h, x: (h[1:] - h[:-1]).square().mean(),
    "flipped": lambda h, x: (h.flip(0) * x).mean(),
    "shifted": lambda h, x: (h.roll(1, 0) * h).mean(),
    "indexed": lambda h, x: (h[x.argsort(0)[:, 0]] * x).mean(),
    "scattered": lambda h, x: (
        torch.zeros_like(h).index_add(0, x.argsort(0)[:, 0], h).square().mean()
    ),
    "similarities": lambda h, x: (h @ h.T).logsumexp(-1).mean(),
    "correlations": lambda h, x: (h.T @ h).square().sum(),
    "distances": lambda h, x: torch.cdist(h, h).mean(),
    "all elements in one row": lambda h, x: h.flatten().softmax(0).square().sum(),
    "pairs of samples": lambda h, x: (
        h.view(-1, 2 * WIDTH).softmax(-1).square().sum() if len(h) % 2 == 0 else h.sum()
    ),
    "statistics of groups": lambda h, x: F.batch_norm(h, None, None, training=True).abs().mean(),
}
"""Losses that cannot."""


@pytest.mark.parametrize("name", [*DIVIDED, *MIXED])
def test_a_divided_loss_is_that_of_the_whole_or_refused(name: str) -> None:
    loss = DIVIDED.get(name) or MIXED[name]
    torch.manual_seed(1)
    model, batch = nn.Linear(WIDTH, WIDTH).double(), torch.randn(SAMPLES, WIDTH).double()

    def of_model(net: nn.Module, x: Tensor) -> Tensor:
        return loss(net(x), x)

    try:
        forward = capture_forward(model, of_model, batch, device=torch.device("cpu"))
        cut = GraphCut(forward, [0] * len(forward.graph.nodes), 1)
        cut.check_divided([3], 1)
    except InputError:
        assert name in MIXED
        return
    assert name in DIVIDED
    whole = of_model(model, batch)
    wanted = torch.autograd.grad(whole, list(model.parameters()), allow_unused=True)
    stage = GraphStage(cut, 0, model, recompute=Recompute.NONE, device=torch.device("cpu"), seed=0)
    stage.begin(batch, Moment(0, 0, SAMPLES, SAMPLES))
    first, total = 0, torch.zeros((), dtype=torch.float64)
    for count in (3, 2, 1):
        part = stage(None, batch[first : first + count], Moment(0, first, count, SAMPLES))
        total = total + part * (count / SAMPLES)  # type: ignore[operator]
        first += count
    found = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(total, whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


class ScaledLookup(nn.Module):
    """Gradients of its rows are divided by how often a batch looks them up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.table, scale_grad_by_freq=True)


def test_look_ups_scaled_by_the_batch_are_not_divided() -> None:
    forward = capture_forward(
        ScaledLookup(),
        lambda model, x: model(x).square().mean(),
        torch.randint(0, 4, (SAMPLES, 3)),
        device=torch.device("cpu"),
    )
    with pytest.raises(InputError, match=r"aten\.embedding\.default.*combines samples"):
        GraphCut(forward, [0] * len(forward.graph.nodes), 1).check_divided([3], 1)
