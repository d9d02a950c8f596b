"""Read throughputs published with torchtitan: Llama 3 under FSDP, tensor, pipeline and context
parallelism.

A row is one run: tokens per second of a device, ``local_batch`` samples of each data-parallel
group. FSDP shards weights (ZeRO 3); under pipeline parallelism it does not gather them again for
every micro-batch (ZeRO 1), and there are as many micro-batches as pipeline stages, torchtitan's
default. *selective op* checkpointing keeps the results of every second matrix product, *selective
layer* recomputes every second block; both are treated as the former here. Weights are fp32 shards,
gathered in bf16; gradients are kept and summed in fp32. A report of 2025 or later that compiles the
model also compiles the loss, which then makes no fp32 copies of the logits; in 2024 compiling the
loss was turned off. The year is part of ``source``.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from argosy.calibrate.run import Degrees, MeasuredRun, Measurements
from argosy.calibrate.table import TableRow, gibibytes, kind_named, machines, one_of, read_table
from argosy.dtype import Dtype
from argosy.plan.plan import Recompute
from argosy.workload.chain import Buffers, Chain, Selective
from argosy.workload.load import load_architecture
from argosy.workload.transformer import build_chain

# Columns that the table must have.
COLUMNS = frozenset(
    {
        "model",
        "gpus",
        "kind",
        "fsdp",
        "tp",
        "pp",
        "cp",
        "vp",
        "local_batch",
        "seq",
        "ac",
        "precision",
        "tokens_per_s_per_gpu",
    }
)
# Presets by the name of the size.
_MODELS = {"8B": "llama-3-8b", "70B": "llama-3-70b", "405B": "llama-3.1-405b"}
# Recomputation by the name of the checkpointing.
_RECOMPUTE = {
    "none": Recompute.NONE,
    "selective op": Recompute.SELECTIVE,
    "selective layer": Recompute.SELECTIVE,
    "full": Recompute.FULL,
}
# Number formats by the name of the precision.
_DTYPES = {"bf16": Dtype.BF16, "float8": Dtype.FP8, "fp8": Dtype.FP8}
# First year in which compiling a model compiled its loss too.
_LOSS_COMPILED_SINCE = 2025


def read_torchtitan(path: Path | str) -> Measurements:
    """Read a table in which every row is a run."""
    runs = tuple(map(_run, read_table(path)))
    return Measurements(source=Path(path).stem, runs=runs, prefetch=True)


def _run(row: TableRow) -> MeasuredRun:
    devices, tokens, pipeline = (row.count(name) for name in ("gpus", "seq", "pp"))
    local, data = row.count("local_batch"), row.count("fsdp")
    chain = _llama(
        row.value("model", one_of(_MODELS)), tokens, row.value("precision", one_of(_DTYPES))
    )
    degrees = Degrees(
        tensor=row.count("tp"),
        data=data,
        pipeline=pipeline,
        context=row.count("cp"),
        chunks=row.count("vp"),
        micro_batch=max(1, local // pipeline),
        global_batch=local * data,
        recompute=row.value("ac", one_of(_RECOMPUTE)),
        zero=3 if pipeline == 1 else 1,
    )
    rate = row.amount("tokens_per_s_per_gpu")
    is_compiled = row.cells.get("compile", "0").strip() == "1"
    return MeasuredRun.even(
        degrees,
        chain,
        machines(row.value("kind", kind_named), devices),
        name=f"{chain.name} s{tokens} {degrees!r}",
        seconds=local * data * tokens / (rate * devices),
        settings={
            "compiled": is_compiled,
            "fused_loss": is_compiled and _year(row) >= _LOSS_COMPILED_SINCE,
            "async_tensor": row.cells.get("async_tp", "0").strip() == "1",
            "buffers": Buffers.TORCHTITAN,
            "selective": Selective.PRODUCTS,
            "gradient_dtype": Dtype.FP32,
            "reduce_dtype": Dtype.FP32,
        },
        peak_bytes=row.value("memory_gib", gibibytes) if "memory_gib" in row.cells else None,
    )


def _year(row: TableRow) -> int:
    """Return the year that the source of a row names; 0 if it names none."""
    found = re.search(r"20\d\d", row.cells.get("source", ""))
    return int(found[0]) if found else 0


@cache
def _llama(name: str, tokens: int, dtype: Dtype) -> Chain:
    return build_chain(
        load_architecture(name), name=name, sequence_length=tokens, dtype=dtype, optimizer="adamw"
    )
