"""Ten programs that are no chains, planned for unequal clusters: step, certificate and CPU time of
each plan.

    python -m benchmarks programs

Level 1 on five bundled clusters, and level 2 on four unequal devices, which has a minute for the
search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from argosy.cluster.file import cluster_from_content, load_cluster
from argosy.cluster.topology import Cluster
from argosy.planner import CapturedProgram, Settings, find_plan
from benchmarks.registry import Benchmark, Row

CLUSTERS = ("two-cards", "mixed-8", "geo-8", "mixed-16", "one-per-node-16")
SAMPLES = 64
FOUR = """{"name": "four-unequal", "nodes": [
  {"name": "a", "devices": [{"kind": "A100-40GB", "count": 1}, {"kind": "V100-32GB", "count": 1}],
   "intra": [{"medium": "pcie", "bandwidth": "12 GB/s", "latency": "5 us"}],
   "nic": {"bandwidth": "25 Gbit/s", "latency": "20 us"}},
  {"name": "b", "devices": [{"kind": "V100-32GB", "count": 1}, {"kind": "T4", "count": 1}],
   "intra": [{"medium": "pcie", "bandwidth": "12 GB/s", "latency": "5 us"}],
   "nic": {"bandwidth": "25 Gbit/s", "latency": "20 us"}}]}"""


def programs() -> dict[str, Callable[[], Any]]:
    """Return the builds by name; torch and transformers are imported only here."""
    from benchmarks import program_models as models

    return {
        "U-Net": models.unet,
        "T5": models.t5,
        "two towers": models.towers,
        "mixture of experts": models.experts,
        "LSTM": models.lstm,
        "graph network": models.graphs,
        "DLRM": models.dlrm,
        "diffusion transformer": models.diffusion,
        "Swin": models.swin,
        "Whisper": models.whisper,
    }


def planned(name: str, program: CapturedProgram, cluster: Cluster, level: int) -> Iterator[Row]:
    begin = time.process_time()
    plan = find_plan(program, cluster, settings=Settings(level=level))
    spent = time.process_time() - begin
    what = f"{name} on {cluster.name}, level {level}"
    assert plan.predicted is not None
    yield Row(what=f"{what}: step", value=1e3 * plan.predicted.iteration_seconds, unit="ms")
    if plan.certificate is not None:
        target = "<= 15" if level == 1 else "<= 3"
        yield Row(
            what=f"{what}: proven gap", value=100 * plan.certificate.gap, unit="%", target=target
        )
    yield Row(what=f"{what}: search", value=spent, unit="s CPU", target="<= 60")


def measure() -> list[Row]:
    from argosy.runtime.sources.operations import capture_program

    found: list[Row] = []
    clusters = [load_cluster(name) for name in CLUSTERS]
    four = cluster_from_content(FOUR)
    for name, build in programs().items():
        program = capture_program(build, name=name)
        for cluster in clusters:
            found += planned(name, program, cluster, 1)
        found += planned(name, program, four, 2)
    return found


BENCHMARK = Benchmark(
    name="programs", shows="plans for ten programs that are no chains", measure=measure
)
