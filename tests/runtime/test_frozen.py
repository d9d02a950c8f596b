"""Models with frozen weights under a plan: trained as in one process, and without what nothing
needs."""

from __future__ import annotations

import pytest
import torch
from runtime.frozen_cases import Tuned, held_and_peak, what_happens
from runtime.rank_pool import RankPool
from runtime.training_cases import Case, differences, train_in_parallel

from argosy.cost.memory import state_bytes
from argosy.measure.profile import ProfileSettings, profile_model
from argosy.plan.plan import Recompute
from argosy.schedule import ScheduleKind
from argosy.timeline import SpanKind
from benchmarks.memory_ledger import peak_bytes

CASES = [
    Case(model="lora", shares=((2,), (2,), (1, 1)), zero=1, clip=True),
    Case(model="lora", shares=((1, 1), (2,)), zero=3, recompute=Recompute.FULL),
    Case(model="lora", shares=((2,), (2,)), tied=True, kind=ScheduleKind.ZERO_BUBBLE),
    Case(model="lora-at-the-end", shares=((2,), (2,), (2,)), kind=ScheduleKind.ZERO_BUBBLE),
    Case(
        model="lora-at-the-end", shares=((1, 1), (2,), (2,)), zero=2, recompute=Recompute.SELECTIVE
    ),
    Case(
        model="lora-at-the-end",
        shares=((2,), (2,)),
        kind=ScheduleKind.INTERLEAVED,
        num_micro_batches=2,
    ),
    Case(model="lora", shares=((2,), (2,)), work=(1.0, 3.0)),
    Case(model="lora-at-the-end", shares=((2,), (2,)), work=(2.0, 1.0)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_adapters_train_as_in_one_process(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


def test_a_frozen_stage_gets_no_gradients_and_runs_no_backward(ranks: RankPool) -> None:
    """Stages 0 and 1 of three are frozen: they send activations forward, and nothing comes back to
    them."""
    case = Case(model="lora-at-the-end", shares=((2,), (2,), (2,)))
    first, second, last = ranks(case.num_ranks, what_happens, case)
    assert set(first["sent"]) == {1}
    assert set(second["sent"]) == {2}
    assert not last["sent"]
    assert not first["state"] and not second["state"]
    assert {name.rsplit(".", 2)[1] for name in last["state"]} == {"up", "down"}
    backwards = {stage for kind, stage in first["spans"] if kind is SpanKind.BACKWARD}
    assert backwards == {2}
    assert {stage for kind, stage in first["spans"] if kind is SpanKind.FORWARD} == {0, 1, 2}


HELD = [
    Tuned(),
    Tuned(stages=(2, 4)),
    Tuned(adapted=2, stages=(2, 4), num_micro_batches=5),
    Tuned(adapted=1, stages=(4, 2)),
    Tuned(stages=(3, 3), replicas=2, zero=1),
    Tuned(adapted=None, optimizer="adafactor"),
    Tuned(adapted=None, optimizer="momentum", stages=(4, 2)),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="allocations are counted on the CPU here")
@pytest.mark.parametrize("case", HELD, ids=str)
def test_ranks_hold_what_is_predicted(ranks: RankPool, case: Tuned) -> None:
    """Optimizer state, and the peak of a step by torch's own count of allocations."""
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
        state = state_bytes(chain, stage, 1.0)
        for replica in stage.replicas:
            (name,) = replica.devices
            optimizer, peak = found[name]
            assert optimizer == pytest.approx(
                state.optimizer, rel=0.02, abs=0.03 * state.weights
            ), name
            above = predicted[name] - state.weights - state.optimizer
            assert peak == pytest.approx(above, rel=0.08), name
