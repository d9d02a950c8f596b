"""Read iteration times published with vTrain: Megatron-DeepSpeed on one node of 8 A100, over all
even degrees.

The CSV has a row per run: GPUs, global batch, micro-batch, hidden size, heads, layers, sequence
length, the three degrees, milliseconds. The authors' configurations add: GPT with a vocabulary of
50,257 and tied embeddings, fp16, 1F1B, full recomputation, fused kernels, gradients summed after
the last backward. Two facts are not published and are assumed: the node's links (NVLink of an A100:
300 GB/s each way; ``bandwidth`` is fitted on it), and unfused attention, as in Megatron-LM before
2023.
"""

from __future__ import annotations

from pathlib import Path

from argosy.calibrate.run import Degrees, MeasuredRun, Measurements
from argosy.calibrate.table import TableRow, published_gpt, read_rows, read_table
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import Document
from argosy.errors import invalid
from argosy.plan.plan import Recompute

# Columns that the table must have.
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
# Size of the vocabulary.
_VOCABULARY = 50_257
# The node that all runs used.
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


def read_vtrain(path: Path | str, *, partly: bool = False) -> Measurements:
    """Read a table in which every row is a run on the same node."""
    rows = read_table(path)
    if rows and not all(map(rows[0].has, COLUMNS)):
        raise invalid(file=str(path), line=1, expected=f"the columns {', '.join(COLUMNS)}")
    cluster = build_cluster(Document("vtrain", _NODE, {}), folder=Path())
    read = read_rows(path, lambda row, _: [_run(row, cluster)], partly=partly)
    return Measurements(source="vTrain, 8 x A100", runs=read.values, left_out=read.left_out)


def _run(row: TableRow, cluster: Cluster) -> MeasuredRun:
    _, batch, micro, hidden, heads, layers, tokens, tensor, data, pipeline = (
        row.count(column) for column in COLUMNS[:-1]
    )
    degrees = Degrees(
        tensor=tensor,
        data=data,
        pipeline=pipeline,
        micro_batch=micro,
        global_batch=batch,
        recompute=Recompute.FULL,
    )
    name, source = f"gpt-h{hidden}-l{layers}", "vTrain's validation runs"
    chain = published_gpt(name, source, tokens, _VOCABULARY, hidden, heads, layers)
    return MeasuredRun.even(
        degrees,
        chain,
        cluster,
        name=f"h{hidden} l{layers} {degrees!r}",
        settings={"compiled": True, "sequence_parallel": False},
        seconds=row.amount(COLUMNS[-1]) / 1e3,
    )
