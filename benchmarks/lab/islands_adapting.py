"""Two islands whose link changes: they measure it, and change the number of steps between
exchanges.

``python -m benchmarks.lab.islands_adapting [STEPS]``, as root: 20 Mbit/s between two hosts, 5
Mbit/s from 20 s to 70 s, then 20 Mbit/s again. Layers sleep for their time, real processes exchange
over the shaped link, and H follows what exchanges take (``adapt.sync``). Beside every exchange is
the H that this rule gives for the link's rate at that moment.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from argosy.adapt.controller import AdaptationLevel
from argosy.adapt.sync import SyncLimits, next_sync_every
from argosy.choose.islands import IslandOptions, find_island_plan
from argosy.cluster.file import build_cluster, with_changes
from argosy.cluster.lasting import at_moment
from argosy.cluster.topology import Cluster
from argosy.document import parse_toml
from argosy.lab.lab import Lab, LabClock
from argosy.plan.islands import IslandPlan
from argosy.plan.islands_file import dumps_island_plan
from argosy.planner import Settings
from argosy.runtime.islands.files import EXCHANGES, island_folder
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.processes.run_folder import PROGRESS, read_lines
from argosy.runtime.processes.run_spec import RUN, RunSpec, dumps_run_spec
from argosy.sim.islands import exchange_seconds
from benchmarks.lab.emulated import Job
from benchmarks.lab.islands import CLUSTER, PROGRAM, SAMPLES
from benchmarks.lab.run import ROOT, known_of

JOB = Job(num_layers=4, forward_seconds=5e-3, values=64, weights=20_000)
CHANGES = [["20 s", "5 Mbit/s"], ["70 s", "20 Mbit/s"]]
FIRST_EVERY = 4
LIMITS = SyncLimits(most=100)


def lab_cluster() -> Cluster:
    calm = build_cluster(parse_toml(CLUSTER, file="lab-islands.toml"), folder=Path())
    return with_changes(calm, [{"link": "b0.nic", "steps": CHANGES}])


def run(
    plan: IslandPlan, cluster: Cluster, steps: int, folder: Path
) -> tuple[list[dict[str, Any]], list[float]]:
    """What island 0 wrote of exchanges, and the seconds of its steps."""
    plan_file, job_file, out = folder / "plan.json", folder / "job.json", folder / "run"
    job_file.write_text(json.dumps(asdict(JOB)), encoding="utf-8")
    plan_file.write_text(dumps_island_plan(plan), encoding="utf-8")
    out.mkdir()
    spec = RunSpec(
        plan=str(plan_file),
        program=str(PROGRAM),
        out=str(out),
        steps=steps,
        any_device=True,
        adapt=AdaptationLevel.FULL,
        max_sync_every=LIMITS.most,
        lost_after=30.0,
    )
    (out / RUN).write_text(dumps_run_spec(spec), encoding="utf-8")
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "ARGOSY_LAB_JOB": str(job_file)}
    environment |= {"ARGOSY_LAB_SAMPLES": str(SAMPLES)}
    devices = [device for island in plan.islands for device in devices_by_rank(island)]
    command = [sys.executable, "-m", "argosy.runtime.islands.worker", str(out / RUN)]
    with Lab(cluster, shares=False) as lab:
        lab.run(
            command, devices=devices, environment=environment, timeout=500, clock=LabClock.READY
        )
    folder_0 = island_folder(out, 0)
    seconds = [line["seconds"] for line in read_lines(folder_0 / PROGRESS)]
    return [line for line in read_lines(folder_0 / EXCHANGES) if "exchange" in line], seconds


def main(steps: int) -> None:
    cluster = lab_cluster()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = known_of(JOB, cluster, SAMPLES, folder)
        plan = find_island_plan(
            known.chain,
            cluster,
            global_batch=SAMPLES,
            options=IslandOptions(count=2, sync_every=FIRST_EVERY),
            settings=Settings(runnable=True),
            model=known.model,
        )
        lines, seconds = run(plan, cluster, steps, folder)
    assert plan.predicted is not None
    step_seconds = max(plan.predicted.island_seconds)
    sys.stdout.write(
        "| after step | at | exchange | H from here | H by the rule, for the link at that moment |\n"
    )
    sys.stdout.write("| --- | --- | --- | --- | --- |\n")
    for line in lines:
        now = sum(seconds[: line["step"]])
        predicted = exchange_seconds(plan, known.chain, at_moment(cluster, now))
        wanted = next_sync_every(line["sync_every"], step_seconds, predicted, LIMITS)
        took = f"{line['seconds']:.2f} s"
        sys.stdout.write(
            f"| {line['step']} | {now:.0f} s | {took} | {line['sync_every']} | {wanted} |\n"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
