"""Read throughputs published with torchtitan: Llama 3 under FSDP, tensor, pipeline and context
parallelism.

A row is one run: tokens per second of a device, ``local_batch`` samples of each data-parallel
group. FSDP shards weights (ZeRO 3); under pipeline parallelism it does not gather them again for
every micro-batch (ZeRO 1), and there are as many micro-batches as pipeline stages, torchtitan's
default. *selective op* checkpointing keeps the results of every second matrix product, *selective
layer* recomputes every second block; both are treated as the former here. Weights are fp32 shards,
gathered in bf16, or fp8 if products are in fp8; gradients are kept and summed in fp32. If there are
more devices than the degrees state, such groups have copies (hybrid sharding).

What torchtitan does has changed, so a row needs a date: the year, or year and month, in ``source``.
Since April 2025 (pull request 1033) compiling the model compiles the loss, which then makes no fp32
copies of the logits. Since August 2025 (pull request 1094) the weights of the embedding are freed
after its forward. On Blackwell attention is cuDNN's (pull request 1196), whose result *selective
op* did not keep before December 2025 (pull request 2095). A row about Blackwell without a date, or
without a month, is of the second half of 2025.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from argosy.calibrate.run import Degrees, MeasuredRun, Measurements
from argosy.calibrate.table import TableRow, gibibytes, kind_named, machines, one_of, read_rows
from argosy.dtype import Dtype
from argosy.errors import Mismatch, invalid
from argosy.plan.plan import Recompute
from argosy.workload.chain import Chain
from argosy.workload.load import load_architecture, preset_names
from argosy.workload.systems import Buffers, Selective
from argosy.workload.transformer import build_chain

# Columns that the table must have.
COLUMNS = frozenset(
    {
        "model",
        "gpus",
        "kind",
        "fsdp",
        "local_batch",
        "seq",
        "ac",
        "precision",
        "tokens_per_s_per_gpu",
    }
)
# Presets by the name of the size.
_MODELS = {
    "1B": "llama-3.2-1b",
    "3B": "llama-3.2-3b",
    "8B": "llama-3-8b",
    "70B": "llama-3-70b",
    "405B": "llama-3.1-405b",
}
# Recomputation by the name of the checkpointing.
_RECOMPUTE = {
    "none": Recompute.NONE,
    "no": Recompute.NONE,
    "off": Recompute.NONE,
    "selective": Recompute.SELECTIVE,
    "selective op": Recompute.SELECTIVE,
    "per op sac": Recompute.SELECTIVE,
    "sac": Recompute.SELECTIVE,
    "selective layer": Recompute.SELECTIVE,
    "full": Recompute.FULL,
}
# Number formats by how the name of the precision begins.
_DTYPES = {
    "bf16": Dtype.BF16,
    "bfloat16": Dtype.BF16,
    "float8": Dtype.FP8,
    "fp8": Dtype.FP8,
    "mxfp8": Dtype.FP8,
    "fp16": Dtype.FP16,
    "fp32": Dtype.FP32,
}
# Year and month since which compiling a model compiles its loss too.
_LOSS_COMPILED_SINCE = (2025, 4)
# Year and month since which the embedding is sharded apart from the head.
_EMBEDDING_FREED_SINCE = (2025, 8)
# Year and month since which selective checkpointing keeps the results of cuDNN's attention.
_CUDNN_KEPT_SINCE = (2025, 12)
# Families of devices on which attention is cuDNN's, and the date of a row that states none.
_BLACKWELL = ("B200", "GB200", "B300", "GB300")
_BLACKWELL_DATE = (2025, 9)


def read_torchtitan(path: Path | str, *, partly: bool = False) -> Measurements:
    """Read a table in which every row is a run."""
    rows = read_rows(path, lambda row, number: [replace(_run(row), row=number)], partly=partly)
    return Measurements(
        source=Path(path).stem, runs=rows.values, prefetch=True, left_out=rows.left_out
    )


def _run(row: TableRow) -> MeasuredRun:
    devices, tokens, shard = (row.count(name) for name in ("gpus", "seq", "fsdp"))
    tensor, pipeline, context, chunks = (row.count(name, 1) for name in ("tp", "pp", "cp", "vp"))
    local, width = row.count("local_batch"), tensor * pipeline * context
    if devices % (shard * width):
        found, expected = f"{devices} gpus", f"a multiple of fsdp x tp x pp x cp = {shard * width}"
        raise invalid(file=row.file, line=row.line, found=found, expected=expected)
    data = devices // width
    chain = _llama(row.value("model", _preset), tokens, row.value("precision", _dtype))
    degrees = Degrees(
        tensor=tensor,
        data=data,
        pipeline=pipeline,
        context=context,
        chunks=chunks,
        micro_batch=max(1, local // pipeline),
        global_batch=max(1, local // pipeline) * min(local, pipeline) * data,
        recompute=row.value("ac", one_of(_RECOMPUTE)),
        zero=3 if pipeline == 1 else 1,
    )
    if degrees.global_batch != local * data:
        expected = f"a multiple of pp = {pipeline}, or less"
        raise invalid("local_batch", str(local), expected, file=row.file, line=row.line)
    kind = row.value("kind", kind_named)
    return MeasuredRun.even(
        degrees,
        chain,
        machines(kind, devices),
        name=f"{chain.name} s{tokens} {degrees!r}",
        seconds=local * data * tokens / (row.amount("tokens_per_s_per_gpu") * devices),
        settings={
            **_by_date(_date(row, kind), kind, is_compiled=row.is_true("compile")),
            "async_tensor": row.is_true("async_tp"),
            "shard": shard if shard < data else None,
            "stops_early": True,
            "repeats_exchanges": True,
            "gradient_dtype": Dtype.FP32,
            "reduce_dtype": Dtype.FP32,
        },
        peak_bytes=row.value("memory_gib", gibibytes) if row.has("memory_gib") else None,
    )


def _preset(text: str) -> str:
    """Return the name of a preset: of a size of Llama 3, or a preset's own name."""
    name = re.sub(r"[\s_]+", "-", text.lower())
    name = re.sub(r"^llama-?3", "llama-3", name)
    if name in preset_names():
        return name
    if text.upper() not in _MODELS:
        raise Mismatch(text, f"one of {', '.join(_MODELS)}, or a model that comes with Argosy")
    return _MODELS[text.upper()]


def _dtype(text: str) -> Dtype:
    """Return the number format of a precision, whose name may go on with a way of scaling."""
    first = re.split(r"[\s_-]", text.lower())[0]
    if first not in _DTYPES:
        raise Mismatch(text, f"one of {', '.join(_DTYPES)}")
    return _DTYPES[first]


def _by_date(date: tuple[int, int], kind: str, *, is_compiled: bool) -> dict[str, object]:
    """Return the settings that depend on the version of torchtitan."""
    forgets = _is_blackwell(kind) and date < _CUDNN_KEPT_SINCE
    is_late = date >= _EMBEDDING_FREED_SINCE
    return {
        "compiled": is_compiled,
        "fused_loss": is_compiled and date >= _LOSS_COMPILED_SINCE,
        "buffers": Buffers.TORCHTITAN_2025 if is_late else Buffers.TORCHTITAN,
        "selective": Selective.PRODUCTS_ALONE if forgets else Selective.PRODUCTS,
    }


def _date(row: TableRow, kind: str) -> tuple[int, int]:
    """Return the year and month that the source of a row names; month 1 if it names none, and year
    0 if it names neither."""
    found = re.search(
        r"(20\d\d)[-/.]?(0[1-9]|1[0-2])?(?!\d)", row["source"] if row.has("source") else ""
    )
    if _is_blackwell(kind) and (found is None or found[2] is None):
        return max(_BLACKWELL_DATE, (int(found[1]), 1)) if found else _BLACKWELL_DATE
    return (int(found[1]), int(found[2] or 1)) if found else (0, 0)


def _is_blackwell(kind: str) -> bool:
    return kind.split("-")[0] in _BLACKWELL


@cache
def _llama(name: str, tokens: int, dtype: Dtype) -> Chain:
    return build_chain(
        load_architecture(name), name=name, sequence_length=tokens, dtype=dtype, optimizer="adamw"
    )
