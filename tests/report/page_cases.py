"""A plan for 1,024 GPUs, made by hand; a page with every section."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import argosy
from argosy.cluster.file import cluster_from_content, load_cluster
from argosy.cluster.topology import Cluster
from argosy.plan.file import load_plan
from argosy.plan.plan import Plan, Search
from argosy.report.decisions import read_decisions, tell_decisions
from argosy.sim.simulate import simulate
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

HISTORY = ((0.1, 9.0, 6.0), (0.4, 8.0, 6.0), (1.0, 7.8, 7.2))


def thousand_gpus() -> tuple[Plan, Chain, Cluster]:
    """Four stages of 256 devices, each 32 replicas of eight, a node each."""
    cluster, chain, plan = (
        load_cluster("four-kinds-1024"),
        load_model("llama-3-8b", dtype="fp16"),
        load_plan(NAME),
    )
    names, cuts = (
        [device.name for device in cluster.devices],
        [len(chain.layers) * at // 4 for at in range(5)],
    )
    replica = plan.stages[0].replicas[0]
    stages = tuple(
        replace(
            plan.stages[0],
            first=cuts[at],
            end=cuts[at + 1],
            replicas=tuple(
                replace(replica, devices=tuple(names[first : first + 8]), samples=1)
                for first in range(256 * at, 256 * at + 256, 8)
            ),
        )
        for at in range(4)
    )
    model = replace(plan.model, sequence_length=chain.sequence_length)
    sizes = {"global_batch": 1024, "micro_batch_size": 32, "num_micro_batches": 32}
    return replace(plan, model=model, stages=stages, predicted=None, **sizes), chain, cluster  # type: ignore[arg-type]


NAME = "llama-3-8b-on-mixed-16"
DECISIONS = (
    {
        "event": "decision", "step": 12, "what": "k", "schedule": {"kind": "kfkb", "k": 2}, "stages": [],
        "predicted_before": 9.12, "predicted_after": 7.93, "why": "v0.nic is slower than it was",
        "bandwidths": {"v0.nic": 5.1e8},
    },
    {"event": "outcome", "step": 12, "measured_before": 9.05, "measured_after": 8.01},
)  # fmt: skip


def whole_page(folder: Path) -> Path:
    """A page with every section that there is."""
    plan = load_plan(NAME)
    cluster, ref = cluster_from_content(plan.cluster.content), plan.model
    chain = load_model(
        ref.name, sequence_length=ref.sequence_length, dtype=ref.dtype, optimizer=ref.optimizer
    )
    played = simulate(plan, chain, cluster)
    measured = replace(
        played,
        clock="measured",
        busy=tuple(1.25 * seconds for seconds in played.busy),
        iteration_ends=tuple(1.25 * end for end in played.iteration_ends),
    )
    (folder / "decisions.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in DECISIONS), encoding="utf-8"
    )
    preempted = argosy.with_changes(
        cluster, [{"link": "v0.nic", "steps": [["5 s", "2 Gbit/s"], ["60 s", "25 Gbit/s"]]}]
    )
    report = argosy.Report(
        plan=replace(
            plan,
            search=Search(cpu_seconds=1.0, candidates=9, pruned=(("bound", 4),), history=HISTORY),
        ),
        chain=chain,
        cluster=cluster,
        measured={"run.json": measured},
        rivals=[
            ("argosy", 7.5, "the fastest"),
            ("even", 15.0, "slow"),
            ("none", None, "no plan: memory"),
        ],
        decided=tell_decisions(read_decisions(folder / "decisions.jsonl")),
        scenarios={"calm": cluster, "preempted": preempted},
    )
    return report.save(folder / "whole.html")
