"""Temporary tensors of torchtitan: the loss is measured on torch itself, the rest by hand."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from argosy.calibrate.run import Degrees, even_plan
from argosy.calibrate.table import machines
from argosy.cost.calibration import Calibration
from argosy.cost.calibration_file import read_calibration
from argosy.cost.memory import activation_bytes, gathered_bytes, working_bytes
from argosy.cost.planned import planned_parts
from argosy.plan.plan import Plan, Recompute, Replica, Stage
from argosy.sim.simulate import simulate
from argosy.workload.chain import Chain
from argosy.workload.load import load_model
from argosy.workload.systems import Buffers, Selective

LLAMA = load_model("llama-3-8b", sequence_length=2048)
TITAN = read_calibration("torchtitan").chain(LLAMA)
TOKENS, VOCABULARY = 64, 4096
# Bytes of a 16-bit logit. It is freed before the backward, but its block is not used again.
FREED = 2


class Live(TorchDispatchMode):
    """A counter of the bytes of all tensors that operations have made and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its local operations come here one by one
            return NotImplemented
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self.sizes:
                storage = leaf.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._drop, storage._cdata)
        self.peak = max(self.peak, self.now)
        return results

    def _drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _peak_of_loss(*, is_split: bool) -> float:
    """Return the most bytes per logit that a loss and its backward hold, as torchtitan calls it."""
    hidden = torch.randn(TOKENS, 1, dtype=torch.bfloat16, requires_grad=True)
    output = torch.randn(VOCABULARY, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(VOCABULARY, (TOKENS,))
    mesh = init_device_mesh("cpu", (1,))
    live = Live()
    with live:
        logits = functional.linear(hidden, output)
        if is_split:
            logits = DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False)
        loss = functional.cross_entropy(logits.float(), labels)
        del logits
        loss.backward()  # type: ignore[no-untyped-call]
    return live.peak / (TOKENS * VOCABULARY)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("width", [1, 8])
def test_the_loss_holds_what_torch_holds_in_it(width: int) -> None:
    if width == 1:
        held = _peak_of_loss(is_split=False)
    else:
        with loss_parallel():
            held = _peak_of_loss(is_split=True)
    last = len(LLAMA.layers)
    devices = tuple(f"n0.{index}" for index in range(width))
    head = Stage(first=last - 1, end=last, replicas=(Replica(devices=devices, samples=1),))
    per_logit = working_bytes(TITAN, head, 1, 1 / width) * width / (2048 * 128256)
    assert 4 + per_logit == pytest.approx(held + FREED, rel=0.03)
    fused = read_calibration("torchtitan")
    assert working_bytes(replace(fused, fused_loss=True).chain(LLAMA), head, 1, 1 / width) == 0


def test_eager_selective_recomputation_keeps_the_result_of_the_last_product() -> None:
    block = Stage(
        first=1,
        end=2,
        replicas=(Replica(devices=("n0.0",), samples=1),),
        recompute=Recompute.SELECTIVE,
    )
    eager, compiled = (
        activation_bytes(
            Calibration(selective=Selective.PRODUCTS, compiled=compiled).chain(LLAMA), block, 1, 1.0
        )
        for compiled in (False, True)
    )
    assert eager - compiled == 2 * 2048 * 4096


def test_weights_of_embedding_and_head_stay_gathered() -> None:
    """Weights and the head's gradient in bf16, the sum of one block's gradients in fp32."""
    replicas = tuple(Replica(devices=(f"n0.{index}",), samples=1) for index in range(4))
    stage = Stage(first=0, end=len(LLAMA.layers), replicas=replicas, zero=3)
    table = LLAMA.layers[0].parameters
    head, block = (LLAMA.layers[at].parameters for at in (-1, 1))
    forward, backward = (
        gathered_bytes(TITAN, stage, 1.0, backward=backward) for backward in (False, True)
    )
    assert forward == 2 * (table + head + 2 * block)
    assert backward == forward + 2 * head + 4 * block


def _pipeline(chain: Chain, micro_batches: int, chunks: int) -> Plan:
    degrees = Degrees(
        pipeline=2,
        data=2,
        chunks=chunks,
        micro_batch=1,
        global_batch=2 * micro_batches,
        zero=1,
    )
    return even_plan(degrees, chain, machines("H100-80GB", 4))


def test_a_pipeline_keeps_and_joins_the_logits_of_all_micro_batches() -> None:
    plain = replace(TITAN, buffers=Buffers.ARGOSY)
    plan = _pipeline(TITAN, 4, 1)
    more, usual = (planned_parts(plan, chain) for chain in (TITAN, plain))
    own, common = more["n0.3"], usual["n0.3"]
    block = 4 * LLAMA.layers[1].parameters  # its gradients are summed in fp32
    assert own[:4] == common[:4]
    assert own[4] - common[4] == pytest.approx(2 * 4 * 2 * 2048 * 128256 + block)


@pytest.mark.parametrize(("micro_batches", "in_turn"), [(2, True), (4, False)])
def test_gradients_of_interleaved_stages_follow_one_another(
    micro_batches: int, in_turn: bool
) -> None:
    plan = _pipeline(TITAN, micro_batches, 2)
    each = [
        4 * sum(layer.parameters for layer in TITAN.layers_of(stage)) for stage in plan.stages[::2]
    ]
    held = planned_parts(plan, TITAN)["n0.0"][1]
    assert held == (max(each) if in_turn else sum(each))
    simulated = simulate(plan, TITAN, machines("H100-80GB", 4)).peak_memory()
    planned = planned_parts(plan, TITAN)["n0.3"]
    assert simulated["n0.3"] == pytest.approx(sum(planned), rel=0.05)
