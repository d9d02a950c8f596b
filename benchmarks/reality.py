"""The cost model against measurements that nobody of this project made: ``python -m benchmarks
reality``.

Data are read from ``../shared/data`` (sources in docs/validation.md); what is absent is left out of
the rows.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from argosy.calibrate.file import read_measured
from argosy.calibrate.fit import Errors, errors, nelder_mead
from argosy.calibrate.run import Measurements
from argosy.calibrate.study import Study, study
from argosy.calibrate.vtrain import read_vtrain
from argosy.cluster.catalogue import device_kind
from argosy.cluster.device import Device
from argosy.cluster.trace import FloatArray
from argosy.cost.communicate import all_reduce_seconds
from argosy.cost.compute import ComputeModel, Portion, layer_seconds
from argosy.dtype import Dtype
from argosy.errors import InputError, Mismatch
from argosy.workload.chain import Chain, Layer
from benchmarks.cephalo_profiles import read_cephalo
from benchmarks.registry import Benchmark, Row

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
VTRAIN = DATA / "vtrain" / "ground_truth_single.csv"
GH200 = DATA / "sailor" / "measured" / "gh200-opt350"
MIXED = DATA / "measured" / "sailor-mixed-rtx.csv"
COLLECTIVES = DATA / "collectives"
CEPHALO = DATA / "cephalo"


@cache
def studies() -> tuple[Study, ...]:
    """vTrain's runs, and Sailor's on both of its clusters."""
    found: list[Measurements] = [read_vtrain(VTRAIN)] if VTRAIN.exists() else []
    found += [read_measured(path) for path in (GH200, MIXED) if path.exists()]
    return tuple(study(measured) for measured in found)


Formula = Callable[[float, int, float, float], float]
"""Seconds of bytes among so many devices, at a bandwidth and a latency."""


@dataclass(frozen=True, kw_only=True)
class CollectiveFit:
    """Two constants of a collective, fitted on every other size, and the error on the sizes
    between."""

    name: str
    bandwidth: float
    """Bytes/s."""
    latency: float
    """Seconds."""
    found: Errors


@cache
def collectives() -> tuple[CollectiveFit, ...]:
    """All-reduce among 2, 4 and 8 GPUs of a DGX A100, and sending from one to another: Vidur's
    measurements."""
    if not COLLECTIVES.exists():
        return ()
    reduced = _fit("all-reduce, 2, 4 and 8 GPUs", _sizes("all_reduce"), all_reduce_seconds)
    return reduced, _fit("send, 2 GPUs", _sizes("send_recv"), _send)


def _send(num_bytes: float, count: int, bandwidth: float, latency: float) -> float:
    return num_bytes / bandwidth + latency


def _sizes(kind: str) -> list[tuple[int, float, float]]:
    """(workers, bytes, seconds) inside a node."""
    path = COLLECTIVES / f"vidur-a100_dgx-{kind}.csv"
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return sorted(
        (int(row["num_workers"]), float(row["size"]), float(row[f"time_stats.{kind}.median"]) / 1e3)
        for row in rows
        if row["num_workers"] == row["devices_per_node"]
    )


def _fit(name: str, rows: list[tuple[int, float, float]], formula: Formula) -> CollectiveFit:
    def predict(point: FloatArray, some: list[tuple[int, float, float]]) -> FloatArray:
        bandwidth, latency = np.exp(point)
        return np.array([formula(size, workers, bandwidth, latency) for workers, size, _ in some])

    fitted, others = rows[::2], rows[1::2]
    truth = np.log([seconds for *_, seconds in fitted])
    point = nelder_mead(
        lambda x: float(np.mean(np.abs(np.log(predict(x, fitted)) - truth))), np.log([2e11, 5e-6])
    )
    found = errors(predict(point, others), np.array([seconds for *_, seconds in others]))
    return CollectiveFit(
        name=name, bandwidth=float(np.exp(point[0])), latency=float(np.exp(point[1])), found=found
    )


@dataclass(frozen=True, kw_only=True)
class KindError:
    """How far the roofline is off on one kind of device, over all of its measured blocks."""

    kind: str
    dtype: Dtype
    count: int
    ratio: float
    """Median of predicted over measured forward + backward."""
    error: float
    """Median."""


@cache
def layer_kinds() -> tuple[KindError, ...]:
    """Cephalo's blocks on its kinds of GPU, by the roofline; every second one, for constants came
    from the others."""
    if not CEPHALO.exists():
        return ()
    ratios: dict[tuple[str, Dtype], list[float]] = {}
    for model in json.loads((CEPHALO / "model_latencies.json").read_text(encoding="utf-8")):
        for dtype in (Dtype.FP32, Dtype.FP16):
            for kind, ratio in _ratios(model, dtype):
                ratios.setdefault((kind, dtype), []).append(ratio)
    ratios = {key: found[1::2] for key, found in ratios.items()}
    return tuple(
        KindError(
            kind=kind,
            dtype=dtype,
            count=len(found),
            ratio=float(np.median(found)),
            error=float(np.median(np.abs(np.array(found) - 1))),
        )
        for (kind, dtype), found in sorted(ratios.items())
    )


def _ratios(model: str, dtype: Dtype) -> Iterator[tuple[str, float]]:
    """(kind, predicted over measured) of every measured micro-batch of a model at 512 tokens."""
    try:
        chain, profiles = read_cephalo(CEPHALO, model, dtype=dtype)
    except InputError:
        return
    layer = _block(chain)
    whole = Chain(name=model, layers=(layer,), sequence_length=chain.sequence_length, dtype=dtype)
    for kind, profile in profiles.items():
        try:
            device = Device(name="d0.0", node="d0", kind=device_kind(kind))
            device.kind.peak(dtype)
        except (InputError, Mismatch):
            continue
        for row in profile.rows:
            portion = Portion(device=device, samples=row.micro_batch)
            predicted = sum(layer_seconds(ComputeModel(), whole, layer, portion))
            yield kind, predicted / (row.forward_seconds + row.backward_seconds)


def _block(chain: Chain) -> Layer:
    """A block with the FLOP and kept bytes of its hidden width: Cephalo publishes its
    parameters."""
    one = chain.layers[1]
    tokens = chain.sequence_length
    hidden = one.output_bytes / tokens / chain.dtype.bytes
    flop = 2 * tokens * one.parameters + 4 * tokens**2 * hidden
    return Layer(
        name="block",
        kind="block",
        forward_flop=flop,
        backward_flop=2 * flop,
        parameters=one.parameters,
        activation_bytes=17 * tokens * hidden * chain.dtype.bytes,
        output_bytes=one.output_bytes,
    )


def measure() -> list[Row]:
    rows = []
    for found in studies():
        name = found.measured.source
        if name.startswith("vTrain"):
            rows.append(
                Row(
                    what=f"{name}: median error",
                    value=100 * found.seconds.median,
                    unit="%",
                    target="<= 8",
                )
            )
            rows.append(
                Row(
                    what=f"{name}: rank correlation",
                    value=found.seconds.rank,
                    unit="",
                    target=">= 0.97",
                )
            )
            continue
        rows.append(
            Row(
                what=f"{name}: mean error, time",
                value=100 * found.seconds.mean,
                unit="%",
                target="<= 8",
            )
        )
        if found.memory is not None:
            value = 100 * found.memory.mean
            rows.append(
                Row(what=f"{name}: mean error, memory", value=value, unit="%", target="<= 15")
            )
    for one in collectives():
        rows.append(Row(what=f"{one.name}: median error", value=100 * one.found.median, unit="%"))
    for kind in layer_kinds():
        what = f"block on {kind.kind}, {kind.dtype}: predicted / measured"
        rows.append(Row(what=what, value=kind.ratio, unit=f"median of {kind.count}"))
    return rows


BENCHMARK = Benchmark(
    name="reality",
    shows="the cost model against runs, collectives and layers that others measured",
    measure=measure,
)
