"""What finding a plan costs, in units of one iteration of 8 stages x 64 micro-batches in a plain
event heap ("H")."""

from __future__ import annotations

from argosy.cluster.file import load_cluster
from argosy.planner import Settings, find_plan
from argosy.workload.load import load_model
from benchmarks.pipeline_case import make_case
from benchmarks.plain_engines import heap_seconds, link_knots, order_of
from benchmarks.registry import Benchmark, Row, cpu_seconds

CASES = (
    ("three-kinds-64", "gpt2-xl", 512, "<= 150"),
    ("four-kinds-1024", "gpt3-175b", 1024, "<= 900"),
    ("four-kinds-1024", "llama-2-70b", 1024, "<= 900"),
    ("four-kinds-4096", "llama-2-70b", 4096, "<= 1500"),
)


PROOFS = (
    (
        "three-kinds-64",
        "gpt2-xl",
        512,
        Settings(level=2, mixed=False, units=(8,) * 3, time_budget=60.0),
        "<= 1",
    ),
    (
        "three-kinds-64",
        "gpt2-xl",
        512,
        Settings(level=2, mixed=True, units=(8,) * 3, time_budget=20.0),
        "<= 1",
    ),
    (
        "four-kinds-1024",
        "llama-2-70b",
        1024,
        Settings(level=2, mixed=False, units=(128,) * 4, time_budget=60.0),
        "<= 10",
    ),
)
"""Level 2 to a gap of 1 %, in units of several devices, with stages of one kind or mixed ones."""


def measure() -> list[Row]:
    case = make_case(num_candidates=1)
    knots, order = link_knots(case), order_of(case)
    unit = cpu_seconds(lambda: heap_seconds(case, 0, knots, order), repeats=20)
    rows = [Row(what="H", value=unit * 1e3, unit="ms")]
    for cluster_name, model, batch, target in CASES:
        cluster = load_cluster(cluster_name)
        chain = load_model(model, sequence_length=1024, dtype="fp16")
        plan = find_plan(chain, cluster, global_batch=batch, settings=Settings(level=1))
        assert plan.predicted is not None and plan.certificate is not None
        seconds = cpu_seconds(
            lambda c=chain, k=cluster, b=batch: find_plan(c, k, global_batch=b), repeats=3
        )
        label = f"{model} on {cluster_name}, level 1"
        rows += [
            Row(what=label, value=seconds / unit, unit="H", target=target),
            Row(what=f"{label}: CPU", value=seconds, unit="s"),
            Row(what=f"{label}: certified gap", value=100 * plan.certificate.gap, unit="%"),
        ]
    return rows + [row for proof in PROOFS for row in _prove(*proof)]


def _prove(cluster_name: str, model: str, batch: int, settings: Settings, target: str) -> list[Row]:
    cluster = load_cluster(cluster_name)
    chain = load_model(model, sequence_length=1024, dtype="fp16")
    plan = find_plan(chain, cluster, global_batch=batch, settings=settings)
    assert plan.certificate is not None and plan.search is not None
    label = f"{model} on {cluster_name}, level 2{', mixed stages' if settings.mixed else ''}"
    return [
        Row(
            what=f"{label}: certified gap",
            value=100 * plan.certificate.gap,
            unit="%",
            target=target,
        ),
        Row(what=f"{label}: CPU", value=plan.search.cpu_seconds, unit="s"),
    ]


BENCHMARK = Benchmark(
    name="planning",
    shows="level 1 of the planner, imports excluded, in one process on one core",
    measure=measure,
)
