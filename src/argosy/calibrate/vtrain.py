"""Iteration times published with vTrain: Megatron-DeepSpeed on one node of 8 A100, over all even degrees.

The CSV has a row per run: GPUs, global batch, micro-batch, hidden size, heads, layers, sequence length, the three
degrees, milliseconds. What its authors' configurations say beside it: GPT with 50,257 tokens and tied embeddings, fp16,
1F1B, activations recomputed in full, weights summed after the last backward. Not said, and taken from elsewhere: the
node's links (NVLink of an A100: 300 GB/s each way; ``bandwidth`` is fitted on it) and that attention is unfused, as in
Megatron-LM before 2023.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from argosy.calibrate.run import Degrees, MeasuredRun, Measurements, even_plan
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import Document, read_text
from argosy.dtype import Dtype
from argosy.errors import InputError, Problem, show
from argosy.plan.plan import Recompute
from argosy.workload.chain import Chain
from argosy.workload.huggingface import read_config
from argosy.workload.transformer import build_chain

COLUMNS = (
    "# GPUs",
    "global batch",
    "micro batch",
    "hidden size",
    "attention heads",
    "# layers",
    "sequence length",
    "tensor parallelism",
    "data parallelism",
    "pipeline parallelism",
    "iteration time (ms)",
)
_VOCABULARY = 50_257
_LARGEST = 10**9
_NODE = {
    "name": "a100-node",
    "nodes": [
        {
            "name": "a",
            "devices": {"kind": "A100-80GB", "count": 8},
            "intra": [{"medium": "nvlink", "bandwidth": "300 GB/s", "latency": "3 us"}],
        }
    ],
}


def is_vtrain(path: Path | str) -> bool:
    """Whether a file is a CSV with vTrain's columns."""
    if Path(path).suffix != ".csv":
        return False
    return tuple(next(_rows(path), ())) == COLUMNS


def read_vtrain(path: Path | str) -> Measurements:
    """Every row as a run on the same node."""
    cluster = build_cluster(Document("vtrain", _NODE, {}), folder=Path())
    rows = list(_rows(path))
    if not rows or tuple(rows[0]) != COLUMNS:
        raise InputError([Problem(file=str(path), line=1, expected=f"the columns {', '.join(COLUMNS)}")])
    runs = tuple(_run(path, line, row, cluster) for line, row in enumerate(rows[1:], start=2) if row)
    return Measurements(source="vTrain, 8 x A100", runs=runs)


def _rows(path: Path | str) -> Iterator[list[str]]:
    rows = csv.reader(io.StringIO(read_text(path), newline=""))
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(
                [Problem(file=str(path), line=rows.line_num, found=str(error), expected="a row of a CSV file")]
            ) from None


def _run(path: Path | str, line: int, row: list[str], cluster: Cluster) -> MeasuredRun:
    try:
        _, batch, micro, hidden, heads, layers, tokens, tensor, data, pipeline = (int(text) for text in row[:-1])
        seconds = float(row[-1]) / 1e3
        if not 0 < seconds < math.inf or any(not 0 < int(text) <= _LARGEST for text in row[:-1]):
            raise ValueError
    except ValueError:
        expected = "ten whole numbers above 0 and the milliseconds of an iteration"
        raise InputError([Problem(file=str(path), line=line, found=show(",".join(row)), expected=expected)]) from None
    degrees = Degrees(
        tensor=tensor,
        data=data,
        pipeline=pipeline,
        micro_batch=micro,
        global_batch=batch,
        recompute=Recompute.FULL,
    )
    chain = _gpt(hidden, heads, layers, tokens)
    name = f"h{hidden} l{layers} {degrees!r}"
    plan = even_plan(degrees, chain, cluster)
    return MeasuredRun(name=name, plan=plan, chain=chain, cluster=cluster, seconds=seconds)


@cache
def _gpt(hidden: int, heads: int, layers: int, tokens: int) -> Chain:
    config = {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": tokens,
        "vocab_size": _VOCABULARY,
    }
    return build_chain(
        read_config(Document("vtrain", config, {})).architecture,
        name=f"gpt-h{hidden}-l{layers}",
        sequence_length=tokens,
        dtype=Dtype.FP16,
        optimizer="adam",
        source="vTrain's validation runs",
        fused_attention=False,
    )
