"""What fills the memory of a device, piece by piece.

    (1)  peak = weights + gradients + optimizer + activations + buffers, at the moment at which a device holds most
    (2)  peak in closed form = state + in-flight depth x activations + what arrives, or is computed again, for one more

(1) takes the simulated peak apart; buffers are what is left over: tensors that have arrived and are not yet used, and
what a backward computes again. (2) needs no simulation and is a little less, because of tensors that arrive early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from argosy.cluster.topology import Cluster
from argosy.cost.memory import StateBytes, activation_bytes, passing_bytes, state_bytes
from argosy.plan.plan import Plan, Stage
from argosy.schedule import build_schedule, in_flight
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


def memory_stack(plan: Plan, chain: Chain, cluster: Cluster, timeline: Timeline) -> tuple[DeviceMemory, ...]:
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
        sum(getattr(state, part) for state in states) for part in ("weights", "gradients", "optimizer")
    )
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
    """Per stage, the micro-batches whose activations a device holds at a moment. A pass may be several spans."""
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


def planned_memory(plan: Plan, chain: Chain) -> dict[str, float]:
    """(2) for every device in use, bytes."""
    return {name: sum(parts) for name, parts in _planned_parts(plan, chain).items()}


def planned_stack(plan: Plan, chain: Chain, cluster: Cluster) -> tuple[DeviceMemory, ...]:
    """(2) for every device in use, piece by piece."""
    found = []
    for name, (weights, gradients, optimizer, activations, buffers) in _planned_parts(plan, chain).items():
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


def _planned_parts(plan: Plan, chain: Chain) -> dict[str, tuple[float, ...]]:
    """Weights, gradients, optimizer, activations, buffers."""
    depths = in_flight(build_schedule(plan.schedule, len(plan.stages), plan.num_micro_batches))
    held: dict[str, tuple[float, ...]] = defaultdict(lambda: (0.0,) * 5)
    for index, stage in enumerate(plan.stages):
        arriving = chain.layers[stage.first - 1].output_bytes if index else 0.0
        returning = chain.layers[stage.end - 1].output_bytes if index + 1 < len(plan.stages) else 0.0
        parts: dict[tuple[int, float], tuple[float, ...]] = {}
        for replica in stage.replicas:
            for name, share in zip(replica.devices, replica.shares, strict=True):
                if (replica.samples, share) not in parts:
                    state = state_bytes(chain, stage, share)
                    kept = depths[index] * activation_bytes(chain, stage, replica.samples, share)
                    more = _passing(chain, stage, replica.samples, share, arriving, returning)
                    parts[replica.samples, share] = (state.weights, state.gradients, state.optimizer, kept, more)
                mine = parts[replica.samples, share]
                held[name] = tuple(a + b for a, b in zip(held[name], mine, strict=True))
    return dict(held)


def _passing(chain: Chain, stage: Stage, samples: int, share: float, arriving: float, returning: float) -> float:
    """What arrives for one more micro-batch, or comes back, and what its forward or backward holds for a moment."""
    ahead, back = (passing_bytes(chain, stage, samples, share, backward=way) for way in (False, True))
    return max(arriving * samples * share + ahead, returning * samples * share + back)
