"""Sailor's clusters: A100-40GB beside V100-16GB in nodes of four, our plans in our simulator and in
its judge.

Figures of the clusters are restated from eth-easl/sailor (MIT): ``intra_node_bandwidths.json`` (4
GPUs) and, for us-central1-a, ``multizone_bandwidths_het.json`` (4 GPUs to 4 GPUs): the saturated
bandwidths. The model is OPT-350 with its measured layer times, fp32, 1,024 samples of 2,048 tokens
an iteration. Plans keep to what Sailor's form can say: equal shares, 1F1B, no ZeRO, no
recomputation; and to what was measured.

Our simulator and the judge do not see the same network: the judge lets no transfer overlap, sums
gradients at the bandwidth of one GPU, and gives small messages less. So for each cluster our
planner keeps the finalists of one search per number of replicas, once for transfers that overlap
with compute and once for transfers that block, and the best of these in the judge are improved by
small steps there (``benchmarks.climbing``): the judge leads the last part of the way, as it leads all of
Sailor's own planner. The set-up is the same for all clusters.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from argosy.calibrate.predict import exact_seconds
from argosy.calibrate.run import MeasuredRun, Measurements
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.calibration import Calibration
from argosy.document import Document
from argosy.errors import InfeasibleError
from argosy.exporters.sailor import to_sailor
from argosy.plan.check import check_plan
from argosy.plan.plan import Plan, Recompute
from argosy.planner import Settings, kept_plans
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.chain import Chain
from argosy.workload.imports.sailor import read_sailor
from argosy.workload.profile import Profile
from benchmarks.climbing import best_nearby
from benchmarks.sailor_judge import Judge

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "sailor"
SIZES = ((4, 12), (8, 8), (8, 24), (16, 16), (32, 96), (80, 240), (128, 384))
"""A100 and V100."""
SAILOR = (0.0317, 0.0435, 0.0582, 0.0769, 0.170, 0.361, 0.523)
"""Iterations per second of Sailor's own plans in its judge."""
FLOOR = (0.0321, 0.0445, 0.0615, 0.0829, 0.2015, None, None)
"""Of a plain uneven split of the layers."""
KINDS = ("A100-40GB", "V100-16GB")
PER_NODE = 4
INSIDE = {"A100-40GB": 243.2e9, "V100-16GB": 68.17e9}
BETWEEN = {"A100-40GB": 6.036e9, "V100-16GB": 5.787e9}
"""Bytes/s out of a node."""
PROCESS = 1.6e9
"""Bytes of a process with which a V100 holds for us what it holds for the judge, which counts 24
bytes per parameter and no reserve."""
MOST_UNITS = 12
MOST_PAIRS = 72
"""Units of a kind, and pairs of units of both, in one search."""
GLOBAL_BATCH = 1024
PLAIN = Settings(
    even_shares=True,
    zero=(0,),
    recompute=(Recompute.NONE,),
    schedules=(ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),),
    spanning=False,
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Our plan for one cluster, in it/s."""

    size: tuple[int, int]
    plan: Plan
    ours: float
    judged: float
    kept: float
    """Of the best finalist in the judge, before any step from it."""
    first: float
    """Of the best that our own costs put first in a search."""
    cpu_seconds: float


def sailor_cluster(fast: int, slow: int) -> Cluster:
    """So many A100 and V100."""
    nodes: list[dict[str, Any]] = [
        {
            "name": name,
            "count": count // PER_NODE,
            "devices": {"kind": kind, "count": PER_NODE},
            "intra": [{"medium": "nvlink", "bandwidth": f"{INSIDE[kind]} B/s"}],
            "nic": {"bandwidth": f"{BETWEEN[kind]} B/s"},
        }
        for name, kind, count in (("a", KINDS[0], fast), ("v", KINDS[1], slow))
    ]
    name = f"a100x{fast}-v100x{slow}"
    return build_cluster(Document(name, {"name": name, "nodes": nodes}, {}), folder=Path())


@cache
def model() -> tuple[Chain, dict[str, Profile]]:
    chain, profiles = read_sailor(FOLDER, "OPT-350")
    return chain, {kind: profiles[kind] for kind in KINDS}


@cache
def judge() -> Judge:
    return Judge(FOLDER, "OPT-350", GLOBAL_BATCH)


def finalists(size: tuple[int, int], calibration: Calibration) -> Iterator[list[Plan]]:
    """Those of a search per number of replicas for a cluster under a calibration, the one that we
    would take first."""
    (chain, profiles), cluster = model(), sailor_cluster(*size)
    for replicas in _replicas(size):
        units = tuple(
            max(replicas, replicas * 2 ** math.ceil(math.log2(n / replicas / MOST_UNITS)))
            for n in size
        )
        if math.prod(n // unit for n, unit in zip(size, units, strict=True)) > MOST_PAIRS:
            continue
        with contextlib.suppress(InfeasibleError):
            yield kept_plans(
                calibration.chain(chain),
                calibration.cluster(cluster),
                global_batch=_rounded_batch(replicas),
                settings=replace(PLAIN, replicas=replicas, units=units),
                model=calibration.compute_model(profiles),
            )


def _replicas(size: tuple[int, int]) -> list[int]:
    """Powers of two, and five times one where both kinds can be cut so."""
    most = sum(size)
    powers = [2**power for power in range(int(math.log2(most)) + 1)]
    fives = [5 * power for power in powers if not any(count % 5 for count in size)]
    return [count for count in (*powers, *fives) if count <= most]


def _rounded_batch(replicas: int) -> int:
    """At least the global batch, in whole micro-batches of up to four samples a replica: the judge
    rounds up, too."""
    return (
        math.ceil(GLOBAL_BATCH / (4 * replicas)) * 4 * replicas
        if GLOBAL_BATCH % replicas
        else GLOBAL_BATCH
    )


def judged(plan: Plan, cluster: Cluster) -> float:
    """It/s in the judge; 0 where it has no measurements for a plan, or a plan does not fit in its
    count of bytes."""
    try:
        verdict = judge().verdict(to_sailor(plan, cluster))
    except KeyError:
        return 0.0
    return verdict.iterations_per_second if verdict.fits else 0.0


def best_plan(size: tuple[int, int]) -> Entry:
    """What the judge leads to from our finalists for a cluster."""
    began, cluster = time.process_time(), sailor_cluster(*size)
    overlapping = Calibration(process_bytes=PROCESS)
    both = (overlapping, replace(overlapping, blocking=True))
    searches = [plans for constants in both for plans in finalists(size, constants)]
    score = cache(partial(judged, cluster=cluster))
    kept = [plan for plans in searches for plan in plans]
    best = best_nearby(kept, score, cluster)
    check_plan(best, model()[0], cluster)
    return Entry(
        size=size,
        plan=best,
        ours=_overlapped(best, cluster),
        judged=score(best),
        kept=max(map(score, kept)),
        first=max(score(plans[0]) for plans in searches),
        cpu_seconds=time.process_time() - began,
    )


def _overlapped(plan: Plan, cluster: Cluster) -> float:
    """It/s of a plan in our simulator as it is, whatever constants it was searched with."""
    chain, profiles = model()
    measured = Measurements(source="", runs=(), profiles=profiles)
    run = MeasuredRun(name="", plan=plan, chain=chain, cluster=cluster, seconds=1.0)
    return 1 / exact_seconds(measured, run, Calibration())


def describe(plan: Plan) -> str:
    """``2 samples x 8: 7 V100, 19 A100``: samples of a replica, replicas, layers of each stage and
    its width."""
    kinds = {"a": "A100", "v": "V100"}
    stages = [
        f"{stage.end - stage.first} {kinds[stage.devices[0][0]]}"
        + (f" x{stage.replicas[0].width}" if stage.replicas[0].width > 1 else "")
        for stage in plan.stages
    ]
    first = plan.stages[0].replicas
    return f"{first[0].samples} samples x {len(first)}: {', '.join(stages)}"
