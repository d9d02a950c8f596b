"""The cases: clusters, jobs and plans whose predicted and measured times are set side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import parse_toml
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec
from benchmarks.lab.emulated import Job

Stages = Sequence[tuple[int, Sequence[tuple[str, int]]]]
"""(layers, [(host, samples), ...]), first to last."""

ONE = ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B)
EAGER = ScheduleSpec(kind=ScheduleKind.EAGER)
GPIPE = ScheduleSpec(kind=ScheduleKind.GPIPE)


def kfkb(k: int) -> ScheduleSpec:
    return ScheduleSpec(kind=ScheduleKind.KFKB, k=k)


def cluster_of(
    name: str, hosts: Sequence[tuple[float, float]], changes: str = "", *, gflops: float = 1.0
) -> Cluster:
    """Return hosts a, b, ... of one device each, given as (speed, Mbit/s); a device of speed 1
    computes ``gflops`` GFLOP/s."""
    kinds = "".join(
        f'[[kinds]]\nname = "speed-{speed:g}"\nmemory = "4 GiB"\nmemory_bandwidth = "20 GB/s"\n'
        f'flops = {{ fp32 = "{speed * gflops:g} GFLOP/s" }}\n'
        for speed in sorted({speed for speed, _ in hosts})
    )
    nodes = "".join(
        f'[[nodes]]\nname = "{chr(ord("a") + index)}"\ndevices = {{ kind = "speed-{speed:g}" }}\n'
        f'nic = {{ bandwidth = "{rate:g} Mbit/s", latency = "40 us" }}\n'
        for index, (speed, rate) in enumerate(hosts)
    )
    return build_cluster(
        parse_toml(f'name = "{name}"\n{kinds}{nodes}{changes}', file=f"{name}.toml"), folder=Path()
    )


def plan_of(
    cluster: Cluster,
    job: Job,
    stages: Stages,
    *,
    micro_batches: int,
    schedule: ScheduleSpec = ONE,
) -> Plan:
    chain = job.chain
    built, first = [], 0
    for count, replicas in stages:
        members = tuple(
            Replica(devices=(f"{name}0.0",), samples=samples) for name, samples in replicas
        )
        built.append(Stage(first=first, end=first + count, replicas=members))
        first += count
    assert first == job.num_layers
    size = sum(samples for _, samples in stages[0][1])
    return Plan(
        model=ModelRef(
            name=chain.name, sequence_length=1, dtype=chain.dtype, optimizer=chain.optimizer
        ),
        cluster=ClusterRef.of(cluster),
        global_batch=size * micro_batches,
        micro_batch_size=size,
        num_micro_batches=micro_batches,
        schedule=schedule,
        stages=tuple(built),
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement."""

    name: str
    cluster: Cluster
    job: Job
    plan: Plan
    steps: int = 4


def predicted_cases() -> list[Case]:
    """Pipelines of two to four hosts, unequal layers, replicas with unequal shares, slow and
    changing links."""
    thin = Job(num_layers=8, forward_seconds=2.5e-3, values=16_384, weights=20_000)
    heavy = Job(num_layers=8, forward_seconds=2.5e-3, values=16_384, weights=200_000)
    cases = []

    def add(
        name: str,
        hosts: Sequence[tuple[float, float]],
        job: Job,
        stages: Stages,
        schedules: Sequence[ScheduleSpec] = (ONE,),
        *,
        micro_batches: int = 8,
        changes: str = "",
    ) -> None:
        for schedule in schedules:
            cluster = cluster_of("lab", hosts, changes)
            plan = plan_of(cluster, job, stages, micro_batches=micro_batches, schedule=schedule)
            cases.append(Case(name=name, cluster=cluster, job=job, plan=plan))

    two = [(1.0, 100.0), (1.0, 100.0)]
    add("2 hosts, 100 Mbit/s", two, thin, [(4, [("a", 4)]), (4, [("b", 4)])], (ONE, kfkb(2)))
    slow = [(1.0, 25.0), (1.0, 25.0)]
    add(
        "2 hosts, 25 Mbit/s",
        slow,
        thin,
        [(4, [("a", 4)]), (4, [("b", 4)])],
        (ONE, kfkb(2), kfkb(4), EAGER),
    )
    add("2 to 1, 3:1 in speed", [(2.0, 100.0), (1.0, 100.0), (1.0, 100.0)], thin,
        [(4, [("a", 4)]), (4, [("b", 2), ("c", 2)])])  # fmt: skip
    unequal = [(4.0, 200.0), (2.0, 100.0), (1.0, 100.0), (1.0, 100.0)]
    add("4:2:1:1, layers by speed", unequal, thin, [(4, [("a", 4)]), (2, [("b", 4)]), (1, [("c", 4)]), (1, [("d", 4)])],
        (ONE, EAGER))  # fmt: skip
    add(
        "4:2:1:1, equal layers",
        unequal,
        thin,
        [(2, [("a", 4)]), (2, [("b", 4)]), (2, [("c", 4)]), (2, [("d", 4)])],
    )
    add(
        "data parallel 3:1",
        [(3.0, 200.0), (1.0, 200.0)],
        heavy,
        [(8, [("a", 6), ("b", 2)])],
        micro_batches=4,
    )
    add(
        "data parallel even",
        [(3.0, 200.0), (1.0, 200.0)],
        heavy,
        [(8, [("a", 4), ("b", 4)])],
        micro_batches=4,
    )
    preempted = '[[changes]]\nlink = "b0.nic"\nsteps = [["0 s", "100 Mbit/s"], ["0.6 s", "15 Mbit/s"], ["2 s", "100 Mbit/s"]]\n'
    add(
        "2 hosts, preempted",
        two,
        thin,
        [(4, [("a", 4)]), (4, [("b", 4)])],
        (ONE, kfkb(4)),
        changes=preempted,
    )
    return cases


def rate_cases(
    rates: Sequence[float] = (1000.0, 200.0, 35.0, 12.0), *, real: bool = False
) -> list[Case]:
    """One pipeline of two stages under links of several rates, and every schedule on each."""
    job = Job(num_layers=8, forward_seconds=2e-3, values=16_384, weights=16_384, real=real)
    cases = []
    for rate in rates:
        cluster = cluster_of("lab", [(1.0, rate), (1.0, rate)])
        for schedule in (ONE, kfkb(2), kfkb(4), EAGER):
            plan = plan_of(
                cluster,
                job,
                [(4, [("a", 4)]), (4, [("b", 4)])],
                micro_batches=12,
                schedule=schedule,
            )
            cases.append(
                Case(name=f"{rate:g} Mbit/s", cluster=cluster, job=job, plan=plan, steps=3)
            )
    return cases


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A cluster on which several planners' plans are run."""

    name: str
    cluster: Cluster
    job: Job
    global_batch: int


def real_contest() -> Contest:
    """The first of ``contests`` with layers that compute."""
    job = Job(num_layers=12, forward_seconds=0.0, values=16_384, weights=16_384, real=True)
    cluster = cluster_of("lab", [(4.0, 200.0), (2.0, 100.0), (1.0, 100.0), (1.0, 50.0)])
    return Contest(name="4:2:1:1, layers that compute", global_batch=32, job=job, cluster=cluster)


def contests() -> list[Contest]:
    """Hosts of unequal speed with unequal links: few weights, many weights, and one slow host."""
    few = Job(num_layers=12, forward_seconds=1.5e-3, values=8_192, weights=30_000)
    many = Job(num_layers=12, forward_seconds=1.5e-3, values=8_192, weights=150_000)
    return [
        Contest(name="4:2:1:1, few weights", global_batch=32, job=few,
                cluster=cluster_of("lab", [(4.0, 200.0), (2.0, 100.0), (1.0, 100.0), (1.0, 50.0)])),
        Contest(name="4:2:1:1, many weights", global_batch=32, job=many,
                cluster=cluster_of("lab", [(4.0, 200.0), (2.0, 100.0), (1.0, 100.0), (1.0, 50.0)])),
        Contest(name="2:2:1, slow links", global_batch=24, job=many,
                cluster=cluster_of("lab", [(2.0, 50.0), (2.0, 50.0), (1.0, 50.0)])),
    ]  # fmt: skip
