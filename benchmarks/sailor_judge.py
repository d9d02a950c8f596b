"""The simulator published with Sailor, written anew from its formulas, as a judge of plans that is
not ours.

For a plan in Sailor's form with stages s, replicas of (GPU kind, tensor width) and micro-batches of
``mbs`` samples:

    (1)  compute of a stage   = max over its replicas of the sum over its layers of measured forward + backward
    (2)  sending of a stage   = slowest activation to the next stage + slowest gradient to the one before; the last
                                stage counts its gradient twice, the first of more than three its activation twice
    (3)  pipeline             = (M - 1) max over stages of ((1) + (2)) + sum of (1) + sum of (2) + slowest update
    (4)  M                    = ceil(global batch / (mbs x replicas of the first stage))
    (5)  a message of x bytes = x over a bandwidth that is a polynomial of log2(x / 1 MB), measured
         per pair of kinds
                                and number of GPUs
    (6)  gradient sum         = slowest stage: buckets of 500 MB, each 2 (n - 1) messages of 1/n of it, over the slowest
                                pair of neighbouring replicas, one GPU each
    (7)  memory               = 24 bytes per parameter, activations of all stages from this one on, and 2 GB, or 3 GB
                                with tensor parallelism
    (8)  iteration            = (3) + (6)

Sailor's update of a stage is that of its first layer. Nothing here imports the product.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUCKET = 500_000_000
BYTES_PER_PARAMETER = 24
GIB = 2**30
MEMORY = {"A100-40": 40 * GIB, "V100-16": 16 * GIB, "GH-96": 96 * GIB}
FLOAT = 4


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the judge says of a plan."""

    iteration_seconds: float
    fits: bool

    @property
    def iterations_per_second(self) -> float:
        return 1 / self.iteration_seconds


class Judge:
    """Sailor's measurements of one model and its formulas."""

    def __init__(self, folder: Path, model: str = "OPT-350", global_batch: int = 1024) -> None:
        self.global_batch = global_batch
        self.times = _read(folder / "layer-times.json")[model]
        self.model = _read(folder / "models.json")[model]
        self.network = _read(folder / "multizone_bandwidths_het.json")
        self.layers = len(self.model["1"])

    def verdict(self, plan: dict[str, Any]) -> Verdict:
        """(8) and (7)"""
        (pipeline,) = plan["pipeline_list"]
        seconds = self._pipeline(pipeline, plan["mbs"]) + self._gradients(pipeline)
        return Verdict(iteration_seconds=seconds, fits=self._fits(pipeline, plan["mbs"]))

    def _pipeline(self, pipeline: dict[str, Any], samples: int) -> float:
        """(3)"""
        compute, update = [], []
        for layers, replicas in zip(
            pipeline["layers_per_stage"], pipeline["tmp_per_stage"], strict=True
        ):
            rows = [self._rows(replica, samples) for replica in replicas]
            compute.append(max(sum(sum(row[str(layer)][:2]) for layer in layers) for row in rows))
            update.append(max(row[str(layers[0])][2] for row in rows))
        send = self._sending(pipeline, samples)
        slowest = max(one + other for one, other in zip(compute, send, strict=True))
        count = math.ceil(self.global_batch / (samples * pipeline["dp"][0]))
        return (count - 1) * slowest + sum(compute) + sum(send) + max(update)

    def _rows(self, replica: Any, samples: int) -> dict[str, list[float]]:
        (group,), width = replica
        rows: dict[str, list[float]] = self.times[group[0]][str(samples)][str(width)]
        return rows

    def _sending(self, pipeline: dict[str, Any], samples: int) -> list[float]:
        """(2)"""
        stages, layers = pipeline["tmp_per_stage"], pipeline["layers_per_stage"]
        last = len(stages) - 1
        result = []
        for at, replicas in enumerate(stages):
            ahead = back = 0.0
            if at < last:
                size = self._output(layers[at][-1]) * samples
                ahead = max(self._message(size, *pair) for pair in _pairs(replicas, stages[at + 1]))
            if at > 0:
                size = self._output(layers[at][0]) * samples
                back = max(self._message(size, *pair) for pair in _pairs(replicas, stages[at - 1]))
            if at == last:
                result.append(2 * back)
            elif at == 0:
                result.append(ahead if last < 3 else 2 * ahead)
            else:
                result.append(ahead + back)
        return result

    def _output(self, layer: int) -> float:
        return float(self.model["1"][str(layer)]["act_output_floats"] * FLOAT)

    def _message(self, size: float, sender: Any, receiver: Any) -> float:
        """(5) between two replicas, by as many GPUs as each has."""
        return _seconds(size, self._curve(sender, _gpus(sender), receiver, _gpus(receiver)))

    def _curve(self, sender: Any, count: int, receiver: Any, other: int) -> list[float]:
        (kind, _, zone), (end, _, there) = sender[0][0], receiver[0][0]
        curve: list[float] = self.network[zone][kind][str(count)][there][end][str(other)][0]
        return curve

    def _gradients(self, pipeline: dict[str, Any]) -> float:
        """(6)"""
        slowest = 0.0
        for layers, replicas in zip(
            pipeline["layers_per_stage"], pipeline["tmp_per_stage"], strict=True
        ):
            narrowest = min(4, *(width for _, width in replicas))
            weights = (
                sum(self.model["1"][str(layer)]["params_floats"] * FLOAT for layer in layers)
                / narrowest
            )
            for one, other in itertools.pairwise(replicas):
                curve = self._curve(one, 1, other, 1)
                slowest = max(slowest, _all_reduce(weights, len(replicas), curve))
        return slowest

    def _fits(self, pipeline: dict[str, Any], samples: int) -> bool:
        """(7)"""
        stages = list(zip(pipeline["layers_per_stage"], pipeline["tmp_per_stage"], strict=True))
        for at, (layers, replicas) in enumerate(stages):
            for (group, *_), width in replicas:
                amounts = [self.model[str(width)][str(layer)] for layer in layers]
                weights = BYTES_PER_PARAMETER * sum(one["params_floats"] for one in amounts)
                kept = (
                    samples
                    * FLOAT
                    * sum(one["act_mem_floats"] for one in amounts)
                    * (len(stages) - at)
                )
                if weights + kept + (2e9 if width == 1 else 3e9) > MEMORY[group[0]]:
                    return False
        return True


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _pairs(senders: Any, receivers: Any) -> list[tuple[Any, Any]]:
    return [(sender, receivers[index % len(receivers)]) for index, sender in enumerate(senders)]


def _gpus(replica: Any) -> int:
    (group, *_), width = replica
    return min(int(width), int(group[1]))


def _seconds(size: float, curve: list[float]) -> float:
    """(5)"""
    x = math.log2(size / 1e6)
    gigabytes = sum(factor * x ** (len(curve) - 1 - power) for power, factor in enumerate(curve))
    return size / 1e9 / gigabytes


def _all_reduce(size: float, workers: int, curve: list[float]) -> float:
    total = 0.0
    while size > 0 and workers > 1:
        bucket = min(size, BUCKET)
        total += 2 * (workers - 1) * _seconds(bucket / workers, curve)
        size -= bucket
    return total
