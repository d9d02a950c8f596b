"""Choose what a rank keeps in host memory under a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from argosy.plan.plan import Plan
from argosy.runtime.weights.host_memory import HostBuffers
from argosy.runtime.weights.host_state import HostState
from argosy.runtime.weights.kept_on_host import HostActivations

if TYPE_CHECKING:
    from argosy.runtime.state.migrate import Making


def offloading(
    plan: Plan, stages: Iterable[int], device: torch.device, weights: Callable[[], Iterable[Tensor]]
) -> tuple[HostActivations | None, HostState | None]:
    """Return the objects that keep the activations of a rank's stages, and the state of its
    optimizer, in host memory; None for what stays on the device.

    The state of all of a rank's stages is offloaded if that of one is. ``weights`` returns the
    tensors that stay on the device.
    """
    offloads = {stage: plan.stages[stage].offload for stage in stages}
    kept = frozenset(
        stage for stage, offload in offloads.items() if offload.activations is not None
    )
    memory = HostBuffers(device)
    activations = HostActivations(device, memory, kept, weights) if kept else None
    has_state = any(offload.optimizer is not None for offload in offloads.values())
    return activations, HostState(device, memory) if has_state else None


def tensors_of(making: Making | None) -> Iterator[Tensor]:
    """Yield the weights and buffers of the model that a trainer was made from; those of other ranks
    are empty."""
    assert making is not None, "a step comes after the trainer is made"
    yield from making.recipe.model.parameters()
    yield from making.recipe.model.buffers()
