"""A model whose layers take exactly as long as they are told: they sleep where others compute.

Everything else about it is real: weights, gradients, what goes over the network, the schedule. So a
run measures schedule, transport and network, undisturbed by how busy the machine's cores are. (1)
says how long layer l sleeps:

    (1)  forward  f_l n / speed of the device,  backward twice that,  n samples
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from argosy.cluster.topology import Cluster
from argosy.dtype import Dtype
from argosy.workload.chain import Chain, Layer
from argosy.workload.profile import Profile, ProfileRow

KIND = "work"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the layers do."""

    num_layers: int
    forward_seconds: float
    """Of one layer for one sample on a device of speed 1."""
    values: int
    """Numbers that a layer hands on for one sample."""
    weights: int
    """Of one layer."""
    real: bool = False
    """Whether layers compute on their device's share of a core, instead of sleeping (``real``)."""

    @property
    def chain(self) -> Chain:
        """What the planner and the simulator know of it."""
        layer = {
            "kind": KIND,
            "forward_flop": 1e9,
            "backward_flop": 2e9,
            "parameters": self.weights,
            "activation_bytes": 4.0 * self.values,
            "output_bytes": 4.0 * self.values,
        }
        layers = [Layer(name=f"{KIND}{index}", **layer) for index in range(self.num_layers)]
        layers[0] = replace(
            layers[0], activation_bytes=0.0
        )  # its input is the batch, which is there anyway
        layers[-1] = replace(
            layers[-1], working_bytes=4.0 * self.values
        )  # the gradient of the loss
        return Chain(
            name="emulated",
            layers=tuple(layers),
            sequence_length=1,
            dtype=Dtype.FP32,
            optimizer="sgd",
        )

    def profiles(self, cluster: Cluster, most_samples: int) -> dict[str, Profile]:
        """(1) as measured tables, per device kind."""
        profiles = {}
        for kind in {device.kind.name for device in cluster.devices}:
            rows = tuple(
                ProfileRow(
                    layer=KIND,
                    micro_batch=n,
                    tensor_width=1,
                    dtype=Dtype.FP32,
                    forward_seconds=self.forward_seconds * n / speed_of(kind),
                    backward_seconds=2 * self.forward_seconds * n / speed_of(kind),
                )
                for n in sorted({1, most_samples})
            )
            profiles[kind] = Profile(device=kind, model="emulated", rows=rows)
        return profiles


def speed_of(kind: str) -> float:
    """``speed-4`` is four times as fast as ``speed-1``."""
    return float(kind.removeprefix("speed-"))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds)
        ctx.seconds, ctx.weight = 2 * seconds, weight
        ctx.save_for_backward(tensor)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        time.sleep(ctx.seconds)
        first = ctx.weight.grad is None  # later micro-batches would add zeros to it
        return gradients[0], torch.zeros_like(ctx.weight) if first else None, None


class _Layer(nn.Module):
    def __init__(self, job: Job, speed: Callable[[], float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(job.weights))
        self.seconds, self.speed = job.forward_seconds, speed

    def forward(self, tensor: Tensor) -> Tensor:
        return _Sleep.apply(
            tensor.requires_grad_(), self.weight, self.seconds * len(tensor) / self.speed()
        )


def build_model(job: Job, speed: Callable[[], float]) -> nn.Sequential:
    """``speed()``: the device's, at the moment it is asked for."""
    return nn.Sequential(*(_Layer(job, speed) for _ in range(job.num_layers)))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()
