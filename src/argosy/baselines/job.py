"""Define the input of a baseline (a model, a cluster, a batch) and its possible results."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from argosy.cluster.device import Device
from argosy.cluster.topology import Cluster
from argosy.cost.communicate import num_reductions
from argosy.cost.compute import ComputeModel, Portion, layer_seconds, recompute_seconds
from argosy.plan.plan import Plan, Recompute
from argosy.workload.chain import Chain


@dataclass(frozen=True, kw_only=True)
class NoPlan:
    """A reason why a planner has no plan."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class PlanningJob:
    """An input that a planner gets. ``cluster`` is used as it is at time 0: none of these planners
    considers changes."""

    chain: Chain
    cluster: Cluster
    global_batch: int
    model: ComputeModel

    @cached_property
    def nodes(self) -> tuple[tuple[str, ...], ...]:
        """Return the devices that work and support the chain's dtype, node by node in the order of
        the file."""
        able = (tuple(filter(self._can_run, node.devices)) for node in self.cluster.nodes)
        return tuple(names for names in able if names)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(self.nodes))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Return the device kinds, the fastest first."""
        example = {self.device(name).kind.name: name for name in reversed(self.devices)}
        return tuple(sorted(example, key=lambda kind: (self.pace(example[kind]), kind)))

    @cached_property
    def usual(self) -> Device:
        """Return a device of the most common kind, on which a planner for equal devices measures
        its profile."""
        counts = Counter(self.device(name).kind.name for name in self.devices)
        most = max(counts, key=lambda kind: counts[kind])
        return next(
            self.device(name) for name in self.devices if self.device(name).kind.name == most
        )

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Return the sizes of micro-batches that divide the global batch, the smallest first."""
        small = [
            size
            for size in range(1, math.isqrt(self.global_batch) + 1)
            if self.global_batch % size == 0
        ]
        return tuple(sorted({*small, *(self.global_batch // size for size in small)}))

    @cached_property
    def widest(self) -> int:
        """Return the largest number of devices over which every layer can be split."""
        return max(1, min(layer.max_tensor_width for layer in self.chain.layers))

    def device(self, name: str) -> Device:
        return self.cluster.device(name)

    def pace(self, name: str) -> float:
        """Return the seconds per sample that a device needs for the whole model, forward and
        backward."""
        return (
            self.running_seconds(name, self.typical_samples, 1, Recompute.NONE)[-1]
            / self.typical_samples
        )

    @cached_property
    def typical_samples(self) -> int:
        """Return the number of samples with which a device is measured: its even share of the
        global batch."""
        return max(1, self.global_batch // len(self.devices))

    def running_seconds(
        self, name: str, samples: int, width: int, recompute: Recompute
    ) -> list[float]:
        """Return running sums over the layers of forward + backward seconds on one of ``width``
        devices that share them, without their communication."""
        device = self.device(name)
        key = (device.kind.name, device.efficiency, device.speed.at(0), samples, width, recompute)
        if key not in self._sums:
            portion = Portion(device=device, samples=samples, share=1 / width, width=width)
            sums = [0.0]
            for layer in self.chain.layers:
                forward, backward = layer_seconds(self.model, self.chain, layer, portion)
                again = recompute_seconds(
                    self.model, self.chain, layer, portion, recompute, forward
                )
                sums.append(sums[-1] + (forward + backward + again) / device.speed.at(0))
            self._sums[key] = sums
        return self._sums[key]

    @cached_property
    def _sums(self) -> dict[tuple[object, ...], list[float]]:
        return {}

    @cached_property
    def reductions(self) -> list[tuple[float, int]]:
        """Return running sums of the bytes per sample, and of the number, of reductions in a
        tensor-parallel forward."""
        sums = [(0.0, 0)]
        for layer in self.chain.layers:
            sums.append((sums[-1][0] + layer.reduced_bytes, sums[-1][1] + num_reductions(layer)))
        return sums

    @cached_property
    def parameters(self) -> list[int]:
        """Return the running sum of weights; tied weights count in every layer that uses them."""
        counts = (layer.parameters + layer.tied_parameters for layer in self.chain.layers)
        return list(itertools.accumulate(counts, initial=0))

    def layer_times(self, device: Device, samples: int) -> tuple[tuple[float, float], ...]:
        """Return the forward and backward seconds of every layer on one device alone."""
        portion = Portion(device=device, samples=samples)
        speed = device.speed.at(0)
        pairs = (
            layer_seconds(self.model, self.chain, layer, portion) for layer in self.chain.layers
        )
        return tuple((forward / speed, backward / speed) for forward, backward in pairs)

    def between(self, source: str, target: str) -> tuple[float, float]:
        """Return bytes/s and seconds of latency from one device to another on an otherwise idle
        network."""
        key = (source, target)
        if key not in self._routes:
            route = self.cluster.fastest(source, target, 1e6)
            self._routes[key] = self.cluster.bandwidth_at(route), self.cluster.latency(route)
        return self._routes[key]

    @cached_property
    def _routes(self) -> dict[tuple[str, str], tuple[float, float]]:
        return {}

    @cached_property
    def looks(self) -> dict[str, tuple[str, float]]:
        """Return each device's node and pace: neighbours with equal values may form a
        tensor-parallel group."""
        return {name: (self.device(name).node, self.pace(name)) for name in self.devices}

    def _can_run(self, name: str) -> bool:
        device = self.device(name)
        return device.speed.at(0) > 0 and self.model.can_run(self.chain, device)


# A planner to compare with: it returns a plan, or the reason why it has none.
Baseline = Callable[[PlanningJob], Plan | NoPlan]

RECOMPUTE = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
"""Recomputation from the fastest choice to the one that needs least memory."""
