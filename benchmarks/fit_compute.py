"""How well the compute model predicts measured layers: ``python -m benchmarks compute``."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from argosy.cluster.catalogue import device_kind
from argosy.cluster.device import Device
from argosy.cost.compute import ComputeModel, Portion, layer_seconds
from argosy.dtype import Dtype
from argosy.workload.chain import Chain, Layer
from benchmarks.registry import Benchmark, Row

MEASURED = Path(__file__).parent / "results" / "2026-11-15-h200-layers.json"


def block(hidden: int, sequence: int) -> Layer:
    """The block that ``gpu_layers`` measures: 12 h^2 weights, fused attention, 34 s h bytes kept at
    16 bit."""
    flop = 24 * sequence * hidden**2 + 4 * sequence**2 * hidden
    return Layer(
        name="block",
        kind="block",
        forward_flop=flop,
        backward_flop=2 * flop,
        parameters=12 * hidden**2,
        activation_bytes=34 * sequence * hidden,
        output_bytes=2 * sequence * hidden,
    )


def errors(
    model: ComputeModel, *, launch_bound: bool | None = None
) -> tuple[list[float], list[float]]:
    """Relative errors of forward and backward over the measured rows, or only those at (off) the
    model's floor."""
    device = Device(name="h0.0", node="h0", kind=device_kind("H200"))
    forward_errors, backward_errors = [], []
    for row in json.loads(MEASURED.read_text())["rows"]:
        layer = block(row["hidden"], row["sequence"])
        chain = Chain(
            name="block", layers=(layer,), sequence_length=row["sequence"], dtype=Dtype.BF16
        )
        width = row["tensor_width"]
        portion = Portion(device=device, samples=row["micro_batch"], share=1 / width, width=width)
        forward, backward = layer_seconds(model, chain, layer, portion)
        if launch_bound is not None and launch_bound != (forward == model.forward_floor):
            continue
        forward_errors.append(abs(forward / row["forward_seconds"] - 1))
        backward_errors.append(abs(backward / row["backward_seconds"] - 1))
    return forward_errors, backward_errors


def measure() -> list[Row]:
    rows = []
    for which, launch_bound in (("all", None), ("large", False), ("launch-bound", True)):
        for way, found in zip(
            ("forward", "backward"), errors(ComputeModel(), launch_bound=launch_bound), strict=True
        ):
            what = f"{way}, {which} layers ({len(found)}): median error"
            rows.append(Row(what=what, value=100 * statistics.median(found), unit="%"))
    return rows


BENCHMARK = Benchmark(
    name="compute",
    shows="the compute model against 128 measured shapes of a transformer block on an H200, bf16, eager PyTorch",
    measure=measure,
)
