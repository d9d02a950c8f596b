"""Describe the cluster to a planner for equal devices: one profile, one bandwidth inside machines,
one between them.

The profile is measured on the most common kind of device. Times of a range of layers are
differences of running sums; a micro-batch of b samples on m replicas costs what ceil(b / m) samples
cost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from argosy.baselines.job import PlanningJob

Floats = NDArray[np.float64]


class EqualDevices:
    """A view of a job that treats all devices as equal."""

    def __init__(self, job: PlanningJob) -> None:
        self.job = job
        self.sizes = tuple(map(len, job.nodes))
        """Number of devices of every machine."""
        self.count = sum(self.sizes)
        self.num_layers = len(job.chain.layers)
        self._sums: dict[int, tuple[Floats, Floats]] = {}
        self._ranges: dict[int, Floats] = {}

    def seconds(self, samples: int) -> tuple[Floats, Floats]:
        """Return running sums of forward and backward seconds over the layers."""
        if samples not in self._sums:
            times = np.array(self.job.layer_times(self.job.usual, samples))
            self._sums[samples] = _running(times[:, 0]), _running(times[:, 1])
        return self._sums[samples]

    def both(self, micro_batch: int, replicas: int) -> Floats:
        """Return running sums of forward + backward seconds of a micro-batch on a number of
        replicas."""
        forward, backward = self.seconds(math.ceil(micro_batch / replicas))
        return np.asarray(forward + backward)

    def ranges(self, micro_batch: int, replicas: int) -> Floats:
        """Return [a, b]: seconds of layers a..b-1; infinity for an empty range."""
        samples = math.ceil(micro_batch / replicas)
        if samples not in self._ranges:
            sums = self.both(micro_batch, replicas)
            table = sums[None, :] - sums[:, None]
            table[np.tril_indices(len(sums))] = np.inf
            self._ranges[samples] = table
        return self._ranges[samples]

    @cached_property
    def weights(self) -> Floats:
        """Return the running sum of bytes of gradients."""
        layers = self.job.chain.layers
        return _running([layer.parameters * float(self.job.chain.dtype.bytes) for layer in layers])

    @cached_property
    def outputs(self) -> Floats:
        """Return the bytes per sample across the cut before each layer, 0 at both ends."""
        return np.array([0.0, *(layer.output_bytes for layer in self.job.chain.layers[:-1]), 0.0])

    @cached_property
    def inside(self) -> float:
        """Return the bytes/s between two devices of the slowest machine; infinity if no machine has
        two."""
        pairs = [node[:2] for node in self.job.nodes if len(node) > 1]
        return min((self.job.between(*pair)[0] for pair in pairs), default=math.inf)

    @cached_property
    def between(self) -> float:
        """Return the bytes/s between the slowest neighbouring machines; infinity if there is one
        machine."""
        pairs = itertools.pairwise(node[0] for node in self.job.nodes)
        return min((self.job.between(*pair)[0] for pair in pairs), default=math.inf)


def _running(values: Sequence[float] | Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))
