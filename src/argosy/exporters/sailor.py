"""Export a plan in the format in which Sailor publishes plans and runs.

Its simulator, and anyone, can then evaluate the plan.

    {zone, pipeline_list: [{num_stages, layers_per_stage, tmp_per_stage, dp}],
     mbs, gbs, N, real, red_grads, max_mem}

``tmp_per_stage`` lists the replicas of every stage as [[[GPU kind, count, zone], ...], tensor
width]; ``mbs`` is the samples of a replica. ``real``, ``red_grads`` and ``max_mem`` hold
measurements in published files; here the first and the last are predictions, and ``predicted``
marks them.

The format cannot express, and the export rejects: shares that differ, ratios inside a replica,
recomputation, ZeRO, context and expert parallelism, any schedule but 1F1B at its usual depth, a
policy, GPU kinds that Sailor has no name for.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from argosy.cluster.topology import Cluster
from argosy.errors import Problem, raise_any
from argosy.exporters.form import replicas
from argosy.plan.plan import Plan, Recompute, Replica, Stage
from argosy.schedule import ScheduleKind
from argosy.workload.imports.sailor import CATALOGUE_NAMES

SAILOR_NAMES = {ours: theirs for theirs, ours in CATALOGUE_NAMES.items()}
"""Sailor's name of a device kind, by the catalogue's name."""

ZONE = "us-central1-a"
"""The zone in which Sailor measured its GPUs."""

# A function that yields what the format cannot express.
Rule = Callable[[Plan, Cluster], Iterator[Problem]]


def dumps_sailor(plan: Plan, cluster: Cluster, *, zone: str = ZONE) -> str:
    """Return the plan as text; raise ``InputError`` with everything that the format cannot
    express."""
    return json.dumps(to_sailor(plan, cluster, zone=zone), indent=1) + "\n"


def to_sailor(plan: Plan, cluster: Cluster, *, zone: str = ZONE) -> dict[str, Any]:
    """Return the plan as Sailor's tables."""
    problems = [problem for rule in RULES for problem in rule(plan, cluster)]
    raise_any(problems)
    peaks = [peak for _, peak in plan.predicted.peak_memory_bytes] if plan.predicted else []
    pipeline = {
        "num_stages": len(plan.stages),
        "layers_per_stage": [list(range(stage.first, stage.end)) for stage in plan.stages],
        "tmp_per_stage": [
            [_replica(replica, cluster, zone) for replica in stage.replicas]
            for stage in plan.stages
        ],
        "dp": [len(stage.replicas) for stage in plan.stages],
    }
    return {
        "zone": zone,
        "pipeline_list": [pipeline],
        "mbs": plan.stages[0].replicas[0].samples,
        "gbs": plan.global_batch,
        "N": len({cluster.device(name).node for name in plan.devices}),
        "real": plan.predicted.iteration_seconds if plan.predicted else 0.0,
        "red_grads": 0.0,
        "max_mem": max(peaks, default=0.0),
        "predicted": True,
    }


def _replica(replica: Replica, cluster: Cluster, zone: str) -> list[Any]:
    """Return the GPUs of a replica node by node, and its tensor width."""
    nodes = Counter(cluster.device(name).node for name in replica.devices)
    kinds = {cluster.device(name).node: cluster.device(name).kind.name for name in replica.devices}
    return [
        [[SAILOR_NAMES[kinds[node]], count, zone] for node, count in nodes.items()],
        replica.width,
    ]


def shares_are_equal(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    """Yield a problem if replicas differ in samples: ``mbs`` is one number for the whole plan."""
    usual = plan.stages[0].replicas[0].samples
    for path, _, replica in replicas(plan):
        if replica.samples != usual:
            expected = (
                f"{usual} samples, as everywhere: Sailor has one micro-batch for all replicas of "
                "all stages"
            )
            yield Problem(
                f"{path}.samples",
                str(replica.samples),
                expected,
                suggestion="argosy plan --even-shares",
            )
            return


def tensors_are_split_evenly(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    """Yield a problem for each replica whose devices have unequal ratios."""
    for path, _, replica in replicas(plan):
        if max(replica.shares) - min(replica.shares) > 1e-9:
            expected = "equal ratios: Sailor knows the width of a tensor-parallel group only"
            yield Problem(f"{path}.ratios", str(list(replica.ratios)), expected)


def stages_are_plain(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    """Yield a problem for recomputation, ZeRO, context or expert parallelism."""
    for index, stage in enumerate(plan.stages):
        for name, value, usual in _extras(stage):
            if value != usual:
                expected = f"{usual}: Sailor's form has no word for it"
                yield Problem(f"stages[{index}].{name}", value, expected)


def _extras(stage: Stage) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the value and the only supported value of settings of a stage."""
    yield "recompute", str(stage.recompute), str(Recompute.NONE)
    yield "zero", str(stage.zero), "0"
    yield "context", str(stage.context), "1"
    yield "expert", str(stage.expert), "1"


def schedule_is_1f1b(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    """Yield a problem for a schedule other than 1F1B."""
    kind, depth = plan.schedule.kind, plan.schedule.depth
    if (kind is not ScheduleKind.ONE_F_ONE_B or depth is not None) and len(plan.stages) > 1:
        expected = "1f1b: Sailor's form names no schedule, and its runs are 1F1B"
        suggestion = "argosy plan --schedule 1f1b"
        actual = str(kind) if depth is None else repr(plan.schedule)
        yield Problem("schedule.kind", actual, expected, suggestion=suggestion)


def schedule_stays(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    """Yield a problem for a policy."""
    if plan.policy:
        expected = "none: Sailor's form has no word for another schedule"
        yield Problem("policy", f"{len(plan.policy)} rules", expected)


def kinds_have_names(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    """Yield a problem for each device kind that Sailor has no name for."""
    for kind in sorted({cluster.device(name).kind.name for name in plan.devices}):
        if kind not in SAILOR_NAMES:
            expected = f"device kinds that Sailor has measured ({', '.join(sorted(SAILOR_NAMES))})"
            yield Problem("stages", kind, expected)


RULES: tuple[Rule, ...] = (
    shares_are_equal,
    tensors_are_split_evenly,
    stages_are_plain,
    schedule_is_1f1b,
    schedule_stays,
    kinds_have_names,
)
"""The rules that a plan must satisfy, one function each."""
