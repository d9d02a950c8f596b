"""How the cost of simulating grows with micro-batches and with iterations: a sweep."""

from __future__ import annotations

from dataclasses import replace

from argosy.cluster.file import cluster_from_content
from argosy.cluster.topology import Cluster
from argosy.plan.file import load_plan
from argosy.plan.plan import Plan
from argosy.schedule import build_schedule
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.tasks.compile import compile_plan
from argosy.workload.chain import Chain
from argosy.workload.load import load_model
from benchmarks.registry import Benchmark, Sweep

Built = tuple[Plan, Chain, Cluster]


def _build(micro_batches: int) -> Built:
    plan = load_plan("llama-3-8b-on-mixed-16")
    ref = plan.model
    chain = load_model(
        ref.name, sequence_length=ref.sequence_length, dtype=ref.dtype, optimizer=ref.optimizer
    )
    larger = replace(
        plan, num_micro_batches=micro_batches, global_batch=plan.micro_batch_size * micro_batches
    )
    return larger, chain, cluster_from_content(plan.cluster.content)


def _schedule(built: Built) -> object:
    plan = built[0]
    return build_schedule(plan.schedule, len(plan.stages), plan.num_micro_batches)


def _compile(built: Built) -> object:
    return compile_plan(*built)


def _simulate(built: Built) -> object:
    return simulate_exact(compile_plan(*built), built[2], record=0)


SWEEP = Sweep(
    over="micro-batches",
    sizes=(32, 128, 512),
    build=_build,
    phases={"schedule": _schedule, "tasks": _compile, "tasks and exact engine": _simulate},
)
BENCHMARK = Benchmark(
    name="growth",
    shows="simulating 4 stages of 4 devices whose links change: CPU time by micro-batches (growth 1 is linear)",
    measure=SWEEP.measure,
)
