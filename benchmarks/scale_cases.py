"""What ``benchmarks.scale`` measures, each in a process of its own.

``python -m benchmarks.scale_cases NAME ARGUMENT ...`` prints a JSON object with what it took.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from argosy.choose.robust import find_robust_plan
from argosy.cluster.file import cluster_from_content, load_cluster, with_changes
from argosy.cluster.topology import Cluster, canonical
from argosy.plan.file import load_plan
from argosy.plan.plan import Plan
from argosy.planner import Settings, find_plan
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.tasks.compile import compile_plan
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

Figures = dict[str, float]


def four_kinds(devices: int) -> Cluster:
    """The bundled cluster of 4,096 with more or fewer nodes of each of its four kinds."""
    content = json.loads(load_cluster("four-kinds-4096").content)
    nodes = [
        {**node, "count": devices // 4 // node["devices"]["count"]} for node in content["nodes"]
    ]
    return cluster_from_content(
        canonical({**content, "name": f"four-kinds-{devices}", "nodes": nodes})
    )


def fp16(model: str, times: int = 1) -> Chain:
    """A model at 1,024 tokens, with its blocks so many times over."""
    chain = load_model(model, sequence_length=1024, dtype="fp16")
    first, *blocks, last = chain.layers
    return replace(chain, layers=(first, *blocks * times, last))


def plan(
    devices: int, level: int, parts: int, batch: int, model: str = "llama-2-70b", times: int = 1
) -> Figures:
    """A search; on level 2 to 1 % within a minute, one kind to a stage, every kind in so many
    parts."""
    cluster, chain = four_kinds(devices), fp16(model, times)
    units = (devices // 4 // parts,) * 4
    proof = Settings(level=2, mixed=False, units=units, time_budget=60.0)
    began = time.process_time()
    found = find_plan(
        chain, cluster, global_batch=batch, settings=proof if level == 2 else Settings()
    )
    took = time.process_time() - began
    assert found.certificate is not None and found.predicted is not None
    return {
        "cpu": took,
        "gap": found.certificate.gap,
        "granularity": found.certificate.granularity,
        "bound": found.certificate.lower_bound_seconds,
        "seconds": found.predicted.iteration_seconds,
        "stages": len(found.stages),
        "layers": len(chain.layers),
    }


def batches(batch: int) -> Figures:
    """A search where the global batch grows and the cluster does not."""
    chain, cluster = (
        load_model("gpt2-xl", sequence_length=1024, dtype="fp16"),
        load_cluster("three-kinds-64"),
    )
    began = time.process_time()
    found = find_plan(chain, cluster, global_batch=batch)
    return {"cpu": time.process_time() - began, "micro_batches": found.num_micro_batches}


def scenarios(count: int) -> Figures:
    """A plan for so many ways in which a link may change."""
    chain, cluster = (
        load_model("gpt2-medium", sequence_length=512, dtype="fp16"),
        load_cluster("mixed-8"),
    )
    cluster = with_changes(cluster, [])
    manner = {
        "link": "new0.nic",
        "generator": "on-off",
        "parameters": {"on": "4 s", "off": "4 s", "low": 0.2},
    }
    changed = [
        with_changes(cluster, [{**manner, "seed": seed, "horizon": "60 s"}])
        for seed in range(count)
    ]
    began = time.process_time()
    find_robust_plan(chain, cluster, changed, global_batch=32, iterations=10)
    return {"cpu": time.process_time() - began}


def micro_batches(count: int) -> Figures:
    """One iteration of a plan in the exact engine, while nothing changes."""
    found, chain, cluster = _bundled()
    cluster = with_changes(cluster, [])
    longer = replace(found, num_micro_batches=count, global_batch=count * found.micro_batch_size)
    began = time.process_time()
    simulate_exact(compile_plan(longer, chain, cluster), cluster, record=0)
    return {"cpu": time.process_time() - began}


def iterations(count: int, jump: int) -> Figures:
    """So many iterations of a plan in the exact engine, its links changing in the first minutes."""
    found, chain, cluster = _bundled()
    graph = compile_plan(found, chain, cluster)
    began = time.process_time()
    timeline = simulate_exact(graph, cluster, iterations=count, record=0, jump=bool(jump))
    took = time.process_time() - began
    return {"cpu": took, "played": count - timeline.repeated, "last": timeline.iteration_ends[-1]}


def _bundled() -> tuple[Plan, Chain, Cluster]:
    found = load_plan("llama-3-8b-on-mixed-16")
    chain = load_model(
        found.model.name, sequence_length=found.model.sequence_length, dtype=found.model.dtype
    )
    return found, chain, cluster_from_content(found.cluster.content)


CASES: dict[str, Callable[..., Figures]] = {
    each.__name__: each for each in (plan, batches, scenarios, micro_batches, iterations)
}


def in_a_process(name: str, *arguments: int | str) -> Figures:
    """A case in a fresh interpreter, with the most memory it held (``rss``, bytes) and CPU seconds
    of it and its children (``all_cpu``); told on stderr, because the next one may take minutes."""
    command = [sys.executable, "-m", "benchmarks.scale_cases", name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(name, *arguments, done.stdout.strip(), file=sys.stderr, flush=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    name, *texts = sys.argv[1:]
    figures = CASES[name](*(int(text) if text.isdigit() else text for text in texts))
    held = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    figures["rss"] = 1024.0 * held[0].ru_maxrss
    figures["all_cpu"] = sum(each.ru_utime + each.ru_stime for each in held)
    print(json.dumps(figures))
