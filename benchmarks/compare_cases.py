"""The grid of ``compare``: models on clusters of every sort, calm and changing."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.cluster.file import load_cluster, with_changes
from argosy.cluster.topology import Cluster
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

_NVLINK = 'intra = [{ medium = "nvlink", bandwidth = "%s", latency = "3 us" }]'
CLUSTERS = {
    "a100-8": [("a", 1, "A100-80GB", 8, "300 GB/s", "100 Gbit/s")],
    "v100-16": [("v", 2, "V100-32GB", 8, "150 GB/s", "100 Gbit/s")],
    "a100-16-slow": [("a", 4, "A100-40GB", 4, "300 GB/s", "25 Gbit/s")],
    "t4-16-alone": [("t", 16, "T4", 1, "", "10 Gbit/s")],
    "three-kinds-12": [
        ("a", 1, "A100-80GB", 4, "300 GB/s", "100 Gbit/s"),
        ("v", 1, "V100-32GB", 4, "150 GB/s", "50 Gbit/s"),
        ("t", 1, "T4", 4, "12 GB/s", "25 Gbit/s"),
    ],
    "mixed-16-slow": [
        ("a", 2, "A100-80GB", 4, "300 GB/s", "10 Gbit/s"),
        ("v", 2, "V100-32GB", 4, "150 GB/s", "5 Gbit/s"),
    ],
}
"""Those that are not bundled: (node, nodes, kind, devices, bandwidth inside, bandwidth between)."""

CALM = "calm"
AS_IS = "as the file says"
SCENARIOS: dict[str, list[dict[str, Any]]] = {
    CALM: [],
    "straggler v0.0": [{"device": "v0.0", "steps": [["0 s", 0.5]]}],
    "straggler l3.0": [{"device": "l3.0", "steps": [["0 s", 0.4]]}],
    "preempted v*.nic": [
        {
            "link": "v*.nic",
            "generator": "on-off",
            "parameters": {"on": "4 s", "off": "4 s", "low": 0.2},
            "seed": 3,
            "horizon": "60 s",
        }
    ],
    "preempted l*.nic": [
        {
            "link": "l*.nic",
            "generator": "on-off",
            "parameters": {"on": "8 s", "off": "8 s", "low": 0.25},
            "seed": 4,
            "horizon": "120 s",
        }
    ],
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the grid."""

    sort: str
    model: str
    batch: int
    cluster: str
    scenario: str = CALM

    @property
    def name(self) -> str:
        return f"{self.model} b{self.batch} on {self.cluster}, {self.scenario}"

    def chain(self) -> Chain:
        return load_model(
            self.model, sequence_length=512 if self.model.startswith("bert") else 1024, dtype="fp16"
        )

    def load(self) -> Cluster:
        cluster = _written(self.cluster) if self.cluster in CLUSTERS else load_cluster(self.cluster)
        return (
            cluster if self.scenario == AS_IS else with_changes(cluster, SCENARIOS[self.scenario])
        )


def _written(name: str) -> Cluster:
    lines = [f'name = "{name}"']
    for node, nodes, kind, devices, inside, between in CLUSTERS[name]:
        lines += ["[[nodes]]", f'name = "{node}"', f"count = {nodes}"]
        lines += [f'devices = {{ kind = "{kind}", count = {devices} }}']
        lines += [
            f'nic = {{ bandwidth = "{between}", latency = "20 us" }}',
            *([_NVLINK % inside] if inside else []),
        ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text("\n".join(lines) + "\n")
        return load_cluster(file)


def _cases(sort: str, cluster: str, *models: tuple[str, int], scenario: str = CALM) -> list[Case]:
    return [
        Case(sort=sort, model=model, batch=batch, cluster=cluster, scenario=scenario)
        for model, batch in models
    ]


MEDIUM, XL, LLAMA, BERT = (
    ("gpt2-medium", 32),
    ("gpt2-xl", 64),
    ("llama-3-8b", 64),
    ("bert-large", 64),
)
GRID = (
    *_cases("homogeneous", "a100-8", XL, LLAMA),
    *_cases("homogeneous", "v100-16", XL, BERT),
    *_cases("homogeneous", "a100-16-slow", XL, LLAMA),
    *_cases("homogeneous", "t4-16-alone", MEDIUM),
    *_cases("two generations", "two-cards", MEDIUM, XL),
    *_cases("two generations", "mixed-8", MEDIUM, XL, LLAMA),
    *_cases("two generations", "mixed-16", MEDIUM, XL, LLAMA),
    *_cases("two generations", "mixed-32", XL),
    *_cases("three kinds", "three-kinds-12", MEDIUM, XL, LLAMA),
    *_cases("three kinds", "three-kinds-64", XL),
    *_cases("slow links", "slow-links-32", MEDIUM, XL),
    *_cases("slow links", "mixed-16-slow", XL, LLAMA),
    *_cases("one GPU per node", "one-per-node-16", MEDIUM, XL, LLAMA),
    *_cases("straggler", "v100-16", XL, scenario="straggler v0.0"),
    *_cases("straggler", "mixed-16", XL, scenario="straggler v0.0"),
    *_cases("straggler", "one-per-node-16", MEDIUM, scenario="straggler l3.0"),
    *_cases("preempted links", "mixed-16", XL, LLAMA, scenario="preempted v*.nic"),
    *_cases("preempted links", "one-per-node-16", MEDIUM, scenario="preempted l*.nic"),
    *_cases("geo-distributed", "geo-8", MEDIUM, scenario=AS_IS),
    *_cases("geo-distributed", "geo-8", LLAMA),
    *_cases("geo-distributed", "geo-regions-16", MEDIUM, XL, LLAMA),
)
