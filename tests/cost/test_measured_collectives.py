"""All-reduces and messages as measured on DGX A100 nodes (microsoft/vidur, MIT), against the closed
forms.

Four constants: the share of NVLink's 300 GB/s that arrives and the latency of a step inside a node;
the bandwidth of one of a node's four network cards and the latency of a step between nodes. NCCL
went around in one flat ring.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.collective import once_around, seconds_alone
from argosy.document import Document
from argosy.plan.plan import Algorithm

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "collectives"
NVLINK = 300e9
SHARE, STEP = 0.55, 10e-6
CARD, LONG_STEP = 5.5e9, 20e-6
CARDS = 4

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="no measured collectives in ../shared/data"
)


@dataclass(frozen=True)
class Row:
    workers: int
    per_node: int
    size: int
    seconds: float


def rows(collective: str) -> Iterator[Row]:
    with (FOLDER / f"vidur-a100_dgx-{collective}.csv").open() as lines:
        for row in csv.DictReader(lines):
            seconds = float(row[f"time_stats.{collective}.median"]) / 1e3
            yield Row(
                int(row["num_workers"]), int(row["devices_per_node"]), int(row["size"]), seconds
            )


def dgx(workers: int, per_node: int) -> Cluster:
    node = {
        "name": "d",
        "count": workers // per_node,
        "devices": {"kind": "A100-80GB", "count": per_node},
        "intra": [
            {
                "medium": "nvlink",
                "bandwidth": f"{SHARE * NVLINK / 1e9} GB/s",
                "latency": f"{STEP * 1e6} us",
            }
        ],
        "nic": {
            "bandwidth": f"{min(per_node, CARDS) * CARD / 1e9} GB/s",
            "latency": f"{LONG_STEP / 2 * 1e6} us",
        },
    }
    return build_cluster(Document("cluster", {"name": "dgx", "nodes": [node]}, {}), folder=Path())


def predicted(row: Row) -> float:
    where = dgx(row.workers, row.per_node)
    names = [device.name for device in where.devices]
    best = []
    for algorithm in (
        (Algorithm.RING, Algorithm.TREE) if row.workers == row.per_node else (Algorithm.RING,)
    ):
        pairs, rounds = once_around(algorithm, names, lambda name: name.partition(".")[0])
        amounts = {pair: 2 * share * row.size for pair, share in pairs.items()}
        best.append(seconds_alone(where, amounts, 2 * rounds))
    return min(best)


def test_units_agree_with_physical_limits() -> None:
    """Bytes and milliseconds: nothing beats NVLink, and nothing is a thousandth of it."""
    for collective in ("all_reduce", "send_recv"):
        for row in rows(collective):
            factor = 2 * (row.workers - 1) / row.workers if collective == "all_reduce" else 1
            assert factor * row.size / row.seconds < NVLINK
        large = [row for row in rows(collective) if row.size > 6e7 and row.workers == row.per_node]
        assert all(row.size / row.seconds > NVLINK / 10 for row in large)


def test_all_reduces_are_predicted_within_an_eighth() -> None:
    sampled = [row for at, row in enumerate(rows("all_reduce")) if at % 7 == 0]
    inside = [
        abs(predicted(row) / row.seconds - 1) for row in sampled if row.workers == row.per_node
    ]
    across = [
        abs(predicted(row) / row.seconds - 1) for row in sampled if row.workers != row.per_node
    ]
    assert statistics.median(inside) < 0.12
    assert statistics.median(across) < 0.10


def test_messages_are_predicted_within_a_tenth() -> None:
    """Point to point reaches more of a link than a ring does: 240 of 300 GB/s, and 7.5 GB/s of a
    card."""
    for per_node, bandwidth in ((2, 240e9), (1, 7.5e9)):
        errors = [
            abs((5e-6 + row.size / bandwidth) / row.seconds - 1)
            for row in rows("send_recv")
            if row.per_node == per_node
        ]
        assert statistics.median(errors) < 0.10
