"""Read Megatron-LM's times published by Korthikanti et al. (arXiv:2205.05198): GPT of 22 to 1,000
billion weights on A100.

A row is two runs: one with full recomputation and no sequence parallelism, one with selective
recomputation and sequence parallelism. All use fp16, 2,048 tokens, unfused attention, fused
kernels, a vocabulary of 51,200, and gradients kept in fp32. The table also has parameter, optimizer
and activation bytes of the first pipeline stage, which are not read here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from argosy.calibrate.run import Degrees, MeasuredRun, Measurements
from argosy.calibrate.table import TableRow, machines, published_gpt, read_rows
from argosy.dtype import Dtype
from argosy.plan.plan import Recompute
from argosy.workload.systems import Selective

# Columns that the table must have.
COLUMNS = frozenset(
    {
        "model",
        "hidden",
        "heads",
        "layers",
        "tp",
        "pp",
        "interleave",
        "gpus",
        "global_batch",
        "micro_batch",
        "seconds_full",
        "seconds_seqsel",
    }
)
# Sequence length and vocabulary of all runs.
_TOKENS, _WORDS = 2048, 51_200
# The two runs of a row: the column of its seconds, and its recomputation.
_RUNS = (("seconds_full", Recompute.FULL), ("seconds_seqsel", Recompute.SELECTIVE))


def read_korthikanti(path: Path | str, *, partly: bool = False) -> Measurements:
    """Read a table in which every row is two runs."""

    def pair(row: TableRow, number: int) -> list[MeasuredRun]:
        return [replace(_run(row, column, again), row=number) for column, again in _RUNS]

    rows = read_rows(path, pair, partly=partly)
    return Measurements(source=Path(path).stem, runs=rows.values, left_out=rows.left_out)


def _run(row: TableRow, column: str, recompute: Recompute) -> MeasuredRun:

    shape = [row.count(name) for name in ("hidden", "heads", "layers")]
    devices, tensor, pipeline = (row.count(name) for name in ("gpus", "tp", "pp"))
    chain = published_gpt(f"gpt-{row['model']}", "arXiv:2205.05198", _TOKENS, _WORDS, *shape)
    degrees = Degrees(
        tensor=tensor,
        data=devices // (tensor * pipeline),
        pipeline=pipeline,
        chunks=row.count("interleave"),
        micro_batch=row.count("micro_batch"),
        global_batch=row.count("global_batch"),
        recompute=recompute,
    )
    return MeasuredRun.even(
        degrees,
        chain,
        machines("A100-80GB", devices),
        name=f"{chain.name} {degrees!r} {recompute}",
        settings={
            "sequence_parallel": recompute is Recompute.SELECTIVE,
            "selective": Selective.ATTENTION,
            "repeats_exchanges": True,
            "compiled": True,
            "gradient_dtype": Dtype.FP32,
        },
        seconds=row.amount(column),
    )
