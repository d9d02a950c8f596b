"""Optimizer state and activations in host memory: training is the same, and devices hold what is
predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from runtime.frozen_cases import Tuned, held_and_peak
from runtime.rank_pool import RankPool
from runtime.training_cases import Case, differences, train_in_parallel
from torch import nn

from argosy.cost.memory import state_bytes
from argosy.errors import InputError
from argosy.measure.allocated import Allocations
from argosy.measure.profile import ProfileSettings, profile_model
from argosy.plan.plan import Recompute
from argosy.runtime.stages.compiling import check_compilable
from argosy.runtime.stages.stage import recomputed
from argosy.runtime.weights import host_state
from argosy.runtime.weights.host_memory import HostBuffers
from argosy.runtime.weights.host_state import HostState
from argosy.runtime.weights.kept_on_host import HostActivations
from argosy.units import MIB
from benchmarks.memory_ledger import peak_bytes

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda held: torch.optim.AdamW(held, lr=0.1),
    "amsgrad": lambda held: torch.optim.Adam(held, lr=0.1, amsgrad=True, weight_decay=0.1),
    "momentum": lambda held: torch.optim.SGD(held, lr=0.1, momentum=0.9),
    "sgd": lambda held: torch.optim.SGD(held, lr=0.1),
    "adafactor": lambda held: torch.optim.Adafactor(held, lr=0.1),
}


def weights_and_gradients(seed: int) -> list[nn.Parameter]:
    """Weights of several shapes, one that is not contiguous and one without a gradient."""
    torch.manual_seed(seed)
    shapes = [(40, 30), (7,), (100,), (3, 3, 3)]
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    weights += [nn.Parameter(torch.randn(20, 30).t()), nn.Parameter(torch.randn(5))]
    return weights


def give_gradients(weights: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for weight in weights[:-1]:
        weight.grad = torch.randn(weight.shape)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_in_pieces_is_the_same_to_the_bit(name: str) -> None:
    """Pieces of 1 KiB cut the first weight in ten; one group has another learning rate."""
    plain, pieced = weights_and_gradients(0), weights_and_gradients(0)

    def made(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS[name](weights[:3])
        optimizer.add_param_group({"params": weights[3:], "lr": 0.01})
        return optimizer

    optimizer, offloaded = made(plain), made(pieced)
    state = HostState(CPU, HostBuffers(CPU))
    with mock.patch.object(host_state, "PIECE_BYTES", 1024):
        for step in range(3):
            give_gradients(plain, step)
            give_gradients(pieced, step)
            optimizer.step()
            state.step(offloaded)
    for one, other in zip(plain, pieced, strict=True):
        assert torch.equal(one, other)
    wanted, found = optimizer.state_dict(), offloaded.state_dict()
    assert wanted["param_groups"] == found["param_groups"]
    assert wanted["state"].keys() == found["state"].keys()
    for key, entry in wanted["state"].items():
        for what, value in entry.items():
            assert torch.equal(
                torch.as_tensor(value), torch.as_tensor(found["state"][key][what])
            ), (key, what)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_updated_in_groups_are_the_same_to_the_bit(name: str) -> None:
    """Groups of 1 KiB of state hold one of the larger weights, or several small ones."""
    plain, grouped = weights_and_gradients(0), weights_and_gradients(0)
    optimizer, other = OPTIMIZERS[name](plain), OPTIMIZERS[name](grouped)
    with mock.patch.object(host_state, "UPDATED_BYTES", 1024):
        for step in range(3):
            give_gradients(plain, step)
            give_gradients(grouped, step)
            optimizer.step()
            host_state.update_weights(other, None)
    for one, two in zip(plain, grouped, strict=True):
        assert torch.equal(one, two)
    assert other.param_groups[0]["params"] == grouped
    assert optimizer.state_dict()["state"].keys() == other.state_dict()["state"].keys()


def test_an_update_holds_the_temporary_bytes_of_one_group() -> None:
    """Eight weights of 1 MiB; torch's AdamW has a copy of each weight that it updates at a time."""
    weights = [nn.Parameter(torch.randn(2**18)) for _ in range(8)]
    optimizer = torch.optim.AdamW(weights, foreach=True)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    with (
        mock.patch.object(host_state, "UPDATED_BYTES", 4 * MIB),
        Allocations(CPU) as allocations,
    ):
        optimizer.step()
        allocations.mark()
        host_state.update_weights(optimizer, None)
    at_once, in_groups = (segment.peak - segment.start for segment in allocations.segments)
    assert at_once == pytest.approx(8 * MIB, rel=0.01)
    assert in_groups == pytest.approx(2 * MIB, rel=0.01)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_gradients_of_activations_that_were_away_are_the_same_to_the_bit(
    recompute: Recompute,
) -> None:
    """Two micro-batches at a time; host memory is used again, and none is left in use."""
    model, loss_fn, batch = Tuned(adapted=None).built()
    parts = batch.chunk(3)
    layers = [recomputed(recompute, layer, draws=False) for layer in model]

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        return loss_fn(lambda carry: _through(layers, carry), tokens)

    for part in parts:
        forward(part).backward()
    wanted = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    for _ in range(2):
        model.zero_grad()
        memory = HostBuffers(CPU)
        away = HostActivations(CPU, memory, frozenset([0]), model.parameters)
        losses: dict[int, torch.Tensor] = {}
        for index, part in enumerate(parts):
            with away.keeping(0, index, [], len(layers)):
                losses[index] = forward(part)
            if index:
                with away.returning(0, index - 1):
                    losses.pop(index - 1).backward()
        with away.returning(0, 2):
            losses.pop(2).backward()
        assert memory.num_bytes == sum(size * len(free) for size, free in memory.free.items())
        found = [weight.grad for weight in model.parameters()]
        assert all(
            torch.equal(one, other)
            for one, other in zip(wanted, found, strict=True)
            if other is not None
        )


def _through(layers: Any, carry: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        carry = layer(carry)
    return carry


BOTH = "optimizer,activations"
CASES = [
    Case(shares=((2,), (1, 1)), offload=BOTH, zero=1, clip=True, tied=True),
    Case(shares=((2,), (2,)), offload="activations", recompute=Recompute.FULL, work=(1.0, 2.0)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_that_offload_train_as_in_one_process(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


HELD = [
    Tuned(adapted=None, offload="activations"),
    Tuned(adapted=None, offload="optimizer", stages=(3, 3), num_micro_batches=4),
    Tuned(offload=BOTH),
    Tuned(adapted=None, offload=BOTH),
    Tuned(adapted=None, offload="optimizer", optimizer="momentum"),
    Tuned(adapted=2, offload="activations", num_micro_batches=5),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="allocations are counted on the CPU here")
@pytest.mark.parametrize("case", HELD, ids=str)
def test_ranks_that_offload_hold_what_is_predicted(ranks: RankPool, case: Tuned) -> None:
    """The peak of a step by torch's own count of allocations; host memory is not among them."""
    model, loss_fn, batch = case.built()
    profile = profile_model(
        model,
        loss_fn,
        batch,
        ProfileSettings(name="tuned", kind="CPU-core", samples=(2,), seconds=0.0),
    )
    chain, plan = profile.chain(optimizer=case.optimizer), case.plan()
    predicted = peak_bytes(plan, chain)
    found = dict(zip(plan.devices, ranks(case.num_ranks, held_and_peak, case), strict=True))
    for stage in plan.stages:
        (name,) = stage.devices
        state = state_bytes(chain, stage, 1.0)
        above = predicted[name] - state.weights - state.optimizer
        assert above == pytest.approx(found[name][1], rel=0.08), name


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(InputError, match="no offload of activations for compiled stages"):
        check_compilable(Tuned(offload="activations").plan())
