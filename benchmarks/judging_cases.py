"""Planning problems for ``benchmarks.judging``: bundled clusters, and random ones by seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from argosy.cluster.file import build_cluster, load_cluster
from argosy.cluster.topology import Cluster
from argosy.document import Document
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

BUNDLED = (
    ("three-kinds-64", "gpt2-xl", 512),
    ("four-kinds-1024", "llama-2-70b", 1024),
    ("geo-8", "gpt2-xl", 64),
    ("geo-regions-16", "gpt2-xl", 64),
    ("mixed-8", "gpt2-xl", 64),
    ("mixed-16", "llama-3-8b", 64),
    ("mixed-32", "llama-2-7b", 128),
    ("mixed-48", "llama-2-7b", 96),
    ("one-per-node-16", "gpt2-xl", 64),
    ("racks-128", "llama-3-8b", 128),
    ("slow-links-32", "gpt2-xl", 64),
    ("two-cards", "gpt2", 32),
)
"""Cluster, model and global batch."""
_MODELS = ("gpt2", "gpt2-xl", "bert-base", "opt-350m", "llama-3-8b")
_BATCHES = (8, 16, 24, 64, 128)
_KINDS = ("A100-40GB", "V100-32GB", "RTX-3090", "L4")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model to train on a cluster."""

    name: str
    chain: Chain
    cluster: Cluster
    global_batch: int


def bundled() -> Iterator[Problem]:
    """The bundled clusters, each with one model."""
    for cluster, model, batch in BUNDLED:
        yield Problem(
            name=f"{model} on {cluster}",
            chain=load_model(
                model, sequence_length=1024 if "bert" not in model else 512, dtype="fp16"
            ),
            cluster=load_cluster(cluster),
            global_batch=batch,
        )


def drawn(seed: int) -> Problem:
    """The same problem for the same seed: two to six nodes of up to three kinds on one switch,
    under switches with uplinks, or at two sites joined by a link."""
    random = Random(seed)
    model = random.choice(_MODELS)
    content = _cluster_content(random, f"drawn-{seed}")
    return Problem(
        name=f"{model} on drawn-{seed}",
        chain=load_model(model, sequence_length=512, dtype="fp16"),
        cluster=build_cluster(Document("cluster", content, {}), folder=Path()),
        global_batch=random.choice(_BATCHES),
    )


def _cluster_content(random: Random, name: str) -> dict[str, Any]:
    kinds = random.sample(_KINDS, random.randint(1, 3))
    num_nodes = random.randint(max(2, len(kinds)), 6)
    cuts = sorted(random.sample(range(1, num_nodes), len(kinds) - 1))
    counts = [end - begin for begin, end in zip((0, *cuts), (*cuts, num_nodes), strict=True)]
    nodes = []
    names: list[str] = []
    for letter, kind, count in zip("abc", kinds, counts, strict=False):
        nodes.append(
            {
                "name": letter,
                "count": count,
                "devices": {"kind": kind, "count": random.choice((1, 2, 4, 8))},
                "intra": [
                    {
                        "medium": "bus",
                        "bandwidth": f"{_between(random, 8, 300):.3f} GB/s",
                        "latency": "5 us",
                        "shared": random.random() < 0.4,
                    }
                ],
                "nic": {
                    "bandwidth": f"{_between(random, 0.01, 400):.4f} Gbit/s",
                    "latency": f"{_between(random, 1, 2000):.1f} us",
                },
            }
        )
        names += [f"{letter}{index}" for index in range(count)]
    content: dict[str, Any] = {"name": name, "nodes": nodes}
    cut = random.randint(1, len(names) - 1)
    between = random.choice(("switch", "uplinks", "wire"))
    if between == "uplinks":
        content["switches"] = [
            {
                "name": f"rack{index}",
                "nodes": part,
                "uplink": {
                    "bandwidth": f"{_between(random, 0.01, 100):.4f} Gbit/s",
                    "latency": "5 us",
                },
            }
            for index, part in enumerate((names[:cut], names[cut:]))
        ]
    elif between == "wire":
        content["links"] = [
            {
                "name": "wan",
                "between": ["a*", "[bc]*"] if len(kinds) > 1 else ["a0", "a[1-9]"],
                "bandwidth": f"{_between(random, 0.01, 100):.4f} Gbit/s",
                "latency": f"{_between(random, 0.1, 200):.2f} ms",
            }
        ]
    return content


def _between(random: Random, low: float, high: float) -> float:
    """Drawn evenly on a logarithmic scale."""
    return float(low * (high / low) ** random.random())
