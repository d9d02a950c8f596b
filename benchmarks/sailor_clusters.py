"""Sailor's clusters: A100-40GB beside V100-16GB in nodes of four, our plans in our simulator and in its judge.

Figures of the clusters are restated from eth-easl/sailor (MIT): ``intra_node_bandwidths.json`` (4 GPUs) and, for
us-central1-a, ``multizone_bandwidths_het.json`` (4 GPUs to 4 GPUs): the saturated bandwidths. The model is OPT-350 with
its measured layer times, fp32, 1,024 samples of 2,048 tokens an iteration. Plans keep to what Sailor's form can say:
equal shares, 1F1B, no ZeRO, no recomputation; and to what was measured.

Our simulator and the judge do not see the same network: the judge lets no transfer overlap, sums gradients at the
bandwidth of one GPU, and gives small messages less. So there are two plans for each cluster: one for our simulator as
it is, and one after three constants were fitted to what the judge says of other, random plans, which is what
``argosy calibrate`` is for.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from argosy.calibrate.fit import fit_to
from argosy.calibrate.run import MeasuredRun, Measurements
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.calibration import Calibration
from argosy.document import Document
from argosy.export.sailor import SAILOR_NAMES, to_sailor
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Recompute, Replica, Stage
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.solve.chain import cut_chain
from argosy.workload.chain import Chain
from argosy.workload.profile import Profile
from argosy.workload.sailor import read_sailor
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
PROCESS = 3e9
"""Bytes that the judge counts for a process."""
FITTED = ("bandwidth", "latency", "reduction")
GLOBAL_BATCH = 1024
PLAIN = Settings(
    even_shares=True,
    zero=(0,),
    recompute=(Recompute.NONE,),
    schedules=(ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),),
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Our plan for one cluster, in it/s."""

    size: tuple[int, int]
    plan: Plan
    ours: float
    judged: float
    fits: bool
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


def contest(size: tuple[int, int], calibration: Calibration) -> Entry:
    """Plan for a cluster under a calibration, and ask the judge."""
    chain, profiles = model()
    cluster = sailor_cluster(*size)
    began = time.process_time()
    plan = find_plan(
        calibration.chain(chain),
        calibration.cluster(cluster),
        global_batch=GLOBAL_BATCH,
        settings=PLAIN,
        model=calibration.compute_model(profiles),
    )
    spent = time.process_time() - began
    verdict = judge().verdict(to_sailor(plan, cluster))
    assert plan.predicted is not None
    return Entry(
        size=size,
        plan=plan,
        ours=1 / plan.predicted.iteration_seconds,
        judged=verdict.iterations_per_second,
        fits=verdict.fits,
        cpu_seconds=spent,
    )


@cache
def fitted_to_judge(seed: int = 0, count: int = 60) -> Calibration:
    """Three constants fitted to what the judge says of random plans."""
    _, profiles = model()
    runs = tuple(random_runs(seed, count))
    measured = Measurements(source="Sailor's judge", runs=runs, profiles=profiles, blocking=True)
    return fit_to(measured, runs, FITTED, Calibration(blocking=True, process_bytes=PROCESS))


def random_runs(seed: int, count: int) -> Iterator[MeasuredRun]:
    """Random plans with balanced stages on random clusters of Sailor's sizes, with the judge's seconds."""
    chain, _ = model()
    source = random.Random(seed)
    clusters = [sailor_cluster(*size) for size in SIZES]
    while count:
        cluster = source.choice(clusters)
        plan = _random_plan(source, chain, cluster)
        if plan is None:
            continue
        verdict = judge().verdict(to_sailor(plan, cluster))
        if verdict.fits:
            count -= 1
            yield MeasuredRun(
                name=repr(plan), plan=plan, chain=chain, cluster=cluster, seconds=verdict.iteration_seconds
            )


def _random_plan(source: random.Random, chain: Chain, cluster: Cluster) -> Plan | None:
    """Stages on V100, then stages on A100; None where the draw makes no plan."""
    samples = source.choice([1, 2, 4])
    free = {kind: [d.name for d in cluster.devices if d.kind.name == kind] for kind in KINDS}
    replicas = 2 ** source.randrange(int(math.log2(len(cluster.devices))))
    widths = {kind: source.choice([1, 2, 4]) for kind in KINDS}
    counts = {kind: source.randint(0, min(4, len(free[kind]) // (widths[kind] * replicas))) for kind in KINDS}
    kinds = [KINDS[1]] * counts[KINDS[1]] + [KINDS[0]] * counts[KINDS[0]]
    known = all(str(widths[kind]) in judge().times[SAILOR_NAMES[kind]][str(samples)] for kind in kinds)
    if not kinds or not known or GLOBAL_BATCH % (samples * replicas):
        return None
    ranges = _balanced(chain, kinds, widths, samples)
    if any(first == end for first, end in ranges):
        return None
    stages = []
    for (first, end), kind in zip(ranges, kinds, strict=True):
        groups = [[free[kind].pop(0) for _ in range(widths[kind])] for _ in range(replicas)]
        members = tuple(Replica(devices=tuple(group), samples=samples) for group in groups)
        stages.append(Stage(first=first, end=end, replicas=members))
    return Plan(
        model=ModelRef(name=chain.name, sequence_length=chain.sequence_length, dtype=chain.dtype),
        cluster=ClusterRef(name=cluster.name, hash=cluster.hash, content=cluster.content),
        global_batch=GLOBAL_BATCH,
        micro_batch_size=samples * replicas,
        num_micro_batches=GLOBAL_BATCH // (samples * replicas),
        schedule=ScheduleSpec(),
        stages=tuple(stages),
    )


def _balanced(chain: Chain, kinds: list[str], widths: dict[str, int], samples: int) -> list[tuple[int, int]]:
    """Layers by what they take on the first kind, over stages as fast as they are on the whole model."""
    _, profiles = model()

    def seconds(kind: str) -> list[float]:
        profile, width = profiles[kind], widths[kind]
        return [
            profile.forward_seconds(layer.name, samples, width) + profile.backward_seconds(layer.name, samples, width)
            for layer in chain.layers
        ]

    cut = cut_chain(seconds(kinds[0]), [1 / sum(seconds(kind)) for kind in kinds])
    return list(itertools.pairwise((0, *cut.ends)))
