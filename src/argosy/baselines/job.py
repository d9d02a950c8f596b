"""What a baseline is asked: a model, a cluster, a batch; and what it may answer."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from argosy.cluster.device import Device
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel, Portion, layer_seconds, stage_seconds
from argosy.plan.plan import Plan, Recompute, Replica, Stage
from argosy.workload.chain import Chain


@dataclass(frozen=True, kw_only=True)
class NoPlan:
    """Why a planner has no plan."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """The question. ``cluster`` is taken as it is at time 0: none of these planners knows of changes."""

    chain: Chain
    cluster: Cluster
    global_batch: int
    model: ComputeModel

    @cached_property
    def nodes(self) -> tuple[tuple[str, ...], ...]:
        """Devices that are there and have the chain's dtype, node by node in the order of the file."""
        able = (tuple(filter(self._can_run, node.devices)) for node in self.cluster.nodes)
        return tuple(names for names in able if names)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(self.nodes))

    @cached_property
    def node_size(self) -> int:
        """The largest number of neighbours into which every node can be cut."""
        return math.gcd(*map(len, self.nodes))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Device kinds, the fastest first."""
        one_of = {self.device(name).kind.name: name for name in reversed(self.devices)}
        return tuple(sorted(one_of, key=lambda kind: (self.pace(one_of[kind]), kind)))

    @cached_property
    def usual(self) -> Device:
        """A device of the kind that there are most of: what a planner for equal devices measures its profile on."""
        counts = Counter(self.device(name).kind.name for name in self.devices)
        most = max(counts, key=lambda kind: counts[kind])
        return next(self.device(name) for name in self.devices if self.device(name).kind.name == most)

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Sizes of micro-batches that the global batch can be cut into, the smallest first."""
        small = [size for size in range(1, math.isqrt(self.global_batch) + 1) if self.global_batch % size == 0]
        return tuple(sorted({*small, *(self.global_batch // size for size in small)}))

    @cached_property
    def widest(self) -> int:
        """Devices over which every layer can be split."""
        return max(1, min(layer.max_tensor_width for layer in self.chain.layers))

    def device(self, name: str) -> Device:
        return self.cluster.device(name)

    def pace(self, name: str) -> float:
        """Seconds that a device needs for the whole model, forward and backward, per sample."""
        device = self.device(name)
        key = (device.kind.name, device.efficiency, device.speed.at(0))
        if key not in self._paces:
            stage = Stage(first=0, end=len(self.chain.layers), replicas=(Replica(devices=(name,), samples=1),))
            samples = self.typical_samples
            seconds = sum(stage_seconds(self.model, self.chain, stage, Portion(device=device, samples=samples)))
            self._paces[key] = seconds / samples / device.speed.at(0)
        return self._paces[key]

    @cached_property
    def _paces(self) -> dict[tuple[str, float, float], float]:
        return {}

    @cached_property
    def typical_samples(self) -> int:
        """With which a device is measured: its even share of the global batch."""
        return max(1, self.global_batch // len(self.devices))

    def layer_times(self, device: Device, samples: int) -> tuple[tuple[float, float], ...]:
        """Forward and backward of every layer on one device alone."""
        portion = Portion(device=device, samples=samples)
        speed = device.speed.at(0)
        pairs = (layer_seconds(self.model, self.chain, layer, portion) for layer in self.chain.layers)
        return tuple((forward / speed, backward / speed) for forward, backward in pairs)

    def between(self, source: str, target: str) -> tuple[float, float]:
        """Bytes/s and seconds of latency from one device to another, alone on the network."""
        key = (source, target)
        if key not in self._routes:
            route = self.cluster.fastest(source, target, 1e6)
            self._routes[key] = self.cluster.bandwidth(route).at(0), self.cluster.latency(route)
        return self._routes[key]

    @cached_property
    def _routes(self) -> dict[tuple[str, str], tuple[float, float]]:
        return {}

    def home(self, name: str) -> str:
        """The node that a device sits in."""
        return self.device(name).node

    def _can_run(self, name: str) -> bool:
        device = self.device(name)
        return device.speed.at(0) > 0 and self.model.can_run(self.chain, device)


Baseline = Callable[[Job], Plan | NoPlan]

RECOMPUTE = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
"""From the fastest to the one that needs least memory."""
