"""Sailor's clusters: A100-40GB and V100-16GB in nodes of four, with the bandwidths that it measured between them.

Figures restated from eth-easl/sailor (MIT): ``intra_node_bandwidths.json`` (4 GPUs) and, for us-central1-a,
``multizone_bandwidths_het.json`` (4 GPUs to 4 GPUs): the saturated bandwidths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import Document

SIZES = ((4, 12), (8, 8), (8, 24), (16, 16), (32, 96), (80, 240), (128, 384))
"""A100 and V100."""
PER_NODE = 4
INSIDE = {"A100-40GB": 243.2e9, "V100-16GB": 68.17e9}
BETWEEN = {"A100-40GB": 6.036e9, "V100-16GB": 5.787e9}
"""Bytes/s out of a node, also to a node of the other kind the smaller of the two."""


def sailor_cluster(fast: int, slow: int) -> Cluster:
    """So many A100 and V100."""
    nodes: list[dict[str, Any]] = [
        {
            "name": name,
            "count": count // PER_NODE,
            "devices": {"kind": kind, "count": PER_NODE},
            "intra": [{"medium": "nvlink", "bandwidth": f"{INSIDE[kind]} B/s"}],
            "nic": {"bandwidth": f"{BETWEEN[kind]} B/s"},
        }
        for name, kind, count in (("a", "A100-40GB", fast), ("v", "V100-16GB", slow))
    ]
    name = f"a100x{fast}-v100x{slow}"
    return build_cluster(Document(name, {"name": name, "nodes": nodes}, {}), folder=Path())
