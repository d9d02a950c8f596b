"""DAPPLE's models on its configurations A, B and C: what its planner chooses under the restrictions
of its published table, and its plans and PipeDream's against ours in the exact simulator.

    python -m benchmarks dapple       the figures
    python -m benchmarks.dapple       the table of the result note

The restrictions of the table: two stages, one stage a device, or data parallelism; micro-batches of
the profile batch for the widest stage; no memory limit. The plans that are played know no
restriction but memory. Models whose profile is not in the data folder are left out.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from argosy.baselines import BASELINES, PlanningJob
from argosy.baselines.dapple import DapplePipeline, dapple_candidates
from argosy.baselines.equal_devices import EqualDevices
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.document import parse_toml
from argosy.explain.contest import contest
from argosy.plan.check import check_plan
from argosy.plan.plan import Plan
from argosy.planner import find_plan
from argosy.workload.imports.dapple import read_dapple
from benchmarks.registry import Benchmark, Row

PROFILES = Path(__file__).resolve().parents[2] / "shared" / "data" / "dapple-profiles"
CLUSTERS = {"A": ((8, 8), 3.0), "B": ((1,) * 16, 3.0), "C": ((1,) * 16, 1.2)}
"""V100 of every server, and GB/s between servers."""
MODELS = {"bert-48": (2, 64), "vgg-19": (32, 2048), "gnmt-16": (64, 1024)}
"""Profile batch and global batch of those whose profiles are at hand."""
STRAIGHT = (1,) * 16
TARGETS = {
    ("bert-48", "A"): (8, 8),
    ("bert-48", "B"): STRAIGHT,
    ("bert-48", "C"): STRAIGHT,
    ("vgg-19", "C"): (15, 1),
}
"""Cells of the table that an exhaustive search over the same profiles also gives: devices of every
stage."""
PUBLISHED = {
    **TARGETS,
    ("vgg-19", "A"): (16,),
    ("vgg-19", "B"): (16,),
    ("gnmt-16", "A"): (8, 8),
    ("gnmt-16", "B"): (8, 8),
    ("gnmt-16", "C"): STRAIGHT,
}


@dataclass(frozen=True, kw_only=True)
class Played:
    """A case: the choice under the table's restrictions, and seconds of an iteration."""

    choice: DapplePipeline
    ours: float
    dapple: float
    pipedream: float


def equal_cluster(
    sizes: tuple[int, ...], between: float, inside: float = 25.0, name: str = "equal"
) -> Cluster:
    """Servers with V100 that differ in their number only; GB/s, next to no latency."""
    nodes = "".join(
        f'[[nodes]]\nname = "v{chr(97 + at)}"\ndevices = {{ kind = "V100-16GB", count = {size} }}\n'
        f'nic = {{ bandwidth = "{between} GB/s", latency = "1 us" }}\n'
        + (
            f'intra = [{{ medium = "nvlink", bandwidth = "{inside} GB/s", latency = "1 us" }}]\n'
            if size > 1
            else ""
        )
        for at, size in enumerate(sizes)
    )
    return build_cluster(
        parse_toml(f'name = "{name}"\n{nodes}', file=f"{name}.toml"), folder=Path()
    )


def dapple_job(model: str, config: str) -> PlanningJob:
    """A model of DAPPLE's on one of its three configurations."""
    profile_batch, batch = MODELS[model]
    chain, profile = read_dapple(PROFILES / f"{model}-pbs-{profile_batch}.txt")
    sizes, between = CLUSTERS[config]
    cluster = equal_cluster(sizes, between, name=config)
    return PlanningJob(
        chain=chain,
        cluster=cluster,
        global_batch=batch,
        model=ComputeModel(profiles={profile.device: profile}),
    )


def cases() -> list[tuple[str, str]]:
    """Models with a profile at hand, on every configuration."""
    there = [
        model
        for model, (batch, _) in MODELS.items()
        if (PROFILES / f"{model}-pbs-{batch}.txt").exists()
    ]
    return [(model, config) for model in there for config in CLUSTERS]


@cache
def table_choice(model: str, config: str) -> DapplePipeline:
    """DAPPLE's choice under the restrictions of the published table."""
    job = dapple_job(model, config)
    view, profile_batch = EqualDevices(job), MODELS[model][0]
    found = [
        one
        for widest in range(1, view.count + 1)
        for one in dapple_candidates(view, profile_batch * widest)
        if max(sum(stage.taken) for stage in one.stages) == widest
        and len(one.stages) in (1, 2, view.count)
    ]

    def per_sample(one: DapplePipeline) -> float:
        return one.latency / (one.micro_batch * (job.global_batch // one.micro_batch))

    return min((one for one in found if one.micro_batch <= job.global_batch), key=per_sample)


@cache
def played(model: str, config: str) -> Played:
    """Ours, DAPPLE's and PipeDream's plan on the exact simulator; infinite where one has none."""
    job = dapple_job(model, config)
    plans = [
        (
            "argosy",
            find_plan(job.chain, job.cluster, global_batch=job.global_batch, model=job.model),
        )
    ]
    for name in ("dapple", "pipedream"):
        plan = BASELINES[name](job)
        if isinstance(plan, Plan):
            check_plan(plan, job.chain, job.cluster)
            plans.append((name, plan))
    seconds = {
        entry.name: entry.seconds for entry in contest(plans, job.chain, [job.cluster], job.model)
    }
    dapple, pipedream = (seconds.get(name, math.inf) for name in ("dapple", "pipedream"))
    return Played(
        choice=table_choice(model, config),
        ours=seconds["argosy"],
        dapple=dapple,
        pipedream=pipedream,
    )


def devices_of(choice: DapplePipeline) -> tuple[int, ...]:
    return tuple(sum(stage.taken) for stage in choice.stages)


def shape(devices: tuple[int, ...]) -> str:
    """As the table writes it.

    >>> shape((16,)), shape((15, 1)), shape(STRAIGHT)
    ('DP', '15:1', 'straight')
    """
    return {(16,): "DP", STRAIGHT: "straight"}.get(devices, ":".join(map(str, devices)))


def measure() -> list[Row]:
    rows = []
    for model, config in cases():
        found, name = played(model, config), f"{model} on {config}"
        if (model, config) in TARGETS:
            is_same = devices_of(found.choice) == TARGETS[model, config]
            want, got = shape(TARGETS[model, config]), shape(devices_of(found.choice))
            rows.append(
                Row(
                    what=f"{name}: {want} wanted, {got} chosen",
                    value=is_same,
                    unit="same",
                    target="1",
                )
            )
        rows += [
            Row(what=f"{name}: ours", value=found.ours, unit="s"),
            Row(
                what=f"{name}: DAPPLE's plan over ours",
                value=found.dapple / found.ours,
                unit="x",
                target=">= 1",
            ),
            Row(
                what=f"{name}: PipeDream's plan over ours",
                value=found.pipedream / found.ours,
                unit="x",
            ),
            Row(
                what=f"{name}: PipeDream's plan over DAPPLE's",
                value=found.pipedream / found.dapple,
                unit="x",
            ),
        ]
    return rows


def as_markdown() -> str:
    titles = (
        "case",
        "published",
        "DAPPLE's choice, restricted",
        "layers",
        "ours",
        "DAPPLE",
        "over ours",
        "PipeDream",
    )
    lines = [
        f"| {' | '.join(titles)} | over ours | over DAPPLE |",
        "| --- " * (len(titles) + 2) + "|",
    ]
    for model, config in cases():
        found, published = played(model, config), shape(PUBLISHED[model, config])
        cut = [stage.end - stage.first for stage in found.choice.stages]
        cells = [
            f"{model}, {config}",
            f"**{published}**" if (model, config) in TARGETS else published,
            shape(devices_of(found.choice)),
            ":".join(map(str, cut)) if len(cut) < 3 else f"{min(cut)} to {max(cut)}",
            f"{found.ours:.4f} s",
            f"{found.dapple:.4f} s",
            f"{found.dapple / found.ours:.3f}",
            f"{found.pipedream:.4f} s",
            f"{found.pipedream / found.ours:.3f}",
            f"{found.pipedream / found.dapple:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


BENCHMARK = Benchmark(
    name="dapple",
    shows="DAPPLE's models on its clusters: its table reproduced; ours against its plans and PipeDream's",
    measure=measure,
)

if __name__ == "__main__":
    print(as_markdown())
    sys.exit()
