"""The cost model against an H200: ``python -m benchmarks.h200`` prints the errors; with files of
``gpu_profile`` as arguments it first makes of them the data that is judged, and the profiles and
constants that ship with Argosy.

A row is judged by what a user has who does not have it:

    (1)  by the shipped profile of its model, with this row's micro-batch left out
    (2)  by the roofline, its constants fitted on rows of the same dtype: of the other models, or of
         every second shape
    (3)  kept bytes by the chain's own amounts, nothing fitted
    (4)  the peak of a stack of blocks, its two constants of memory fitted on the other models

Seconds are of one block forward and backward: as they come on a host that launches kernels one by
one, which is what the shipped profiles hold, or of the device alone, with every launch made ahead.
Where launches take longer than the device, the host's own scatter is most of the error, whatever
predicts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from argosy.calibrate.fit import Errors, errors, nelder_mead
from argosy.cluster.catalogue import device_kind
from argosy.cluster.device import Device
from argosy.cost.calibration import Calibration
from argosy.cost.calibration_file import dumps_calibration
from argosy.cost.compute import ComputeModel, Portion, layer_seconds
from argosy.dtype import Dtype
from argosy.report.calibration import error_cells
from argosy.workload.chain import Chain, Layer
from argosy.workload.load import load_architecture, load_model
from argosy.workload.profile import Profile, ProfileRow
from argosy.workload.profile_file import write_profile

RAW = Path(__file__).parent / "results" / "2026-11-15-h200-profile.json"
PROFILES = Path(__file__).parent.parent / "src" / "argosy" / "data" / "profiles"
CALIBRATIONS = PROFILES.parent / "calibrations"
DEVICE = Device(name="h0.0", node="h0", kind=device_kind("H200"))
WORK_CONSTANTS = (
    "forward_peak",
    "backward_peak",
    "attention_peak",
    "passes",
    "gathered",
    "forward_start",
    "backward_start",
)
FLOORS = ("forward_floor", "backward_floor", "split_launches")
START = Calibration(
    forward_peak=0.78,
    backward_peak=0.7,
    attention_peak=0.5,
    passes=2.5,
    process_bytes=20e6,
    gathered=20.0,
    forward_start=1e-4,
    backward_start=2e-4,
)
"""Of every fit."""
ALONE = replace(START, forward_floor=0.0, backward_floor=0.0)
"""Of fits to what the device alone needs: no host has to launch anything."""
MEMORY_CONSTANTS = ("process_bytes", "activation_factor")


Guess = Callable[[dict[str, Any], Calibration], tuple[float, ...]]
"""Amounts of a row, by constants or as measured."""
Parts = Callable[[Sequence[dict[str, Any]]], Iterator[Sequence[int]]]
"""Which rows are judged by constants that were fitted on the others."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One line of the table."""

    what: str
    how: str
    found: Errors


@cache
def rows() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(RAW.read_text())["rows"])


@cache
def chain_of(model: str, tokens: int, dtype: str) -> Chain:
    return load_model(model, sequence_length=tokens, dtype=dtype)


def layer_of(row: dict[str, Any]) -> tuple[Chain, Layer]:
    chain = chain_of(row["model"], row["sequence_length"], row["dtype"])
    return chain, next(layer for layer in chain.layers if layer.kind == row["layer"])


def as_they_come(row: dict[str, Any]) -> float:
    return float(row["forward_seconds"] + row["backward_seconds"])


def with_device_seconds(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the device's own seconds in place of those that came."""
    return row | {f"{way}_seconds": row[f"{way}_device_seconds"] for way in ("forward", "backward")}


def predicted_seconds(row: dict[str, Any], model: ComputeModel) -> float:
    return sum(both_ways(row, model))


def both_ways(row: dict[str, Any], model: ComputeModel) -> tuple[float, float]:
    chain, layer = layer_of(row)
    width = row["tensor_width"]
    portion = Portion(device=DEVICE, samples=row["micro_batch"], share=1 / width, width=width)
    return layer_seconds(model, chain, layer, portion)


def profile_of(model: str, found: Sequence[dict[str, Any]], measured: str = "") -> Profile:
    """Rows of one model as a profile."""
    return Profile(
        device="H200",
        model=model,
        sequence_length=found[0]["sequence_length"],
        measured=measured,
        rows=tuple(
            ProfileRow(
                layer=row["layer"],
                micro_batch=row["micro_batch"],
                tensor_width=row["tensor_width"],
                dtype=Dtype(row["dtype"]),
                forward_seconds=float(f"{row['forward_seconds']:.4g}"),
                backward_seconds=float(f"{row['backward_seconds']:.4g}"),
                peak_bytes=row["peak_bytes"],
            )
            for row in found
        ),
    )


def by_profile(found: Sequence[dict[str, Any]], judged: Sequence[dict[str, Any]]) -> Errors:
    """(1), for micro-batches between two others that were measured."""
    truth, guess = [], []
    for row in judged:
        others = [
            other
            for other in found
            if all(other[name] == row[name] for name in ("model", "tensor_width", "dtype"))
            and other["micro_batch"] != row["micro_batch"]
        ]
        counts = [other["micro_batch"] for other in others]
        if counts and min(counts) < row["micro_batch"] < max(counts):
            profile = profile_of(row["model"], others)
            truth.append(as_they_come(row))
            guess.append(predicted_seconds(row, ComputeModel(profiles={"H200": profile})))
    return errors(np.array(guess), np.array(truth))


def blocks(*, above_floor: bool = False) -> list[dict[str, Any]]:
    """Rows of blocks; ``above_floor``: only those that keep the device busy for longer than their
    launches take."""
    found = [row for row in rows() if row["layer"] == "block"]
    busy = [row for row in found if row["forward_device_seconds"] > 0.8 * row["forward_seconds"]]
    return busy if above_floor else found


def left_out(
    found: Sequence[dict[str, Any]],
    names: Sequence[str],
    guess: Guess,
    truth: Guess,
    *,
    parts: Parts | None = None,
    start: Calibration = START,
) -> Iterator[tuple[float, float]]:
    """(2), (4): what was measured and what constants say that were fitted on the rows of no such
    part, row by row."""
    for part in (parts or by_models)(found):
        constants = _fitted(
            [row for at, row in enumerate(found) if at not in part], names, guess, truth, start
        )
        for at in part:
            yield sum(truth(found[at], constants)), sum(guess(found[at], constants))


def by_models(found: Sequence[dict[str, Any]]) -> Iterator[Sequence[int]]:
    for model in sorted({row["model"] for row in found}):
        yield [at for at, row in enumerate(found) if row["model"] == model]


def by_halves(found: Sequence[dict[str, Any]]) -> Iterator[Sequence[int]]:
    """Every second shape."""
    yield range(0, len(found), 2)
    yield range(1, len(found), 2)


def _fitted(
    found: Sequence[dict[str, Any]],
    names: Sequence[str],
    guess: Guess,
    truth: Guess,
    start: Calibration = START,
) -> Calibration:
    """Fitted to every amount of a row by itself: forward and backward, not their sum."""
    measured = np.log([truth(row, start) for row in found])

    def at(point: Any) -> Calibration:
        values = dict(zip(names, np.exp(point).tolist(), strict=True))
        return replace(
            start,
            **{name: min(1.0, x) if name.endswith("_peak") else x for name, x in values.items()},
        )

    def loss(point: Any) -> float:
        constants = at(point)
        return float(np.mean(np.abs(np.log([guess(row, constants) for row in found]) - measured)))

    point = np.log([getattr(start, name) for name in names])
    for _ in range(2):  # a simplex that has collapsed too early is spread out again
        point = nelder_mead(loss, point, steps=400)
    return at(point)


def roofline_seconds(row: dict[str, Any], constants: Calibration) -> tuple[float, ...]:
    return both_ways(row, constants.compute_model())


def measured_seconds(row: dict[str, Any], _: Calibration) -> tuple[float, ...]:
    return float(row["forward_seconds"]), float(row["backward_seconds"])


def measured_peak(row: dict[str, Any], _: Calibration) -> tuple[float, ...]:
    return (float(row["peak_bytes"]),)


def by_roofline(
    found: Sequence[dict[str, Any]], parts: Parts, *, start: Calibration = START
) -> Errors:
    """(2)"""
    pairs: list[tuple[float, float]] = []
    for dtype in sorted({row["dtype"] for row in found}):
        mine = [row for row in found if row["dtype"] == dtype]
        names = WORK_CONSTANTS + FLOORS if start.forward_floor else WORK_CONSTANTS
        pairs += left_out(mine, names, roofline_seconds, measured_seconds, parts=parts, start=start)
    columns = np.array(pairs)
    return errors(columns[:, 1], columns[:, 0])


def kept_bytes(row: dict[str, Any]) -> float:
    return (
        layer_of(row)[1].activation_bytes * float(row["micro_batch"]) / float(row["tensor_width"])
    )


def peak_bytes(row: dict[str, Any], constants: Calibration) -> tuple[float, ...]:
    chain, layer = layer_of(row)
    weights = 2 * layer.parameters * chain.dtype.bytes / row["tensor_width"]
    held = float(row["layers"]) * (weights + constants.activation_factor * kept_bytes(row))
    return (constants.process_bytes + held,)


def judged() -> Iterator[Judged]:
    busy, alone = blocks(above_floor=True), [with_device_seconds(row) for row in blocks()]
    how = "(1) the shipped profile, without the row's micro-batch"
    yield Judged(what="seconds, the device alone", how=how, found=by_profile(alone, alone))
    yield Judged(
        what="seconds as they come, device busy", how=how, found=by_profile(blocks(), busy)
    )
    yield Judged(what="seconds as they come, all", how=how, found=by_profile(blocks(), blocks()))
    for what, found, start in (
        ("seconds, the device alone", alone, ALONE),
        ("seconds as they come, device busy", busy, START),
        ("seconds as they come, all", blocks(), START),
    ):
        for how, parts in (("the other models", by_models), ("every second shape", by_halves)):
            errors_found = by_roofline(found, parts, start=start)
            yield Judged(what=what, how=f"(2) the roofline, fitted on {how}", found=errors_found)
    kept = np.array([(kept_bytes(row), row["kept_bytes"]) for row in blocks()])
    yield Judged(what="bytes kept", how="(3) nothing fitted", found=errors(kept[:, 0], kept[:, 1]))
    pairs = np.array(list(left_out(blocks(), MEMORY_CONSTANTS, peak_bytes, measured_peak)))
    how = "(4) two constants fitted on the other models"
    yield Judged(what="peak bytes of four blocks", how=how, found=errors(pairs[:, 1], pairs[:, 0]))


def by_model() -> Iterator[list[str]]:
    """Model, hidden width, blocks measured, and median errors: (1) device alone, (1) as they come,
    (3), (4)."""
    for model in dict.fromkeys(row["model"] for row in blocks()):
        others = [row for row in blocks() if row["model"] != model]
        constants = _fitted(others, MEMORY_CONSTANTS, peak_bytes, measured_peak)
        mine = [row for row in blocks() if row["model"] == model]
        peaks = [abs(peak_bytes(row, constants)[0] / row["peak_bytes"] - 1) for row in mine]
        kept = [abs(kept_bytes(row) / row["kept_bytes"] - 1) for row in mine]
        alone = [with_device_seconds(row) for row in mine]
        between = len({row["micro_batch"] for row in mine}) > 2
        times = [by_profile(alone, alone).median, by_profile(mine, mine).median] if between else []
        shown = [f"{100 * error:.1f} %" for error in times] or ["-", "-"]
        shown += [f"{100 * float(np.median(found)):.1f} %" for found in (kept, peaks)]
        yield [model, str(load_architecture(model).hidden), str(len(mine)), *shown]


def ship(files: Sequence[Path]) -> None:
    """The data that is judged, and a profile per model."""
    contents = [json.loads(file.read_text()) for file in files]
    head = {name: contents[0][name] for name in ("device", "date", "versions")}
    assert all({name: content[name] for name in head} == head for content in contents)
    found = [row for content in contents for row in content["rows"]]
    text = ",\n".join(json.dumps(row) for row in found)
    RAW.write_text(json.dumps(head)[:-1] + f', "rows": [\n{text}\n]}}\n')
    software = ", ".join(f"{name} {version}" for name, version in sorted(head["versions"].items()))
    repeats = "median of 5 to 100, the mean of six such rounds for blocks that wait for their host"
    measured = f"{head['date']} on an {head['device']} with {software}; eager, {repeats}"
    PROFILES.mkdir(exist_ok=True)
    for model in dict.fromkeys(row["model"] for row in found):
        mine = [row for row in found if row["model"] == model]
        write_profile(profile_of(model, mine, measured), PROFILES / f"h200-{model}.json")


def ship_constants() -> None:
    """A calibration per dtype, fitted on every block as it comes."""
    CALIBRATIONS.mkdir(exist_ok=True)
    for dtype in sorted({row["dtype"] for row in blocks()}):
        mine, names = [row for row in blocks() if row["dtype"] == dtype], WORK_CONSTANTS + FLOORS
        found = _fitted(mine, names, roofline_seconds, measured_seconds)
        kept = replace(
            Calibration(), **{name: float(f"{getattr(found, name):.3g}") for name in names}
        )
        source = (
            f"{len(mine)} blocks in {dtype} on an NVIDIA H200, benchmarks/results/{RAW.stem}.md"
        )
        text = dumps_calibration(kept, fitted=names, source=source)
        (CALIBRATIONS / f"h200-{dtype}.json").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    if arguments:
        ship([Path(argument) for argument in arguments])
        ship_constants()
    for line in judged():
        print(f"{line.what}: {line.how}: {', '.join(error_cells(line.found))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
