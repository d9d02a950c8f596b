"""What fills the memory of a device, piece by piece.

    (1)  peak = weights + gradients + optimizer + activations + buffers, at the moment at which a
         device holds most
    (2)  the same in closed form (``cost.planned``), which needs no simulation

(1) takes the simulated peak apart; buffers are what is left over: tensors that have arrived and are
    not yet used, and
what a backward computes again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from argosy.cluster.topology import Cluster
from argosy.cost.memory import StateBytes, activation_bytes, state_bytes
from argosy.cost.planned import planned_parts
from argosy.plan.plan import Plan
from argosy.timeline import Span, SpanKind, Timeline
from argosy.workload.chain import Chain


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """(1): what a device holds when it holds most, in bytes."""

    device: str
    kind: str
    capacity: float
    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def peak(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def free(self) -> float:
        """Negative where it would run out."""
        return self.capacity - self.peak


def memory_stack(
    plan: Plan, chain: Chain, cluster: Cluster, timeline: Timeline
) -> tuple[DeviceMemory, ...]:
    """(1) for every device in use."""
    states: dict[str, list[StateBytes]] = defaultdict(list)
    kept: dict[tuple[str, int], float] = {}
    for index, stage in enumerate(plan.stages):
        for replica in stage.replicas:
            for name, share in zip(replica.devices, replica.shares, strict=True):
                states[name].append(state_bytes(chain, stage, share))
                kept[name, index] = activation_bytes(chain, stage, replica.samples, share)
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.where].append(span)
    return tuple(
        _stack(cluster, name, states[name], kept, max(steps, key=lambda step: step[1]), spans[name])
        for name, steps in timeline.memory
    )


def _stack(
    cluster: Cluster,
    name: str,
    states: Sequence[StateBytes],
    kept: dict[tuple[str, int], float],
    most: tuple[float, float],
    spans: Sequence[Span],
) -> DeviceMemory:
    when, peak = most
    kind = cluster.device(name).kind
    weights, gradients, optimizer = (
        sum(getattr(state, part) for state in states)
        for part in ("weights", "gradients", "optimizer")
    )
    gradients += sum(state.errors for state in states)
    activations = sum(kept[name, stage] * count for stage, count in _in_flight(spans, when).items())
    rest = peak - weights - gradients - optimizer - activations
    return DeviceMemory(
        device=name,
        kind=kind.name,
        capacity=kind.memory,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        buffers=max(rest, 0.0),  # what is below 0 is rounding
    )


def _in_flight(spans: Sequence[Span], when: float) -> dict[int, int]:
    """Per stage, the micro-batches whose activations a device holds at a moment. A pass may be
    several spans."""
    begun: set[tuple[int, int | None, int]] = set()
    over: dict[tuple[int, int | None, int], float] = {}
    for span in spans:
        if span.stage is None:
            continue
        key = (span.stage, span.micro_batch, span.iteration)
        if span.kind is SpanKind.FORWARD and span.start <= when:
            begun.add(key)
        elif span.kind in (SpanKind.BACKWARD, SpanKind.WEIGHT_GRADIENT):
            over[key] = max(over.get(key, 0.0), span.end)
    counts: dict[int, int] = defaultdict(int)
    for key in begun:
        counts[key[0]] += not (key in over and over[key] <= when)
    return counts


def planned_stack(plan: Plan, chain: Chain, cluster: Cluster) -> tuple[DeviceMemory, ...]:
    """(2) for every device in use, piece by piece."""
    found = []
    for name, (weights, gradients, optimizer, activations, buffers) in planned_parts(
        plan, chain
    ).items():
        kind = cluster.device(name).kind
        found.append(
            DeviceMemory(
                device=name,
                kind=kind.name,
                capacity=kind.memory,
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                activations=activations,
                buffers=buffers,
            )
        )
    return tuple(found)
