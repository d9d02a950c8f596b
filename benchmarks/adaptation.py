"""Policies against traces: a pipeline over two pairs of cards, static, with adaptive k, with shares, with re-planning,
and the oracle that knows the future. `python -m benchmarks.adaptation [NOTE.md]` writes a dated note."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from argosy.adapt.controller import Limits, Reach
from argosy.adapt.play import Stage, play, play_oracle
from argosy.choose.policy import schedules_that_fit
from argosy.cluster.changes import device_steps, link_steps
from argosy.cluster.file import build_cluster, with_changes
from argosy.cluster.generators import generate
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.cluster.tracefile import read_bamboo, read_oboe, rescaled
from argosy.cost.compute import ComputeModel
from argosy.document import parse_toml
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica
from argosy.plan.plan import Stage as PlanStage
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

DATA = Path(__file__).parents[1].parent / "shared" / "data"
RATE = 25e9 / 8
SECONDS = 240.0


def pair() -> Cluster:
    """Two hosts with two A100 each, 25 Gbit/s between them."""
    nodes = "".join(
        f'[[nodes]]\nname = "{name}"\ndevices = {{ kind = "A100-80GB", count = 2 }}\n'
        'intra = [{ medium = "nvlink", bandwidth = "300 GB/s" }]\n'
        'nic = { bandwidth = "25 Gbit/s", latency = "10 us" }\n'
        for name in "ab"
    )
    return build_cluster(parse_toml(f'name = "pair"\n{nodes}', file="pair.toml"), folder=Path())


def traces() -> Iterator[tuple[str, Cluster]]:
    """Calm; generated; measured; and two that flip as often as a controller may change."""
    calm = pair()
    yield "calm", calm
    generated = [
        ("on-off", {"low": 0.15}, (0, 1, 2)),
        ("periodic", {"depth": 0.85, "period": "40 s"}, (0,)),
        ("random-walk", {"volatility": 0.2}, (0, 1, 2)),
        ("markov", {"levels": [1.0, 0.4, 0.12]}, (0, 1, 2)),
        ("token-bucket", {"baseline": 0.15, "busy": "60 s", "idle": "20 s", "burst": "20 s"}, (0,)),
        ("flap", {"every": "60 s"}, (0,)),
    ]
    for name, parameters, seeds in generated:
        for seed in seeds:
            trace = generate(name, parameters, nominal=RATE, seed=seed, horizon=SECONDS)
            yield f"{name} {seed}", with_changes(calm, [link_steps("b0.nic", trace)])
    for seed in (0, 1, 2):
        slow = generate("straggler", {"every": "60 s", "duration": "60 s"}, nominal=1.0, seed=seed, horizon=SECONDS)
        yield f"straggler {seed}", with_changes(calm, [device_steps(f"b0.{at}", slow) for at in (0, 1)])
    for period in (2.0, 4.0):
        steps = [(period * turn, RATE * (0.15 if turn % 2 else 1.0)) for turn in range(int(SECONDS / period))]
        yield (
            f"flips every {period:g} s",
            with_changes(calm, [link_steps("b0.nic", Trace.from_steps(steps, initial=RATE))]),
        )
    yield from _measured(calm)


def _measured(calm: Cluster) -> Iterator[tuple[str, Cluster]]:
    for path in sorted((DATA / "bandwidth").glob("oboe_*.txt")):
        trace = rescaled(read_oboe(path), capacity=RATE)
        yield path.stem, with_changes(calm, [link_steps("b0.nic", trace)])
    for path in sorted((DATA / "preemption").glob("bamboo-*.csv")):
        nodes = list(read_bamboo(path).values())
        changing = [node for node in nodes if len(node.times) > 1 and node.values[0] == 1.0]
        yield path.stem, with_changes(calm, [device_steps(f"b0.{at}", _sooner(changing[at])) for at in (0, 1)])


def _sooner(trace: Trace) -> Trace:
    """Hours as minutes, so that a preemption falls into the time that is played."""
    return Trace.from_steps(
        ((at / 60, value) for at, value in zip(trace.times, trace.values, strict=True)), initial=trace.values[0]
    )


def plan_on(cluster: Cluster, chain: Chain) -> Plan:
    """Half of the layers on each host, both of its devices side by side, 1F1B."""
    cut = len(chain.layers) // 2
    replicas = [tuple(Replica(devices=(f"{node}0.{index}",), samples=4) for index in range(2)) for node in ("a", "b")]
    return Plan(
        model=ModelRef(name=chain.name, sequence_length=chain.sequence_length, dtype=chain.dtype),
        cluster=ClusterRef(name=cluster.name, hash=cluster.hash, content=cluster.content),
        global_batch=64,
        micro_batch_size=8,
        num_micro_batches=8,
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        stages=(
            PlanStage(first=0, end=cut, replicas=replicas[0]),
            PlanStage(first=cut, end=len(chain.layers), replicas=replicas[1]),
        ),
    )


def rates(chain: Chain, cluster: Cluster) -> list[float]:
    """Samples per second of every policy, the oracle last."""
    plan = plan_on(cluster, chain)

    def replan(believed: Cluster) -> Plan:
        return find_plan(chain, believed, global_batch=plan.global_batch, settings=Settings())

    stage = Stage(chain, cluster, ComputeModel())
    variants = schedules_that_fit(plan, chain, cluster)
    found = [
        play(stage, plan, until=SECONDS, limits=Limits(reach=reach, horizon=300), schedules=variants, replan=replan)
        for reach in Reach
    ]
    found.append(play_oracle(stage, variants, until=SECONDS, replan=replan))
    return [course.samples_per_second for course in found]


def main(arguments: list[str]) -> None:
    note = Path(arguments[0]) if arguments else Path(f"benchmarks/results/{time.strftime('%Y-%m-%d')}-adaptation.md")
    chain = load_model("gpt2-xl")
    rows, worst = [], 1.0
    for name, cluster in traces():
        still, *others = rates(chain, cluster)
        worst = min(worst, *(rate / still for rate in others[:3]))
        cells = " | ".join(f"{rate / still:.3f}" for rate in others)
        rows.append(f"| {name} | {still:.2f} | {cells} |")
        print(rows[-1], flush=True)
    text = [
        "# Policies against traces",
        "",
        f"{time.strftime('%Y-%m-%d')}, in the simulator: gpt2-xl in two stages on two hosts with two A100 each,",
        f"{SECONDS:g} s from a plan with 1F1B. Samples per second of the static plan, and the ratio to it. Bandwidth",
        "changes on one NIC of 25 Gbit/s; stragglers and Bamboo's preemptions (hours played as minutes) on that host's",
        "devices. A static plan stops for good where a device never returns.",
        "",
        "Repeat with `python -m benchmarks.adaptation`.",
        "",
        "| trace | static, samples/s | adaptive k | k and shares | full | oracle |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        f"The least ratio of an adaptive policy is {worst:.3f}.",
    ]
    note.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(f"wrote {note}")


if __name__ == "__main__":
    main(sys.argv[1:])
