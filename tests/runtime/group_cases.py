"""Tensor-parallel groups whose products take as long as they are told, each member's by the part of
it that it does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from runtime.adapting_cases import ONE, Nap, adamw, loss_of, losses_alone
from torch import Tensor, nn

from argosy.adapt.advisor import Brief
from argosy.adapt.controller import AdaptationLevel, ControllerLimits
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.document import parse_toml
from argosy.dtype import Dtype
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.runtime.job.adapting import Adapter
from argosy.runtime.stages import graph_stage as graphstage
from argosy.runtime.step.trainer import Trainer, parallelize
from argosy.timeline.file import dumps_timeline
from argosy.workload.chain import Chain, Layer
from argosy.workload.profile import Profile, ProfileRow

LAYERS, WIDTH, HIDDEN, SIZE, SECONDS = 2, 4, 16, 4, 16e-3
"""A layer has a product with WIDTH x HIDDEN weights and one back; both take SECONDS for one sample,
their backward twice as long."""
MICRO_BATCHES = 2
RATIOS = (0.625, 0.375)
PRODUCTS = ("aten.mm.default", "aten.addmm.default")


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
        for _ in range(LAYERS)
    )
    return nn.Sequential(*layers).double()


def batch_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SIZE * MICRO_BATCHES, WIDTH, generator=generator, dtype=torch.float64)


def cluster() -> Cluster:
    kind = '[[kinds]]\nname = "core"\nmemory = "4 GiB"\nmemory_bandwidth = "20 GB/s"\nflops = { fp32 = "1 GFLOP/s" }\n'
    node = '[[nodes]]\nname = "a"\ndevices = { kind = "core", count = 4 }\n'
    links = (
        'intra = [{ medium = "bus", bandwidth = "10 GB/s", latency = "5 us" }]\n'
        'nic = { bandwidth = "10 Gbit/s", latency = "20 us" }\n'
    )
    return build_cluster(
        parse_toml(f'name = "four"\n{kind}{node}{links}', file="four.toml"), folder=Path()
    )


def chain() -> Chain:
    flop = 2.0 * WIDTH * HIDDEN * 2
    layers = tuple(
        Layer(
            name=f"work{index}",
            kind="work",
            forward_flop=flop,
            backward_flop=2 * flop,
            parameters=2 * WIDTH * HIDDEN + WIDTH + HIDDEN,
            activation_bytes=8.0 * (WIDTH + HIDDEN),
            output_bytes=8.0 * WIDTH,
            max_tensor_width=HIDDEN,
        )
        for index in range(LAYERS)
    )
    return Chain(name="naps", layers=layers, sequence_length=1, dtype=Dtype.FP32, optimizer="adamw")


def compute_model(widths: tuple[int, ...] = (1, 2)) -> ComputeModel:
    rows = tuple(
        ProfileRow(
            layer="work",
            micro_batch=samples,
            tensor_width=width,
            dtype=Dtype.FP32,
            forward_seconds=SECONDS * samples / width,
            backward_seconds=2 * SECONDS * samples / width,
        )
        for samples in (1, SIZE)
        for width in widths
    )
    return ComputeModel(profiles={"core": Profile(device="core", model="naps", rows=rows)})


def _plan(*stages: Stage) -> Plan:
    return Plan(
        model=ModelRef(name="naps", sequence_length=1, dtype=Dtype.FP32),
        cluster=ClusterRef.of(cluster()),
        global_batch=SIZE * MICRO_BATCHES,
        micro_batch_size=SIZE,
        num_micro_batches=MICRO_BATCHES,
        schedule=ONE,
        stages=stages,
    )


def group_and_one() -> Plan:
    """Two stages: an uneven group, and a device alone."""
    group = Replica(devices=("a0.0", "a0.1"), samples=SIZE, ratios=RATIOS)
    alone = Replica(devices=("a0.2",), samples=SIZE)
    half = LAYERS // 2
    return _plan(
        Stage(first=0, end=half, replicas=(group,)),
        Stage(first=half, end=LAYERS, replicas=(alone,)),
    )


def two_groups(zero: int) -> Plan:
    """One stage with two uneven groups."""
    names = [("a0.0", "a0.1"), ("a0.2", "a0.3")]
    replicas = tuple(
        Replica(devices=devices, samples=SIZE // 2, ratios=RATIOS) for devices in names
    )
    return _plan(Stage(first=0, end=LAYERS, replicas=replicas, zero=zero))


def napping(pace: float) -> Callable[..., Any]:
    """Operations whose products take SECONDS for all of a layer's, and as much less as there is
    less to do."""
    plain = graphstage.resolved

    def resolved(
        op: str, args: list[Any], keywords: dict[str, Any], weight: Tensor | None
    ) -> graphstage.FunctionCall:
        call = plain(op, args, keywords, weight)
        if op not in PRODUCTS:
            return call
        given = args[1 if op == "aten.addmm.default" else 0]

        def slow(*arguments: Any, **options: Any) -> Any:
            result = call.function(*arguments, **options)
            part = given.shape[1] * result.shape[1] / (2 * WIDTH * HIDDEN)
            return Nap.apply(result, lambda rows: time.sleep(SECONDS * rows * part * pace))

        return call._replace(function=slow)

    return resolved


@contextlib.contextmanager
def training(plan: Plan, slow: Mapping[int, float]) -> Iterator[Trainer]:
    """``slow``: how many times as long ranks take."""
    pace = slow.get(torch.distributed.get_rank(), 1.0)
    with mock.patch.object(graphstage, "resolved", napping(pace)):
        yield parallelize(build(), loss_of, adamw, batch_of(0), plan)


def train_by(plan: Plan, steps: int) -> list[float]:
    """Losses."""
    with training(plan, {}) as trainer:
        return [trainer.step(batch_of(step)) for step in range(steps)]


def timeline_of(plan: Plan, slow: Mapping[int, float], steps: int) -> str | None:
    """On rank 0."""
    with training(plan, slow) as trainer:
        for step in range(steps):
            trainer.step(batch_of(step))
        timeline = trainer.timeline()
    return None if timeline is None else dumps_timeline(timeline)


def adapt_shares(
    plan: Plan, slow: Mapping[int, float], steps: int
) -> tuple[list[float], list[Any]]:
    """Losses, and what was decided."""
    events: list[Any] = []
    losses = []
    limits = ControllerLimits(reach=AdaptationLevel.SHARES, horizon=100)
    with training(plan, slow) as trainer:
        brief = Brief(
            plan=plan,
            chain=chain(),
            cluster=cluster(),
            model=compute_model(),
            limits=limits,
            roster=trainer.roster,
        )
        adapter = Adapter(trainer, brief, events.append)
        try:
            for step in range(steps):
                begin = time.perf_counter()
                losses.append(trainer.step(batch_of(step)))
                adapter.after_step(time.perf_counter() - begin, 100)
        finally:
            adapter.close()
    return losses, events


def train_alone(steps: int) -> list[float]:
    return losses_alone(build(), [batch_of(step) for step in range(steps)])
