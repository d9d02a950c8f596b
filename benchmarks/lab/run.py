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
from argosy.lab.lab import Lab, LabClock
from argosy.plan.file import dumps_plan
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.sim.simulate import simulate
from argosy.workload.chain import Chain
from argosy.workload.profile_file import read_profile
from benchmarks.lab.cases import Case, cluster_of
from benchmarks.lab.emulated import Job
from benchmarks.memory_ledger import peak_bytes

ROOT = Path(__file__).parents[2]
_PATH = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
_RATE = 100.0
"""Mbit/s of the link that is probed."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a job before it runs: its layers, and their seconds on each kind of
    device."""

    chain: Chain
    model: ComputeModel


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was predicted and what was measured, seconds per iteration and bytes per device."""

    case: Case
    predicted: float
    measured: float
    peaks: tuple[tuple[str, float, float], ...]
    """(device, predicted, measured)."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        times = f"{self.predicted:8.3f} s  {self.measured:8.3f} s  {100 * self.error:+6.1f} %"
        memory = max(abs(predicted / measured - 1) for _, predicted, measured in self.peaks)
        return f"{self.case.name:<28} {self.case.plan.schedule!r:<14} {times}  memory {100 * memory:.1f} % off"


def payload_share(folder: Path) -> float:
    """Of a shaped link's rate, what a probe of it finds: frames have headers."""
    path = folder / "probed.toml"
    with Lab(cluster_of("probe", [(1.0, _RATE), (1.0, _RATE)]), shares=False) as lab:
        lab.run(
            [sys.executable, "-m", "argosy.measure.probe_worker", "probed", "0.5", str(path)],
            timeout=120,
        )
    probed = load_cluster(str(path))
    first, last = probed.devices[0].name, probed.devices[-1].name
    return probed.bandwidth(probed.fastest(first, last, 1e9)).at(0) / (_RATE * 1e6 / 8)


def known_of(job: Job, cluster: Cluster, most_samples: int, folder: Path) -> Known:
    """What layers that sleep are told; what layers that compute take, measured while all devices
    work."""
    if not job.real:
        return Known(
            chain=job.chain, model=ComputeModel(profiles=job.profiles(cluster, most_samples))
        )
    job_file = folder / "job.json"
    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    kinds = {f"ARGOSY_KIND_{d.name.replace('.', '_')}": d.kind.name for d in cluster.devices}
    worker = [
        sys.executable,
        "-m",
        "benchmarks.lab.real",
        str(job_file),
        str(most_samples),
        str(folder),
    ]
    with Lab(cluster) as lab:
        lab.run(worker, environment={**_PATH, **kinds}, timeout=300)
    profiles = {name: read_profile(folder / f"{name}.json") for name in sorted(set(kinds.values()))}
    chain = replace(next(iter(profiles.values())).chain(), optimizer="sgd")
    return Known(chain=chain, model=ComputeModel(profiles=profiles))


def predict(case: Case, share: float, known: Known) -> float:
    """Mean seconds of an iteration over as many as are measured, from time 0 on."""
    cluster = with_payload(case.cluster, share)
    timeline = simulate(case.plan, known.chain, cluster, model=known.model, iterations=case.steps)
    return timeline.iteration_ends[-1] / case.steps


def with_payload(cluster: Cluster, share: float) -> Cluster:
    links = tuple(replace(link, bandwidth=link.bandwidth.scaled(share)) for link in cluster.links)
    return replace(cluster, links=links)


def measure(case: Case, folder: Path) -> tuple[float, dict[str, float]]:
    """Mean seconds of an iteration on real processes in a lab, and the most bytes that each device
    held."""
    plan_file, job_file, result = folder / "plan.json", folder / "job.json", folder / "result.json"
    plan_file.write_text(dumps_plan(case.plan), encoding="utf-8")
    job_file.write_text(json.dumps(asdict(case.job)), encoding="utf-8")
    files = [str(plan_file), str(job_file), str(case.steps), str(result)]
    worker = [sys.executable, "-m", "benchmarks.lab.worker", *files]
    with Lab(case.cluster, shares=case.job.real) as lab:
        lab.run(
            worker,
            devices=devices_by_rank(case.plan),
            environment=_PATH,
            timeout=300,
            clock=LabClock.READY,
        )
    found = json.loads(result.read_text(encoding="utf-8"))
    return statistics.mean(found["times"]), found["peaks"]


def play(case: Case, share: float, folder: Path, known: Known | None = None) -> Outcome:
    known = known or known_of(case.job, case.cluster, case.plan.micro_batch_size, folder)
    seconds, peaks = measure(case, folder)
    foreseen = peak_bytes(case.plan, known.chain)
    return Outcome(
        case=case,
        predicted=predict(case, share, known),
        measured=seconds,
        peaks=tuple((device, foreseen[device], peak) for device, peak in peaks.items()),
    )
