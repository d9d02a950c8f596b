"""Read Megatron-LM's times published by Korthikanti et al. (arXiv:2205.05198): GPT of 22 to 1,000
billion weights on A100.

A row is two runs: one with full recomputation and no sequence parallelism, one with selective
recomputation and sequence parallelism. All use fp16, 2,048 tokens, unfused attention, fused
kernels, a vocabulary of 51,200, and gradients kept in fp32. The table also has parameter, optimizer
and activation bytes of the first pipeline stage, which are not read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from argosy.calibrate.run import Degrees, MeasuredRun, Measurements, even_plan
from argosy.calibrate.table import PublishedTable, machines, read_table
from argosy.document import Document
from argosy.dtype import Dtype
from argosy.plan.plan import Recompute
from argosy.workload.chain import Chain, Selective
from argosy.workload.huggingface import read_config
from argosy.workload.transformer import build_chain

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


def read_korthikanti(path: Path | str) -> Measurements:
    """Read a table in which every row is two runs."""
    table = read_table(path)
    runs = tuple(
        replace(_run(table, line, row, column, recompute), row=index)
        for index, (line, row) in enumerate(table.rows)
        for column, recompute in _RUNS
    )
    return Measurements(source=Path(path).stem, runs=runs)


def _run(
    table: PublishedTable, line: int, row: Mapping[str, str], column: str, recompute: Recompute
) -> MeasuredRun:
    shape = [table.count(line, row, name) for name in ("hidden", "heads", "layers")]
    devices, tensor, pipeline = (table.count(line, row, name) for name in ("gpus", "tp", "pp"))
    chain = _gpt(row["model"].strip(), *shape)
    degrees = Degrees(
        tensor=tensor,
        data=devices // (tensor * pipeline),
        pipeline=pipeline,
        chunks=table.count(line, row, "interleave"),
        micro_batch=table.count(line, row, "micro_batch"),
        global_batch=table.count(line, row, "global_batch"),
        recompute=recompute,
    )
    cluster = machines("A100-80GB", devices)
    return MeasuredRun(
        name=f"{chain.name} {degrees!r} {recompute}",
        plan=even_plan(degrees, chain, cluster),
        chain=chain,
        cluster=cluster,
        settings={
            "sequence_parallel": recompute is Recompute.SELECTIVE,
            "selective": Selective.ATTENTION,
            "compiled": True,
            "gradient_dtype": Dtype.FP32,
        },
        seconds=table.amount(line, row, column),
    )


@cache
def _gpt(name: str, hidden: int, heads: int, layers: int) -> Chain:
    config = {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": _TOKENS,
        "vocab_size": _WORDS,
    }
    return build_chain(
        read_config(Document(name, config, {})).architecture,
        name=f"gpt-{name}",
        sequence_length=_TOKENS,
        dtype=Dtype.FP16,
        optimizer="adam",
        source="arXiv:2205.05198",
        fused_attention=False,
    )
