"""What a rank holds: gradients that were answered, and peaks of plans against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from argosy.cost.memory import working_bytes
from argosy.dtype import Dtype
from argosy.measure.allocated import Allocations
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.runtime.communication.ledger import answered
from argosy.schedule import ActionKind, ScheduleKind, ScheduleSpec, build_schedule
from argosy.workload.chain import Chain, Layer
from benchmarks.memory_ledger import peak_bytes


def chain(num_layers: int = 4) -> Chain:
    layers = tuple(
        Layer(
            name=f"l{index}", kind="l", forward_flop=1.0, backward_flop=2.0, parameters=10, activation_bytes=100.0,
            output_bytes=7.0, working_bytes=30.0,
        )
        for index in range(num_layers)
    )  # fmt: skip
    return Chain(name="c", layers=layers, sequence_length=1, dtype=Dtype.FP32, optimizer="sgd")


def plan(
    *cuts: tuple[int, tuple[str, ...]],
    micro_batches: int,
    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
) -> Plan:
    stages, first = [], 0
    for count, names in cuts:
        replicas = tuple(Replica(devices=(name,), samples=2 // len(names)) for name in names)
        stages.append(Stage(first=first, end=first + count, replicas=replicas))
        first += count
    return Plan(
        model=ModelRef(name="c", sequence_length=1, dtype=Dtype.FP32, optimizer="sgd"),
        cluster=ClusterRef(name="x", hash="", content=""),
        global_batch=2 * micro_batches,
        micro_batch_size=2,
        num_micro_batches=micro_batches,
        schedule=ScheduleSpec(kind=kind),
        stages=tuple(stages),
    )


def test_one_device_holds_one_micro_batch_at_a_time() -> None:
    """Weights and gradients of 4 bytes for 40 parameters; 2 samples of 400 bytes; the last layer's
    backward."""
    assert peak_bytes(plan((4, ("a0.0",)), micro_batches=3), chain()) == {"a0.0": 320 + 800 + 60}


def test_replicas_copy_their_gradients_to_sum_them() -> None:
    """320 of weights and gradients; either 1 sample of 400 and its backward, or a copy of 160."""
    both = peak_bytes(plan((4, ("a0.0", "b0.0")), micro_batches=1), chain())
    assert both == {"a0.0": 320 + 430, "b0.0": 320 + 430}
    thin = Chain(
        name="c",
        layers=tuple(replace(layer, activation_bytes=1.0, working_bytes=0.0) for layer in chain().layers),
        sequence_length=1, dtype=Dtype.FP32, optimizer="sgd",
    )  # fmt: skip
    assert peak_bytes(plan((4, ("a0.0", "b0.0")), micro_batches=1), thin)["a0.0"] == 320 + 160


def test_a_first_stage_holds_what_is_in_flight_and_what_it_handed_on() -> None:
    """1f1b on two stages: two micro-batches in flight, each 200 a sample kept and 7 handed on; at
    the first backward, buffers for three gradients, which lie within four computations; what passes
    through it."""
    peak = peak_bytes(plan((2, ("a0.0",)), (2, ("b0.0",)), micro_batches=4), chain())
    assert peak["a0.0"] == 160 + 2 * (400 + 14) + 3 * 14 + 60


@pytest.mark.parametrize(
    "kind", [ScheduleKind.ONE_F_ONE_B, ScheduleKind.EAGER, ScheduleKind.ZERO_BUBBLE]
)
def test_what_a_micro_batch_takes_is_given_back(kind: ScheduleKind) -> None:
    """Else longer steps would hold more."""
    cuts = ((2, ("a0.0",)), (1, ("b0.0",)), (1, ("c0.0",)))
    some, more = (
        peak_bytes(plan(*cuts, micro_batches=count, kind=kind), chain()) for count in (12, 24)
    )
    assert some == more


@pytest.mark.parametrize("kind", [ScheduleKind.ONE_F_ONE_B, ScheduleKind.EAGER, ScheduleKind.GPIPE])
def test_a_gradient_is_answered_once_and_only_after_it_was_used(kind: ScheduleKind) -> None:
    schedule = build_schedule(ScheduleSpec(kind=kind), 3, 6)
    proofs = answered(schedule)
    for stage in (1, 2):
        told = [index for at in range(6) for index in proofs[stage, at]]
        assert len(told) == len(set(told))
        row = schedule.rows[stage - 1]
        for at in range(6):
            begun = next(
                i for i, a in enumerate(row) if a.kind is ActionKind.FORWARD and a.micro_batch == at
            )
            used = {a.micro_batch for a in row[:begun] if a.kind is ActionKind.BACKWARD}
            assert {index for j in range(at + 1) for index in proofs[stage, j]} == used


def test_what_passes_through_a_backward_counts_what_was_given_back() -> None:
    stage = Stage(first=0, end=2, replicas=(Replica(devices=("a0.0",), samples=2),))
    small = chain(2)
    assert (
        working_bytes(small, stage, 2, 1.0) == 60
    )  # of the last layer; the one before has its 100 to work in
    wide = Chain(
        name="c", layers=(replace(small.layers[0], working_bytes=500.0), small.layers[1]),
        sequence_length=1, dtype=Dtype.FP32, optimizer="sgd",
    )  # fmt: skip
    assert working_bytes(wide, stage, 2, 1.0) == 2 * (500 + 7 - 100)


def test_allocations_are_counted_in_segments() -> None:
    with Allocations(torch.device("cpu")) as allocations:
        kept = torch.zeros(1000)
        allocations.mark()
        torch.zeros(3000)
        more = kept + 1
    first, second = allocations.segments
    assert (first.start, first.peak) == (0, 4000)
    assert second.start == 4000
    assert 16_000 <= second.peak < 17_000
    assert len(more) == 1000
