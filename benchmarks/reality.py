"""The cost model against measurements that nobody of this project made: ``python -m benchmarks reality``.

Data are read from ``../shared/data`` (sources in docs/validation.md); what is absent is left out of the rows.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from argosy.calibrate.fit import Errors, errors, nelder_mead
from argosy.calibrate.predict import exact_seconds, peak_bytes
from argosy.calibrate.run import MeasuredRun, Measurements
from argosy.calibrate.sailor import read_sailor_runs
from argosy.calibrate.study import Study, study
from argosy.calibrate.vtrain import read_vtrain
from argosy.cluster.catalogue import device_kind
from argosy.cluster.device import Device
from argosy.cluster.trace import FloatArray
from argosy.cost.calibration import Calibration
from argosy.cost.communicate import all_reduce_seconds
from argosy.cost.compute import ComputeModel, Portion, layer_seconds
from argosy.dtype import Dtype
from argosy.errors import InputError, Mismatch
from argosy.plan.plan import Plan, Recompute
from argosy.workload.cephalo import read_cephalo
from argosy.workload.chain import Chain, Layer
from benchmarks.registry import Benchmark, Row

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
VTRAIN = DATA / "vtrain" / "ground_truth_single.csv"
GH200 = DATA / "sailor" / "measured" / "gh200-opt350"
MIXED = DATA / "sailor" / "measured" / "mixed-rtx"
COLLECTIVES = DATA / "collectives"
CEPHALO = DATA / "cephalo"
FACTORS = tuple(float(factor) for factor in np.linspace(0.0, 2.0, 81))
PROCESSES = tuple(float(size) for size in np.linspace(0.0, 7e9, 71))
"""What ``memory_designs`` tries."""


@cache
def studies() -> tuple[Study, ...]:
    """vTrain's runs, and Sailor's on both of its clusters."""
    found: list[Measurements] = [read_vtrain(VTRAIN)] if VTRAIN.exists() else []
    found += [read_sailor_runs(folder) for folder in (GH200, MIXED) if folder.exists()]
    return tuple(study(measured) for measured in found)


@dataclass(frozen=True, kw_only=True)
class MemoryDesign:
    """An explanation of the mixed RTX runs' memory, and how far off it is."""

    name: str
    memory: tuple[float, ...]
    """Relative error of each run's peak, signed."""
    times: str
    """What it does to the error of time, for people."""

    @property
    def mean(self) -> float:
        return float(np.mean(np.abs(self.memory)))


@cache
def memory_designs() -> tuple[MemoryDesign, ...]:
    """As the model says; with constants fitted on the other two runs; with those of the GH200 runs; recomputed."""
    if not (GH200.exists() and MIXED.exists()):
        return ()
    measured = read_sailor_runs(MIXED)
    plain = replace(Calibration(), blocking=measured.blocking)
    elsewhere = next(one.calibration for one in studies() if one.measured.source.endswith(GH200.name))
    each = [plain] * len(measured.runs)
    others = [[run for run in measured.runs if run is not left] for left in measured.runs]
    designs = {
        "nothing fitted": each,
        "a factor on activations, fitted on the other two": [_fitted(plain, runs, (0.0,)) for runs in others],
        "that and bytes of the process, fitted on the other two": [_fitted(plain, runs, PROCESSES) for runs in others],
        "both as fitted on the GH200 runs": [elsewhere] * len(measured.runs),
    }
    found = [_design(name, measured, measured.runs, constants, "as above") for name, constants in designs.items()]
    again = [replace(run, plan=_recomputed(run.plan)) for run in measured.runs]
    off = [exact_seconds(measured, run, plain) / run.seconds - 1 for run in again]
    return (*found, _design("everything recomputed", measured, again, each, f"{100 * np.mean(np.abs(off)):.0f} %"))


def _fitted(start: Calibration, runs: Sequence[MeasuredRun], processes: Sequence[float]) -> Calibration:
    """The factor and the bytes with the least squares of relative errors, of all on a grid."""
    real = np.array([run.peak_bytes for run in runs], dtype=float)
    tried = []
    for factor in FACTORS:
        peaks = peak_bytes(runs, replace(start, activation_factor=factor, process_bytes=0.0))
        tried += [(float((((peaks + more) / real - 1) ** 2).sum()), factor, more) for more in processes]
    _, factor, process = min(tried)
    return replace(start, activation_factor=factor, process_bytes=process)


def _design(
    name: str, measured: Measurements, runs: Sequence[MeasuredRun], constants: Sequence[Calibration], times: str
) -> MemoryDesign:
    peaks = [float(peak_bytes([run], one)[0]) for run, one in zip(runs, constants, strict=True)]
    memory = [peak / (run.peak_bytes or math.nan) - 1 for peak, run in zip(peaks, measured.runs, strict=True)]
    return MemoryDesign(name=name, memory=tuple(memory), times=times)


def _recomputed(plan: Plan) -> Plan:
    return replace(plan, stages=tuple(replace(stage, recompute=Recompute.FULL) for stage in plan.stages))


Formula = Callable[[float, int, float, float], float]
"""Seconds of bytes among so many devices, at a bandwidth and a latency."""


@dataclass(frozen=True, kw_only=True)
class CollectiveFit:
    """Two constants of a collective, fitted on every other size, and the error on the sizes between."""

    name: str
    bandwidth: float
    """Bytes/s."""
    latency: float
    """Seconds."""
    found: Errors


@cache
def collectives() -> tuple[CollectiveFit, ...]:
    """All-reduce among 2, 4 and 8 GPUs of a DGX A100, and sending from one to another: Vidur's measurements."""
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
    point = nelder_mead(lambda x: float(np.mean(np.abs(np.log(predict(x, fitted)) - truth))), np.log([2e11, 5e-6]))
    found = errors(predict(point, others), np.array([seconds for *_, seconds in others]))
    return CollectiveFit(name=name, bandwidth=float(np.exp(point[0])), latency=float(np.exp(point[1])), found=found)


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
    """Cephalo's blocks on its kinds of GPU, by the roofline with the constants of the H200."""
    if not CEPHALO.exists():
        return ()
    ratios: dict[tuple[str, Dtype], list[float]] = {}
    for model in json.loads((CEPHALO / "model_latencies.json").read_text(encoding="utf-8")):
        for dtype in (Dtype.FP32, Dtype.FP16):
            for kind, ratio in _ratios(model, dtype):
                ratios.setdefault((kind, dtype), []).append(ratio)
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
    """A block with the FLOP and kept bytes of its hidden width: Cephalo publishes its parameters."""
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
            rows.append(Row(what=f"{name}: median error", value=100 * found.seconds.median, unit="%", target="<= 8"))
            rows.append(Row(what=f"{name}: rank correlation", value=found.seconds.rank, unit="", target=">= 0.97"))
            continue
        rows.append(Row(what=f"{name}: mean error, time", value=100 * found.seconds.mean, unit="%", target="<= 8"))
        if found.memory is not None:
            value = 100 * found.memory.mean
            rows.append(Row(what=f"{name}: mean error, memory", value=value, unit="%", target="<= 15"))
    for one in collectives():
        rows.append(Row(what=f"{one.name}: median error", value=100 * one.found.median, unit="%"))
    for kind in layer_kinds():
        what = f"block on {kind.kind}, {kind.dtype}: predicted / measured"
        rows.append(Row(what=what, value=kind.ratio, unit=f"median of {kind.count}"))
    return rows


BENCHMARK = Benchmark(
    name="reality", shows="the cost model against runs, collectives and layers that others measured", measure=measure
)
