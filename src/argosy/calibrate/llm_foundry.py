"""Read throughputs published with LLM Foundry: MPT models of many sizes and lengths, fully sharded
over 8 to 512 devices.

A row is one run: tokens per second of the whole job, samples of a device's micro-batch, and the
number of gradient accumulations. ``FULL_SHARD`` is ZeRO 3, ``SHARD_GRAD_OP`` ZeRO 2. Activations
are checkpointed block by block or not at all. ``amp_fp8`` runs the projections of blocks in fp8.
The table lacks the following, which comes from the models' configurations: shapes, positions
learned for the row's length, a vocabulary of 50,368, biases, flash attention, a fused loss.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from argosy.calibrate.run import Degrees, MeasuredRun, Measurements
from argosy.calibrate.table import TableRow, kind_named, machines, one_of, read_rows
from argosy.dtype import Dtype
from argosy.errors import Mismatch, bad_input
from argosy.plan.plan import Recompute
from argosy.workload.architecture import (
    Architecture,
    Attention,
    Block,
    FeedForward,
    Head,
    Length,
    NormKind,
    TokenEmbedding,
)
from argosy.workload.chain import Chain
from argosy.workload.transformer import build_chain

# Columns that the table must have.
COLUMNS = frozenset(
    {
        "Model",
        "SeqLen (T)",
        "# GPUs",
        "GPU",
        "MicroBatchSize",
        "Throughput (T/s)",
        "Precision",
        "Sharding Strategy",
        "Activation Checkpointing",
    }
)
_SHAPES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Hidden width, blocks and heads by size: the configurations in LLM Foundry's
``scripts/train/yamls/pretrain``."""
# Size of the vocabulary.
_WORDS = 50_368
# ZeRO level of each sharding strategy.
_ZERO = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}


def read_llm_foundry(path: Path | str, *, partly: bool = False) -> Measurements:
    """Read a table in which every row is a run."""
    rows = read_rows(path, lambda row, number: [replace(_run(row), row=number)], partly=partly)
    return Measurements(
        source=Path(path).stem, runs=rows.values, prefetch=True, left_out=rows.left_out
    )


def _run(row: TableRow) -> MeasuredRun:
    devices, tokens = row.count("# GPUs"), row.count("SeqLen (T)")
    micro = row.count("MicroBatchSize")
    product = micro * devices * row.count("GradAccum", 1)
    batch = row.count("GlobalBatchSize", product)
    if not row.has("GradAccum") and batch % product == 0:
        product = batch
    if product != batch:
        expected = f"MicroBatchSize x GradAccum x # GPUs = {product}"
        raise bad_input(expected, batch, f"{row.file}:{row.line}: GlobalBatchSize")
    checkpoints = row.is_true("Activation Checkpointing")
    dtype = row.value("Precision", _dtype)
    chain = mpt(row["Model"], tokens, dtype, file=f"{row.file}:{row.line}")
    degrees = Degrees(
        data=devices,
        micro_batch=micro,
        global_batch=batch,
        recompute=Recompute.FULL if checkpoints else Recompute.NONE,
        zero=row.value("Sharding Strategy", one_of(_ZERO)),
    )
    return MeasuredRun.even(
        degrees,
        chain,
        machines(row.value("GPU", kind_named), devices),
        name=f"{chain.name} s{tokens} {degrees!r}",
        settings={"fused_loss": True, "stops_early": True},
        seconds=batch * tokens / row.amount("Throughput (T/s)"),
    )


def _dtype(text: str) -> Dtype:
    names = {"bf16": Dtype.BF16, "fp16": Dtype.FP16, "fp8": Dtype.FP8, "fp32": Dtype.FP32}
    name = text.lower().removeprefix("amp_")
    if name not in names:
        raise Mismatch(text, f"one of {', '.join(names)}, or amp_ and one of these")
    return names[name]


@cache
def mpt(name: str, tokens: int, dtype: Dtype, *, file: str = "") -> Chain:
    """Return an MPT model by the name of its size."""
    name = name.lower().removeprefix("mpt-")
    if name not in _SHAPES:
        raise bad_input(f"one of the MPT sizes {', '.join(_SHAPES)}", name, f"{file}: Model")
    hidden, blocks, heads = _SHAPES[name]
    block = Block(
        attention=Attention(
            heads=heads, kv_heads=heads, head_dim=hidden // heads, qkv_bias=True, output_bias=True
        ),
        feed_forward=FeedForward(inner=4 * hidden, bias=True),
        norm=NormKind.LAYER,
    )
    architecture = Architecture(
        hidden=hidden,
        embedding=TokenEmbedding(vocabulary=_WORDS, width=hidden, position_rows=tokens),
        blocks=(block,) * blocks,
        head=Head(outputs=_WORDS, width=hidden, norm=NormKind.LAYER, tied=True),
        context=tokens,
        length=Length.AT_MOST,
    )
    return build_chain(
        architecture, name=f"mpt-{name}", sequence_length=tokens, dtype=dtype, optimizer="adamw"
    )
