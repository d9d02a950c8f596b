"""Programs whose plans cut sequences into parts: planned, run, and trained by one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from runtime import llama_models
from torch import Tensor

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import parse_toml
from argosy.plan.plan import Plan
from argosy.planner import CapturedProgram, Settings, find_plan
from argosy.runtime.sources.operations import capture_program
from argosy.runtime.step.trainer import parallelize

TOKENS, WIDTH, STEPS = 48, 128, 3


def cores(*speeds: float) -> Cluster:
    """Hosts with one core each, of these GFLOP/s."""
    kinds = "".join(
        f'[[kinds]]\nname = "core{at}"\nmemory = "4 GiB"\nmemory_bandwidth = "{20 * speed} GB/s"\n'
        f'flops = {{ fp32 = "{speed} GFLOP/s" }}\n'
        for at, speed in enumerate(speeds)
    )
    nodes = "".join(
        f'[[nodes]]\nname = "h{at}"\ndevices = {{ kind = "core{at}" }}\n'
        'nic = { bandwidth = "10 Gbit/s", latency = "20 us" }\n'
        for at in range(len(speeds))
    )
    return build_cluster(
        parse_toml(f'name = "cores"\n{kinds}{nodes}', file="cores.toml"), folder=Path()
    )


def pairs_of_cores() -> Cluster:
    """Two hosts with two equal cores each."""
    text = (
        'name = "pairs"\n[[kinds]]\nname = "core"\nmemory = "4 GiB"\n'
        'memory_bandwidth = "20 GB/s"\nflops = { fp32 = "1 GFLOP/s" }\n'
        '[[nodes]]\nname = "h"\ncount = 2\ndevices = { kind = "core", count = 2 }\n'
        'intra = [{ medium = "pcie", bandwidth = "10 GB/s", latency = "5 us" }]\n'
        'nic = { bandwidth = "10 Gbit/s", latency = "20 us" }\n'
    )
    return build_cluster(parse_toml(text, file="pairs.toml"), folder=Path())


@contextlib.contextmanager
def larger() -> Iterator[None]:
    """Llama is large enough for ids, masks and angles not to count."""
    with mock.patch.multiple(llama_models, LENGTH=TOKENS, WIDTH=WIDTH):
        yield


def build(samples: int) -> Any:
    torch.manual_seed(0)
    with larger():
        model, loss_fn, tokens = llama_models.llama(samples)
    return model.double(), loss_fn, tokens


@functools.cache
def captured(samples: int) -> CapturedProgram:
    return capture_program(lambda: build(samples), name="llama")


def planned(program: CapturedProgram, cluster: Cluster, **settings: Any) -> Plan:
    return find_plan(program, cluster, settings=Settings(runnable=True, **settings))


def batch_of(samples: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(llama_models.VOCABULARY, (samples, TOKENS + 1), generator=generator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_by(plan: Plan) -> list[float]:
    """Losses by a plan; to be called by every rank."""
    model, loss_fn, _ = build(plan.global_batch)
    trainer = parallelize(model, loss_fn, sgd, batch_of(plan.global_batch, 0), plan)
    return [trainer.step(batch_of(plan.global_batch, step)) for step in range(STEPS)]


def train_alone(samples: int) -> list[float]:
    model, loss_fn, _ = build(samples)
    own, losses = sgd(model.parameters()), []
    for step in range(STEPS):
        loss = loss_fn(model, batch_of(samples, step))
        loss.backward()
        own.step()
        own.zero_grad()
        losses.append(loss.item())
    return losses
