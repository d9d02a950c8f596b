"""Three programs that are no chains in the lab: the plan that is found, and that of the planner
before decision 44, on real processes.

    python -m benchmarks lab-programs

``earlier_programs.json`` has the plans of that planner (commit 7dbca6c, level 1) for the programs
of ``program_builds`` on ``CLUSTERS``, in the form of ``benchmarks.earlier_programs``, which turns
them into plans of today.

    (1)  The hosts of a cluster are network namespaces with shaped links between them, one process
         each. Speeds and links are those of ``benchmarks.lab``'s contests over four, so that
         processes that share two cores keep up.
    (2)  Stages compute their operations, and then wait until the seconds have passed that the
         simulator gives the action, or the segment if weights are gathered (``program_worker``).
         Messages, gradient sums and schedules take as long as they take.
    (3)  Losses are compared with those of a plain loop in one process.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel, Portion, split_stage_seconds
from argosy.lab.lab import Lab, LabClock
from argosy.lab.system import why_not
from argosy.plan.file import dumps_plan
from argosy.plan.plan import Plan, Stage
from argosy.planner import CapturedProgram, Settings, find_plan
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.sources.operations import capture_program
from argosy.sim.simulate import simulate
from argosy.sim.tasks.member import portion_of
from argosy.workload.chain import Chain
from argosy.workload.part import forward_order
from benchmarks.earlier_programs import earlier_plan, stage_of_operations
from benchmarks.lab.cases import cluster_of
from benchmarks.lab.program_builds import BUILDS, one_process
from benchmarks.lab.run import _PATH, payload_share, with_payload

STEPS = 3
_GFLOPS = 0.25
CLUSTERS = (
    cluster_of("fast", [(4.0, 250.0), (2.0, 250.0), (1.0, 250.0), (1.0, 250.0)], gflops=_GFLOPS),
    cluster_of("unequal", [(4.0, 50.0), (2.0, 25.0), (1.0, 25.0), (1.0, 12.5)], gflops=_GFLOPS),
    cluster_of("slow", [(2.0, 12.5), (2.0, 12.5), (1.0, 12.5)], gflops=_GFLOPS),
    cluster_of(
        "sites",
        [(4.0, 250.0), (2.0, 250.0), (2.0, 250.0), (1.0, 250.0)],
        '[[links]]\nname = "wan"\nbetween = ["[ab]*", "[cd]*"]\nbandwidth = "2 Mbit/s"\n',
        gflops=_GFLOPS,
    ),
)
"""Hosts as (speed, Mbit/s): a fast network, two of the contests, and two sites with a slow line."""
_EARLIER = Path(__file__).with_name("earlier_programs.json")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan of one of the two planners."""

    plan: Plan
    chain: Chain
    """The segments that it is a plan for."""
    cut: tuple[int, ...] | None
    """The stage of every operation; None: the plan's own."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a plan was predicted and measured to take, in seconds per step, and its losses."""

    predicted: float
    measured: float
    error: float
    """The largest relative difference from the losses of one process."""


def candidates(name: str, program: CapturedProgram, cluster: Cluster) -> tuple[Candidate, ...]:
    """Return the earlier planner's plan and today's."""
    stored = json.loads(_EARLIER.read_text(encoding="utf-8"))[name]
    content = stored["plans"][cluster.name]
    plan, chain = earlier_plan(program, cluster, stored["operations"], content)
    number = len(forward_order(program.graph))
    cut = stage_of_operations(content["stages"], stored["operations"], number)
    found = find_plan(program, cluster, settings=Settings(runnable=True))
    return (
        Candidate(plan=plan, chain=chain, cut=tuple(cut)),
        Candidate(plan=found, chain=program.on(cluster).chain, cut=None),
    )


def seconds_of_segments(candidate: Candidate, cluster: Cluster) -> dict[str, list[Any]]:
    """Return the (forward, backward) seconds of every segment, by device and stage."""
    seconds: dict[str, list[Any]] = {}
    for number, stage in enumerate(candidate.plan.stages):
        for replica in stage.replicas:
            for member, device in enumerate(replica.devices):
                portion = portion_of(cluster, stage, replica, member)
                key = f"{device} {number}"
                seconds[key] = _of_segments(candidate.chain, stage, portion)
    return seconds


def _of_segments(chain: Chain, stage: Stage, portion: Portion) -> list[tuple[float, float]]:
    segments = [replace(stage, first=at, end=at + 1) for at in range(stage.first, stage.end)]
    priced = [split_stage_seconds(ComputeModel(), chain, segment, portion) for segment in segments]
    return [(each.forward, each.backward) for each in priced]


def trained(name: str, candidate: Candidate, cluster: Cluster, share: float) -> Trained:
    """Train by a plan in a lab (1), (2) and compare (3)."""
    plan = candidate.plan
    lines = with_payload(cluster, share)
    timeline = simulate(plan, candidate.chain, lines, iterations=STEPS)
    paces: dict[str, dict[str, float]] = {device: {} for device in plan.devices}
    for span in timeline.spans:
        if not span.kind.is_communication and span.stage is not None:
            paces[span.where][f"{span.kind} {span.stage}"] = span.seconds
    with tempfile.TemporaryDirectory() as folder:
        files = {part: Path(folder) / f"{part}.json" for part in ("plan", "job", "result")}
        files["plan"].write_text(dumps_plan(plan), encoding="utf-8")
        job: dict[str, Any] = {
            "program": name,
            "cut": candidate.cut,
            "paces": paces,
            "steps": STEPS,
        }
        job["segments"] = seconds_of_segments(candidate, cluster)
        files["job"].write_text(json.dumps(job), encoding="utf-8")
        worker = [sys.executable, "-m", "benchmarks.lab.program_worker", *map(str, files.values())]
        with Lab(cluster, shares=False) as lab:
            lab.run(
                worker,
                devices=devices_by_rank(plan),
                environment=_PATH,
                timeout=300,
                clock=LabClock.READY,
            )
        result = json.loads(files["result"].read_text(encoding="utf-8"))
    pairs = zip(result["losses"], one_process(name, 1 + STEPS), strict=True)
    return Trained(
        predicted=timeline.iteration_ends[-1] / STEPS,
        measured=statistics.mean(result["times"]),
        error=max(abs(loss / alone - 1) for loss, alone in pairs),
    )


def _shown(kind: str, each: Trained) -> str:
    return f"{kind} {each.measured:.3f} s (predicted {each.predicted:.3f}), losses {each.error:.1g} off"


def main(names: Sequence[str]) -> int:
    reason = why_not()
    if reason is not None:
        print(f"no lab here: {reason}", file=sys.stderr)
        return 4
    torch.set_num_threads(1)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        share = payload_share(Path(folder))
    for name in names or BUILDS:
        program = capture_program(BUILDS[name], name=name)
        for cluster in CLUSTERS:
            earlier, found = (
                trained(name, candidate, cluster, share)
                for candidate in candidates(name, program, cluster)
            )
            ratios.append(earlier.measured / found.measured)
            load = os.getloadavg()[0]
            print(
                f"{name} on {cluster.name}: {_shown('earlier', earlier)}; {_shown('found', found)}; "
                f"earlier over found {ratios[-1]:.2f}; load {load:.1f}",
                flush=True,
            )
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    print(f"geometric mean of earlier over found: {mean:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
