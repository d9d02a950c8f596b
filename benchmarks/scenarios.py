"""Plans chosen over scenarios against plans chosen for the average bandwidth, on generated and
measured traces.

    python -m benchmarks scenarios

Each case is one trace on one edge or group of devices. The plan for the average network and the
plan for the scenario are played by the exact engine over the same trace. Oboe's throughputs are
rescaled to the edge's capacity: their shape is measured, their level is not. Measured traces are
skipped where the data folder is absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from argosy.choose.robust import RobustChoice, find_robust_plan
from argosy.choose.scenario import Robust
from argosy.cluster.changes import device_steps, link_steps
from argosy.cluster.file import cluster_from_content, load_cluster, with_changes
from argosy.cluster.topology import Cluster, canonical
from argosy.cluster.trace import Trace, total
from argosy.cluster.tracefile import read_bamboo, read_oboe, rescaled
from argosy.units import RATE
from argosy.workload.load import load_model
from benchmarks.registry import Benchmark, Row

DATA = Path(__file__).parents[2] / "shared" / "data"
OBOE = ("oboe_0.txt", "oboe_17.txt", "oboe_42.txt", "oboe_101.txt", "oboe_200.txt")
GENERATED = (
    ("on-off", {"on": "20 s", "off": "10 s", "low": 0.05}, 1),
    ("on-off", {"on": "10 s", "off": "20 s", "low": 0.1}, 2),
    ("markov", {"levels": [1.0, 0.3, 0.03], "dwell": "10 s"}, 3),
    ("random-walk", {"step": "2 s", "volatility": 0.5, "low": 0.02}, 4),
    ("periodic", {"period": "40 s", "depth": 0.95}, 5),
    ("token-bucket", {"burst": "20 s", "baseline": 0.05, "busy": "40 s", "idle": "20 s"}, 6),
    ("markov", {"levels": [1.0, 0.1, 0.02], "dwell": "5 s"}, 7),
    ("random-walk", {"step": "5 s", "volatility": 1.0, "low": 0.02}, 8),
    ("on-off", {"on": "30 s", "off": "5 s", "low": 0.02}, 9),
)
SECONDS = 120.0
NARROW = 4e9 / 8
"""Bytes/s: 4 Gbit/s."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cluster that changes, and the model that it trains."""

    name: str
    cluster: Cluster
    scenario: Cluster
    model: str = "llama-3-8b"
    sequence_length: int = 1024
    global_batch: int = 64

    def choose(self, robust: Robust, iterations: int = 60) -> RobustChoice:
        chain = load_model(self.model, sequence_length=self.sequence_length, dtype="fp16")
        return find_robust_plan(
            chain,
            self.cluster,
            [self.scenario],
            global_batch=self.global_batch,
            robust=robust,
            iterations=iterations,
        )


def generated_cases() -> Iterator[Case]:
    """The V100 nodes' links of ``mixed-16`` are shared with others."""
    cluster = load_cluster("mixed-16")
    for name, parameters, seed in GENERATED:
        change = {
            "link": "v*.nic",
            "generator": name,
            "parameters": parameters,
            "seed": seed,
            "horizon": f"{SECONDS:g} s",
        }
        scenario = with_changes(cluster, [change])
        yield Case(name=f"{name} {seed}", cluster=with_changes(cluster, []), scenario=scenario)


def oboe_cases() -> Iterator[Case]:
    """Measured throughput on the links of the V100 nodes, which are NARROW at best: a link shared
    with others."""
    content = json.loads(with_changes(load_cluster("mixed-16"), []).content)
    content["nodes"][1]["nic"]["bandwidth"] = RATE.format(NARROW, digits=None)
    cluster = cluster_from_content(canonical(content))
    for name in OBOE:
        path = DATA / "bandwidth" / name
        if path.exists():
            trace = _until(rescaled(read_oboe(path), capacity=NARROW), SECONDS)
            changes = [link_steps(edge, trace) for edge in ("v0.nic", "v1.nic")]
            yield Case(name=name, cluster=cluster, scenario=with_changes(cluster, changes))


def bamboo_cases() -> Iterator[Case]:
    """Measured preemptions: one V100 node is there while at least the median number of spot
    machines is, time run 100-fold."""
    cluster = with_changes(load_cluster("mixed-16"), [])
    for name in ("bamboo-g4dn.csv", "bamboo-p3.csv"):
        path = DATA / "preemption" / name
        if path.exists():
            fast = _until(slot(total(read_bamboo(path).values()), 100.0), SECONDS)
            changes = [device_steps(f"v1.{index}", fast) for index in range(4)]
            yield Case(name=name, cluster=cluster, scenario=with_changes(cluster, changes))


def slot(machines: Trace, times: float) -> Trace:
    """1 while there are at least the median number of machines, from the first moment at which
    there are."""
    enough = median(machines.values)
    begin = next(
        time for time, value in zip(machines.times, machines.values, strict=True) if value >= enough
    )
    later = [
        (time, value)
        for time, value in zip(machines.times, machines.values, strict=True)
        if time > begin
    ]
    return Trace.from_steps(
        [((time - begin) / times, float(value >= enough)) for time, value in later], initial=1.0
    )


def _until(trace: Trace, end: float) -> Trace:
    """The trace up to a moment; from then on as at the start, so that no plan waits for ever."""
    steps = [
        (time, value) for time, value in zip(trace.times, trace.values, strict=True) if time < end
    ]
    return Trace.from_steps([*steps[1:], (end, trace.values[0])], initial=trace.values[0])


def cases() -> list[Case]:
    return [*generated_cases(), *oboe_cases(), *bamboo_cases()]


def measure() -> list[Row]:
    rows = []
    for case in cases():
        for robust in (Robust.MEAN, Robust.P95):
            choice = case.choose(robust)
            rows += [
                Row(what=f"{case.name}: {robust}, for the scenario", value=choice.value, unit="s"),
                Row(
                    what=f"{case.name}: {robust}, for the average",
                    value=choice.average_value,
                    unit="s",
                ),
                Row(what=f"{case.name}: gain", value=100 * choice.gain, unit="%", target=">= -1"),
            ]
    return rows


BENCHMARK = Benchmark(
    name="scenarios",
    shows="plans chosen over a trace against plans for its average bandwidth",
    measure=measure,
)
