"""Divide the peak memory of a device into its parts.

    (1)  peak = weights + gradients + optimizer + activations + buffers, at the moment at which a
         device holds most
    (2)  the same sum in closed form (``cost.planned``), which needs no simulation

(1) divides the simulated peak; buffers are the remainder: tensors that have arrived and are not yet
used, and activations that a backward recomputes.
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
    """The bytes that a device holds at its peak, by part (1)."""

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
        """Return the sum of all parts in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def free(self) -> float:
        """Return the free bytes at the peak; negative if the device would run out of memory."""
        return self.capacity - self.peak


def memory_stack(
    plan: Plan, chain: Chain, cluster: Cluster, timeline: Timeline
) -> tuple[DeviceMemory, ...]:
    """Return the simulated peak of every used device by part (1)."""
    states: dict[str, list[StateBytes]] = defaultdict(list)
    kept: dict[tuple[str, int], float] = {}
    for index, stage in enumerate(plan.stages):
        for replica in stage.replicas:
            for name, share in replica.members:
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
    """Return the peak of one device by part (1)."""
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
        buffers=max(rest, 0.0),  # a negative rest is rounding
    )


def _in_flight(spans: Sequence[Span], when: float) -> dict[int, int]:
    """Return, per stage, the number of micro-batches whose activations a device holds at a moment.

    A pass may consist of several spans.
    """
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
    """Return the peak of every used device by part, in closed form (2)."""
    stacks = []
    for name, (weights, gradients, optimizer, activations, buffers) in planned_parts(
        plan, chain
    ).items():
        kind = cluster.device(name).kind
        stacks.append(
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
    return tuple(stacks)
