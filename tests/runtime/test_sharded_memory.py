"""ZeRO 2 and 3 on real processes: what a step takes beside weights and optimizer state is what the
ledger says."""

from __future__ import annotations

import sys

import pytest
import torch
from runtime.memory_cases import CLASSES, WIDTH, peak_of_steps
from runtime.rank_pool import rank_pool

from argosy.cost.memory import state_bytes
from argosy.dtype import Dtype
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.schedule import ScheduleSpec
from argosy.workload.chain import Chain, Layer
from benchmarks.memory_ledger import peak_bytes


def linear(inputs: int, outputs: int) -> Layer:
    return Layer(
        name="linear", kind="linear", forward_flop=1.0, backward_flop=2.0, parameters=(inputs + 1) * outputs,
        activation_bytes=4.0 * inputs, output_bytes=4.0 * outputs,
    )  # fmt: skip


STACK = Chain(
    name="stack",
    layers=(*[linear(WIDTH, WIDTH)] * 3, linear(WIDTH, CLASSES), linear(CLASSES, WIDTH)),
    sequence_length=1,
    dtype=Dtype.FP32,
)


def two_replicas(zero: int) -> Plan:
    replicas = tuple(Replica(devices=(name,), samples=1) for name in ("a0.0", "b0.0"))
    return Plan(
        model=ModelRef(name="stack", sequence_length=1, dtype=Dtype.FP32),
        cluster=ClusterRef(name="x", hash="", content=""),
        global_batch=4,
        micro_batch_size=2,
        num_micro_batches=2,
        schedule=ScheduleSpec(),
        stages=(Stage(first=0, end=5, replicas=replicas, zero=zero),),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the peak is one of host memory, and ranks would use the GPU"
)
@pytest.mark.parametrize("zero", [2, 3])
def test_a_backward_takes_what_the_ledger_says(zero: int) -> None:
    """In processes of their own, because others have free memory left from earlier work."""
    plan = two_replicas(zero)
    state = state_bytes(STACK, plan.stages[0], 1.0)
    predicted = peak_bytes(plan, STACK)["a0.0"] - state.weights - state.optimizer
    with rank_pool() as ranks:
        peaks = ranks(2, peak_of_steps, plan)
    assert peaks == [pytest.approx(predicted, rel=0.08)] * 2
