"""Two islands over a slow link that is preempted at times, against the best synchronous plan, in
the lab.

``python -m benchmarks.lab.islands [STEPS]``: every plan runs on real processes over a shaped link
of 20 Mbit/s that falls to 5 Mbit/s for two of every six seconds. With ``away`` as a second argument
the link is down for twelve of every 36 seconds, longer than it takes to miss an island, and only
the plan that waits for exchanges is run. Layers sleep for their time, so that the order of things
and the network are measured. Seconds per step cover all steps, exchanges included; beside them is
what the simulator predicts for the same trace.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from argosy.choose.islands import IslandOptions, find_island_plan
from argosy.choose.robust import find_robust_plan
from argosy.choose.scenario import Robust
from argosy.cluster.file import build_cluster, with_changes
from argosy.cluster.topology import Cluster
from argosy.document import parse_toml
from argosy.explain.islands import step_range
from argosy.lab.lab import Lab, LabClock
from argosy.plan.file import dumps_plan
from argosy.plan.islands import Compression, IslandPlan
from argosy.plan.islands_file import dumps_island_plan
from argosy.plan.plan import Plan
from argosy.planner import Settings, find_plan
from argosy.runtime.islands.files import EXCHANGES
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.processes.run_folder import PROGRESS, read_lines
from argosy.runtime.processes.run_spec import RUN, RunSpec, dumps_run_spec
from argosy.sim.islands import play_islands
from argosy.sim.simulate import simulate
from benchmarks.lab.emulated import Job
from benchmarks.lab.run import ROOT, Known, known_of, payload_share, with_payload

SAMPLES = 16
JOB = Job(num_layers=8, forward_seconds=10e-3, values=131_072, weights=200_000)
PROGRAM = Path(__file__).with_name("islands_program.py")
CLUSTER = """
name = "lab-islands"
[[kinds]]
name = "speed-1"
memory = "4 GiB"
memory_bandwidth = "20 GB/s"
flops = { fp32 = "1 GFLOP/s" }
[[nodes]]
name = "a"
devices = { kind = "speed-1", count = 2 }
intra = [{ medium = "loopback", bandwidth = "1 GB/s", latency = "50 us" }]
nic = { bandwidth = "20 Mbit/s", latency = "40 us" }
[[nodes]]
name = "b"
devices = { kind = "speed-1", count = 2 }
intra = [{ medium = "loopback", bandwidth = "1 GB/s", latency = "50 us" }]
nic = { bandwidth = "20 Mbit/s", latency = "40 us" }
"""
CHANGES = [
    [f"{second} s", rate]
    for at in range(4, 400, 6)
    for second, rate in ((at, "5 Mbit/s"), (at + 2, "20 Mbit/s"))
]
"""Of every six seconds, two belong to others."""
AWAY = [
    [f"{second} s", rate]
    for at in range(4, 400, 36)
    for second, rate in ((at, "0 bit/s"), (at + 12, "20 Mbit/s"))
]
"""Of every 36 seconds, nothing passes in twelve."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Seconds per step of a plan, predicted and measured."""

    name: str
    predicted: float
    measured: float
    between: tuple[float, float]
    """Predicted if computing takes as long as it should, or up to 10 % longer."""

    def __str__(self) -> str:
        error = 100 * (self.predicted / self.measured - 1)
        low, high = self.between
        text = f"{self.name:<52} {self.predicted:7.3f} s {self.measured:7.3f} s {error:+6.1f} %"
        return f"{text}, {low:.3f} to {high:.3f} s if computing takes up to 10 % longer"


def lab_cluster(changes: list[list[str]] = CHANGES) -> Cluster:
    calm = build_cluster(parse_toml(CLUSTER, file="lab-islands.toml"), folder=Path())
    return with_changes(calm, [{"link": "b0.nic", "steps": changes}])


def synchronous_plans(known: Known, cluster: Cluster) -> list[Plan]:
    """The best plan for the link as it is at first, and the one that is best over its changes."""
    settings = Settings(runnable=True)
    first = find_plan(
        known.chain, cluster, global_batch=SAMPLES, settings=settings, model=known.model
    )
    robust = find_robust_plan(
        known.chain,
        cluster,
        [cluster],
        global_batch=SAMPLES,
        robust=Robust.MEAN,
        settings=settings,
        model=known.model,
    )
    layouts = [
        [(stage.first, stage.end, len(stage.devices)) for stage in plan.stages]
        for plan in (first, robust.plan)
    ]
    return [first] if layouts[0] == layouts[1] else [first, robust.plan]


def island_plans(known: Known, cluster: Cluster) -> list[IslandPlan]:
    """Blocking and overlapped ones, and one in fewer bits."""
    asked = [
        IslandOptions(count=2, sync_every=20),
        IslandOptions(count=2, sync_every=20, overlaps=True),
        IslandOptions(count=2, sync_every=20, compression=Compression.INT8),
    ]
    settings = Settings(runnable=True)
    return [
        find_island_plan(
            known.chain,
            cluster,
            global_batch=SAMPLES,
            options=options,
            settings=settings,
            model=known.model,
        )
        for options in asked
    ]


def measure(
    plan: Plan | IslandPlan, cluster: Cluster, steps: int, folder: Path, job: Job = JOB
) -> float:
    """Mean seconds of a step on real processes in a lab."""
    folder.mkdir()
    plan_file, job_file = folder / "plan.json", folder / "job.json"
    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    is_synchronous = isinstance(plan, Plan)
    plan_file.write_text(
        dumps_plan(plan) if isinstance(plan, Plan) else dumps_island_plan(plan), encoding="utf-8"
    )
    out = folder / "run"
    out.mkdir()
    spec = RunSpec(
        plan=str(plan_file), program=str(PROGRAM), out=str(out), steps=steps, any_device=True
    )
    (out / RUN).write_text(dumps_run_spec(spec), encoding="utf-8")
    module = "argosy.runtime.job.worker" if is_synchronous else "argosy.runtime.islands.worker"
    islands = [plan] if isinstance(plan, Plan) else list(plan.islands)
    devices = [device for island in islands for device in devices_by_rank(island)]
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "ARGOSY_LAB_JOB": str(job_file)}
    environment |= {"ARGOSY_LAB_SAMPLES": str(SAMPLES)}
    command = [sys.executable, "-m", module, str(out / RUN)]
    with Lab(cluster, shares=False) as lab:
        lab.run(
            command, devices=devices, environment=environment, timeout=500, clock=LabClock.READY
        )
    shown = out if is_synchronous else out / "island-0"
    for line in read_lines(shown / EXCHANGES):
        if "exchange" not in line:
            sys.stdout.write(f"  {line}\n")
            continue
        took = f"{line['waited']:.2f} s waiting, {line['seconds']:.2f} s"
        sys.stdout.write(
            f"  exchange of islands {line['islands']} after step {line['step']}: {took}\n"
        )
    lines = read_lines(shown / PROGRESS)
    middle = statistics.median(line["seconds"] for line in lines)
    sys.stdout.write(f"  median step {middle:.3f} s\n")
    return statistics.mean(line["seconds"] for line in lines)


def compared(steps: int, folder: Path, *, is_away: bool) -> list[Outcome]:
    """Synchronous plans, then island plans; the first of them alone if the link ``is_away`` at
    times."""
    cluster = lab_cluster(AWAY if is_away else CHANGES)
    seen = with_payload(cluster, payload_share(folder))
    known = known_of(JOB, cluster, SAMPLES, folder)
    outcomes = []
    for at, plan in enumerate([] if is_away else synchronous_plans(known, seen)):
        timeline = simulate(plan, known.chain, seen, model=known.model, iterations=steps)
        seconds = measure(plan, cluster, steps, folder / f"synchronous-{at}")
        name = f"synchronous, {len(plan.devices)} of 4 devices, {len(plan.stages)} stages"
        predicted = timeline.iteration_ends[-1] / steps
        between = (predicted, 1.1 * predicted)
        outcomes.append(Outcome(name=name, predicted=predicted, measured=seconds, between=between))
        sys.stdout.write(f"{outcomes[-1]}\n")
        sys.stdout.flush()
    for at, islands in enumerate(island_plans(known, seen)[: 1 if is_away else None]):
        course = play_islands(islands, known.chain, seen, known.model, steps=steps)
        seconds = measure(islands, cluster, steps, folder / f"islands-{at}")
        between = step_range(islands, known.chain, seen, known.model, steps=steps)
        predicted = course.step_seconds
        outcomes.append(
            Outcome(name=islands.algorithm, predicted=predicted, measured=seconds, between=between)
        )
        sys.stdout.write(f"{outcomes[-1]}\n")
        sys.stdout.flush()
    return outcomes


def main(steps: int, *, is_away: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = compared(steps, Path(folder), is_away=is_away)
    if is_away:
        return
    best = min(outcome.measured for outcome in outcomes if outcome.name.startswith("synchronous"))
    for outcome in outcomes:
        sys.stdout.write(
            f"{outcome.name:<52} {best / outcome.measured:5.2f} times the best synchronous plan\n"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60, is_away="away" in sys.argv[2:])
