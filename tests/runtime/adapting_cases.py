"""A job whose layers take as long as they are told, on devices that slow down at a given step."""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from runtime.llama_models import EXPERTS, VOCABULARY, llama, mixture_of_blocks
from torch import Tensor, nn

from argosy.adapt.advisor import Advice, Brief, Mind, Observation
from argosy.adapt.controller import AdaptationLevel, ControllerLimits
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.document import parse_toml
from argosy.dtype import Dtype
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.plan.runnable import splits_after
from argosy.runtime.job import adapting
from argosy.runtime.job.adapting import Adapter
from argosy.runtime.step.trainer import parallelize
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.chain import Chain, Layer
from argosy.workload.load import load_model
from argosy.workload.profile import Profile, ProfileRow

LAYERS, WIDTH, BATCH, SECONDS = 8, 6, 8, 4e-3
"""Seconds of a layer's forward for one sample; its backward takes twice as long."""
ONE = ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B)


@dataclass(frozen=True, kw_only=True)
class Slowing:
    """A rank takes ``factor`` times as long from step ``step`` on."""

    rank: int
    step: int
    factor: float


class Nap(torch.autograd.Function):
    """A tensor that takes ``nap(samples)`` forward, and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nap: Any) -> Tensor:
        ctx.nap = nap
        nap(len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.nap(2 * len(gradients[0]))
        return gradients[0], None


class Napping(nn.Module):
    """A small layer that sleeps for as long as ``pace`` says."""

    def __init__(self, pace: list[float]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.pace = pace

    def forward(self, x: Tensor) -> Tensor:
        nap = lambda samples: time.sleep(SECONDS * samples * self.pace[0])  # noqa: E731
        return torch.tanh(self.linear(Nap.apply(x.requires_grad_(), nap)))


def loss_of(model: Any, batch: Tensor) -> Tensor:
    return (model(batch) - batch.detach().roll(1, 1)).square().mean()


def build(pace: list[float]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Napping(pace) for _ in range(LAYERS))).double()


def batch_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def cluster() -> Cluster:
    nodes = "".join(
        f'[[nodes]]\nname = "{name}"\ndevices = {{ kind = "core" }}\n'
        'nic = { bandwidth = "10 Gbit/s", latency = "20 us" }\n'
        for name in "ab"
    )
    kind = '[[kinds]]\nname = "core"\nmemory = "4 GiB"\nmemory_bandwidth = "20 GB/s"\nflops = { fp32 = "1 GFLOP/s" }\n'
    return build_cluster(
        parse_toml(f'name = "pair"\n{kind}{nodes}', file="pair.toml"), folder=Path()
    )


def chain() -> Chain:
    layer = {
        "kind": "work",
        "forward_flop": 1e9,
        "backward_flop": 2e9,
        "parameters": WIDTH * (WIDTH + 1),
    }
    sizes = {"activation_bytes": 8.0 * WIDTH, "output_bytes": 8.0 * WIDTH}
    layers = tuple(Layer(name=f"work{index}", **layer, **sizes) for index in range(LAYERS))
    return Chain(name="naps", layers=layers, sequence_length=1, dtype=Dtype.FP32, optimizer="adamw")


def compute_model() -> ComputeModel:
    rows = tuple(
        ProfileRow(
            layer="work",
            micro_batch=samples,
            tensor_width=1,
            dtype=Dtype.FP32,
            forward_seconds=SECONDS * samples,
            backward_seconds=2 * SECONDS * samples,
        )
        for samples in (1, BATCH)
    )
    return ComputeModel(profiles={"core": Profile(device="core", model="naps", rows=rows)})


def pipeline() -> Plan:
    where = cluster()
    half = LAYERS // 2
    return Plan(
        model=ModelRef(name="naps", sequence_length=1, dtype=Dtype.FP32),
        cluster=ClusterRef.of(where),
        global_batch=BATCH,
        micro_batch_size=2,
        num_micro_batches=BATCH // 2,
        schedule=ONE,
        stages=(
            Stage(first=0, end=half, replicas=(Replica(devices=("a0.0",), samples=2),)),
            Stage(first=half, end=LAYERS, replicas=(Replica(devices=("b0.0",), samples=2),)),
        ),
    )


def side_by_side() -> Plan:
    plan = pipeline()
    replicas = tuple(Replica(devices=(name,), samples=2) for name in ("a0.0", "b0.0"))
    whole = Stage(first=0, end=LAYERS, replicas=replicas)
    return replace(plan, micro_batch_size=4, num_micro_batches=BATCH // 4, stages=(whole,))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def train_and_adapt(
    plan: Plan, reach: str, slowing: Slowing, steps: int
) -> tuple[list[float], list[Any], list[float]]:
    """Losses, what was decided, seconds of the steps."""
    pace = [1.0]
    trainer = parallelize(build(pace), loss_of, adamw, batch_of(0), plan)
    events: list[Any] = []
    limits = ControllerLimits(reach=AdaptationLevel(reach), horizon=100)
    brief = Brief(
        plan=plan,
        chain=chain(),
        cluster=cluster(),
        model=compute_model(),
        limits=limits,
        roster=trainer.roster,
    )
    adapter = Adapter(trainer, brief, events.append)
    losses, seconds = [], []
    try:
        for step in range(steps):
            pace[0] = (
                slowing.factor if trainer.rank == slowing.rank and step >= slowing.step else 1.0
            )
            begin = time.perf_counter()
            losses.append(trainer.step(batch_of(step)))
            seconds.append(time.perf_counter() - begin)
            adapter.after_step(
                seconds[-1], 100
            )  # a move has to pay for itself many times over, so there is time
    finally:
        adapter.close()
    return losses, events, seconds


def train_alone(steps: int) -> list[float]:
    return losses_alone(build([0.0]), [batch_of(step) for step in range(steps)])


def losses_alone(
    model: nn.Module, batches: Sequence[Tensor], loss_of: Callable[..., Tensor] = loss_of
) -> list[float]:
    """Of one process, step by step."""
    optimizer = adamw(model.parameters())
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class SlowFrom:
    """A controller of its own process, which believes that the second device is slow from some step
    on, whatever is measured."""

    def __init__(self, brief: Brief) -> None:
        self.brief, self.mind = brief, Mind(brief)
        self.given: list[Advice] = []

    def tell(self, seen: Observation) -> None:
        speed = 0.3 if seen.step >= 2 else 1.0
        speeds = {self.brief.roster[0]: 1.0, self.brief.roster[1]: speed}
        seen = replace(seen, speeds=speeds, last=speeds, bandwidths={}, seconds=1.0)
        self.given.append(self.mind.observe(seen))

    def answers(self) -> list[Advice]:
        given, self.given = self.given, []
        return given

    def close(self) -> None:
        pass


def shared_costs(model: str) -> tuple[Chain, Cluster]:
    """A chain with as many layers as the model, whose devices do best to share every sequence or
    the experts."""
    tokens = 4096 if model == "llama" else 512
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 256,
        "max_position_embeddings": tokens,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    }
    if model != "llama":
        experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": 1}
        config |= {"model_type": "mixtral", "intermediate_size": 4096, **experts}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        chain = load_model(str(path), dtype="fp32", sequence_length=tokens)
    return chain, cluster()


def shared_plan(model: str) -> Plan:
    """Two devices that share sequences, or experts, evenly."""
    chain, where = shared_costs(model)
    names = [device.name for device in where.devices]
    stage = Stage(first=0, end=6, replicas=(Replica(devices=tuple(names), samples=2),), context=2)
    if model != "llama":
        replicas = tuple(Replica(devices=(name,), samples=1) for name in names)
        stage = replace(stage, replicas=replicas, context=1, expert=2)
    return Plan(
        model=ModelRef.of(chain),
        cluster=ClusterRef.of(where),
        global_batch=2,
        micro_batch_size=2,
        num_micro_batches=1,
        schedule=ONE,
        stages=(stage,),
    )


def share_and_adapt(model: str, steps: int) -> tuple[list[float], list[float], list[Any], Plan]:
    """Losses beside those of one process, what was decided, and the last plan."""
    plan, (chain, where) = shared_plan(model), shared_costs(model)
    torch.manual_seed(0)
    build = {"llama": llama, "mixture": mixture_of_blocks}[model]
    net, loss_fn, _ = build(2)
    net = net.double()
    alone = losses_alone(copy.deepcopy(net), [tokens_of(step) for step in range(steps)], loss_fn)
    trainer = parallelize(net, loss_fn, adamw, tokens_of(0), plan)
    events: list[Any] = []
    brief = Brief(
        plan=plan,
        chain=chain,
        cluster=where,
        model=ComputeModel(),
        limits=ControllerLimits(horizon=1000),
        roster=trainer.roster,
        splits=splits_after(plan),
    )
    with mock.patch.object(adapting, "Advisor", SlowFrom):
        adapter = Adapter(trainer, brief, events.append)
    losses = []
    for step in range(steps):
        losses.append(trainer.step(tokens_of(step)))
        adapter.after_step(1.0, 1000)
    return losses, alone, events, trainer.plan


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (2, 10), generator=generator)
