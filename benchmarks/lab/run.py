"""Running plans in a lab, and predicting what they take."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.lab.lab import Clock, Lab
from argosy.plan.file import dumps_plan
from argosy.runtime.ranks import devices_by_rank
from argosy.sim.simulate import simulate
from benchmarks.lab.cases import Case, cluster_of

ROOT = Path(__file__).parents[2]
_RATE = 100.0
"""Mbit/s of the link that is probed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was predicted and what was measured, seconds per iteration."""

    case: Case
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        times = f"{self.predicted:8.3f} s  {self.measured:8.3f} s  {100 * self.error:+6.1f} %"
        return f"{self.case.name:<28} {self.case.plan.schedule!r:<14} {times}"


def payload_share(folder: Path) -> float:
    """Of a shaped link's rate, what a probe of it finds: frames have headers."""
    path = folder / "probed.toml"
    with Lab(cluster_of("probe", [(1.0, _RATE), (1.0, _RATE)]), shares=False) as lab:
        lab.run([sys.executable, "-m", "argosy.runtime.probe_worker", "probed", "0.5", str(path)], timeout=120)
    probed = load_cluster(str(path))
    first, last = probed.devices[0].name, probed.devices[-1].name
    return probed.bandwidth(probed.fastest(first, last, 1e9)).at(0) / (_RATE * 1e6 / 8)


def predict(case: Case, share: float) -> float:
    """Mean seconds of an iteration over as many as are measured, from time 0 on."""
    model = ComputeModel(profiles=case.job.profiles(case.cluster, case.plan.micro_batch_size))
    cluster = with_payload(case.cluster, share)
    timeline = simulate(case.plan, case.job.chain, cluster, model=model, iterations=case.steps)
    return timeline.iteration_ends[-1] / case.steps


def with_payload(cluster: Cluster, share: float) -> Cluster:
    links = tuple(replace(link, bandwidth=link.bandwidth.scaled(share)) for link in cluster.links)
    return replace(cluster, links=links)


def measure(case: Case, folder: Path) -> float:
    """Mean seconds of an iteration on real processes in a lab."""
    plan_file, job_file, result = folder / "plan.json", folder / "job.json", folder / "result.json"
    plan_file.write_text(dumps_plan(case.plan), encoding="utf-8")
    job_file.write_text(json.dumps(asdict(case.job)), encoding="utf-8")
    worker = [
        sys.executable,
        "-m",
        "benchmarks.lab.worker",
        str(plan_file),
        str(job_file),
        str(case.steps),
        str(result),
    ]
    path = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with Lab(case.cluster, shares=False) as lab:
        lab.run(worker, devices=devices_by_rank(case.plan), environment=path, timeout=300, clock=Clock.READY)
    return statistics.mean(json.loads(result.read_text(encoding="utf-8")))


def play(case: Case, share: float, folder: Path) -> Outcome:
    return Outcome(case=case, predicted=predict(case, share), measured=measure(case, folder))
