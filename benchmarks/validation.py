"""``python -m benchmarks.validation docs/validation.md``: the page of figures against measurements
of others."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from argosy.calibrate.fit import Errors
from argosy.calibrate.study import Study
from argosy.cost.calibration import Calibration
from argosy.report.calibration import error_cells, shown_constant
from argosy.units import RATE, SIZE, TIME
from benchmarks import h200, measured, sailor_clusters
from benchmarks.reality import collectives, layer_kinds, studies

OTHERS = {
    "Sailor, gh200-opt350": "Sailor's own simulator: time 8.9 %, memory 6 %; Metis: time 12 %",
}
HEAD = """# Predictions against measurements

Made by `python -m benchmarks.validation docs/validation.md` from measurements of other projects: vTrain
(VIA-Research/vTrain, MIT), Sailor (eth-easl/sailor, MIT), Vidur (microsoft/vidur, MIT), Cephalo (benson-guo/cephalo,
MIT), LLM Foundry (mosaicml/llm-foundry, Apache-2.0), torchtitan (pytorch/torchtitan, BSD-3), Korthikanti et al.
(arXiv:2205.05198), and those that `benchmarks/published` lists; and from layers that we measured on an H200. Runs on
which constants were fitted are not judged. The exact engine, which also decides between plans, makes the predictions. For your own
runs, see `argosy calibrate` and `docs/formats.md`.
"""


def page() -> str:
    return (
        "\n".join(
            [
                HEAD,
                *_tables(),
                *_runs(),
                *_each_run(),
                *_collectives(),
                *_kinds(),
                *_h200(),
                *_clusters(),
            ]
        )
        + "\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *lines, ""]


def _runs() -> Iterator[str]:
    yield "## Runs\n"
    rows = []
    for study in studies():
        shown: list[tuple[str, Errors | None]] = [("time", study.seconds), ("memory", study.memory)]
        for what, found in shown:
            if found is not None:
                rows.append([study.measured.source, what, study.method, *error_cells(found)])
    head = (
        "runs of",
        "error of",
        "how",
        "runs",
        "median",
        "mean",
        "90 % below",
        "worst",
        "rank correlation",
    )
    yield from _table(head, rows)
    for name, text in OTHERS.items():
        yield f"Beside {name}, mean errors published with the data: {text}.\n"
    yield "Constants, fitted ones in bold:\n"
    beside = (
        "split_launches",
        "gathered",
        "forward_start",
        "backward_start",
        "tuned_kernels",
        "compiled",
        "fused_loss",
        "buffers",
        "sequence_parallel",
        "selective",
        "gradient_dtype",
        "reduce_dtype",
        "async_tensor",
        "stops_early",
        "shard",
        "repeats_exchanges",
        "profile_factor",
    )  # stated by runs, or not told by whole iterations
    names = [field.name for field in fields(Calibration) if field.name not in beside]
    yield from _table(
        ["runs of", *names],
        [[s.measured.source, *(_constant(s, name) for name in names)] for s in studies()],
    )
    yield """\
Of the mixed RTX runs one is a copy of another and omitted; the others are judged by their times only. Their memory is
all that was in use on a card: in two runs less than the model's state, in the others three times what the model takes,
and nothing states how much a process took beside the model. The worst predictions of vTrain's runs are those of small
layers on groups of four: the launches of their kernels overlap with reductions that the model adds to them.
"""


def _tables() -> Iterator[str]:
    yield "## Published tables of training runs\n"
    yield """\
`python -m benchmarks.measured` makes this part alone, for these tables or others of the same form. Of every table each
second run is for fitting and the others are judged; a set is the runs of one device kind and precision. *Uncalibrated*:
the constants that come with Argosy, some of which were fitted on the other half of these tables
(`data/devices.toml` says which). *Calibrated*: constants fitted on eight runs of the set's other half. One constant,
what asynchronous tensor parallelism hides, was set by pairs of torchtitan's rows of which one is judged.
"""
    yield from measured.page([measured.FOLDER])
    yield "## Steps of other systems and devices\n"
    yield """\
Steps that were restated from other public pages, before the cost model knew their systems and devices;
`benchmarks/published/README.md` lists the sources. `python -m benchmarks.measured benchmarks/published` makes this part
alone. Runs of Transformer Engine keep activations in fp8, and mixtures of experts and VectorLM state less than their
memory depends on, so such runs can be predicted not to fit.
"""
    yield from measured.page([measured.PUBLISHED])


def _constant(study: Study, name: str) -> str:
    text = shown_constant(study.calibration, name)
    names = {"peak", name} if name in ("forward_peak", "backward_peak") else {name}
    return (
        f"**{text}**" if names & set(study.names) and not names & set(study.unidentified) else text
    )


def _each_run() -> Iterator[str]:
    for study in studies():
        if len(study.judged) > 20:
            continue
        yield f"## {study.measured.source}, run by run\n"
        rows = [
            [
                one.run.name,
                TIME.format(one.run.seconds),
                TIME.format(one.seconds),
                f"{100 * one.error:+.1f} %",
                SIZE.format(one.run.peak_bytes, digits=3) if one.run.peak_bytes else "-",
                SIZE.format(one.peak_bytes, digits=3),
            ]
            for one in study.judged
        ]
        yield from _table(
            ("run", "measured", "predicted", "error", "peak memory", "predicted"), rows
        )


def _collectives() -> Iterator[str]:
    yield "## Collectives on a DGX A100\n"
    yield "Bandwidth and latency of our formulas, fitted on every other size up to 67 MB, judged on those between.\n"
    rows = [
        [
            one.name,
            RATE.format(one.bandwidth),
            TIME.format(one.latency, digits=3),
            *error_cells(one.found),
        ]
        for one in collectives()
    ]
    head = (
        "collective",
        "bandwidth",
        "latency",
        "sizes",
        "median",
        "mean",
        "90 % below",
        "worst",
        "rank correlation",
    )
    yield from _table(head, rows)


def _kinds() -> Iterator[str]:
    yield "## Transformer blocks on other kinds of GPU\n"
    yield """\
Cephalo's measured blocks (forward + backward, 512 tokens) against the roofline with the constants of each kind's
generation. For some generations these were fitted on every second block; the others are judged. fp32 products may have
run as tf32 on kinds that have it; the data do not state it. A ratio far above 1 in fp32 on Ampere and later means tf32.
"""
    rows = [
        [one.kind, str(one.dtype), str(one.count), f"{one.ratio:.2f}", f"{100 * one.error:.0f} %"]
        for one in layer_kinds()
    ]
    yield from _table(
        ("kind", "dtype", "measurements", "predicted / measured, median", "median error"), rows
    )


def _h200() -> Iterator[str]:
    yield "## Layers of real models on an H200\n"
    yield """\
Blocks of eight models, hidden widths 768 to 4096, bf16 and fp32, micro-batches 1 to 16, tensor widths 1 to 8 (each
slice alone), measured by `benchmarks/gpu_profile.py` with torch 2.11.0+cu130 on 2026-11-15
(`benchmarks/results/2026-11-15-h200-profile.json`); the same rows ship as profiles (`--profile h200-llama-2-7b`).
`python -m benchmarks.h200` makes this table alone. *As they come*: a host launches kernels one by one; *the device
alone*: every launch was made ahead; *device busy*: blocks for which the two differ by less than a quarter. In the other
blocks the host limits the pace, and it drifts from second to second (one round of a row against another: 14 % in bf16, 11 % in
fp32), so these rows are the mean of six rounds. (2) has seven constants per dtype: shares of the peak, the passes of
kept bytes, what a split layer moves of whole outputs, and seconds beside the work; and as they come three more: two
floors, and how many more launches a split layer makes. Fitted on all rows they ship as `--calibration h200-bf16` and
`h200-fp32`.
"""
    rows = [[one.what, one.how, *error_cells(one.found)] for one in h200.judged()]
    yield from _table(
        ("error of", "how", "rows", "median", "mean", "90 % below", "worst", "rank correlation"),
        rows,
    )
    yield "Median errors by model:\n"
    head = (
        "model",
        "hidden",
        "blocks",
        "(1) device alone",
        "(1) as they come",
        "(3) bytes kept",
        "(4) peak bytes",
    )
    yield from _table(head, list(h200.by_model()))


def _clusters() -> Iterator[str]:
    yield "## Sailor's clusters\n"
    yield """\
OPT-350 with Sailor's layer times, 1,024 samples of 2,048 tokens, fp32, on A100-40GB and V100-16GB in nodes of four;
iterations per second. The judge is Sailor's simulator, reimplemented from its formulas (`benchmarks/sailor_judge.py`);
a test compares it with five plain uneven splits of the layers. Our planner searches once per number of replicas, for
transfers that overlap and for transfers that block, and keeps its finalists; *first* is the best in the judge of those
that our costs put first, *kept* of all finalists, and *ours* is what small steps from the best finalists reach, led by
the judge (`benchmarks/climbing.py`, `benchmarks/sailor_clusters.py`). Metis reaches 0.0445 on 8 + 8.
"""
    rows = []
    pairs = zip(sailor_clusters.SIZES, sailor_clusters.SAILOR, sailor_clusters.FLOOR, strict=True)
    for size, sailor, floor in pairs:
        entry = sailor_clusters.best_plan(size)
        figures = [
            f"{entry.first:.4f}",
            f"{entry.kept:.4f}",
            f"**{entry.judged:.4f}**",
            f"{sailor:.4f}",
        ]
        figures += [
            f"{floor:.4f}" if floor else "-",
            f"{entry.ours:.4f}",
            f"{entry.cpu_seconds:.0f} s",
        ]
        rows.append([f"{size[0]} + {size[1]}", *figures, sailor_clusters.describe(entry.plan)])
    head = (
        "A100 + V100",
        "first",
        "kept",
        "ours",
        "Sailor",
        "plain split",
        "ours, our simulator",
        "CPU",
        "plan",
    )
    yield from _table(head, rows)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
