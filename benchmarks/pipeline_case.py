"""The case that the engines are compared on: a pipeline of one device per stage under step
traces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from argosy.cluster.catalogue import device_kind
from argosy.cluster.device import Device
from argosy.cluster.topology import Cluster, Link, Node, Wire
from argosy.cluster.trace import Trace
from argosy.schedule import Schedule, ScheduleSpec, build_schedule
from argosy.sim.constant import pipeline_seconds
from argosy.sim.engine.graph import TaskGraph
from benchmarks.bare_pipeline import StageCost, pipeline_graph


@dataclass(frozen=True, kw_only=True)
class Case:
    """Candidates that differ in stage times and sizes, on one cluster."""

    schedule: Schedule
    cluster: Cluster
    forward: np.ndarray
    """(stages, candidates), seconds; also ``backward``; ``sizes`` in bytes."""
    backward: np.ndarray
    sizes: np.ndarray

    def costs(self, candidate: int) -> list[StageCost]:
        columns = zip(
            self.forward[:, candidate],
            self.backward[:, candidate],
            self.sizes[:, candidate],
            strict=True,
        )
        return [
            StageCost(forward=float(f), backward=float(b), output_bytes=float(s))
            for f, b, s in columns
        ]

    def graph(self, candidate: int) -> TaskGraph:
        return pipeline_graph(
            self.schedule, self.costs(candidate), [device.name for device in self.cluster.devices]
        )

    def recurrence_seconds(self) -> np.ndarray:
        """Of every candidate, by the inner loop of the search; for links that do not change."""
        rates = {link.bandwidth.values for link in self.cluster.links}
        ((rate,),) = rates
        nothing = np.zeros_like(self.forward)
        return pipeline_seconds(
            ScheduleSpec(),
            self.schedule.num_micro_batches,
            forward=self.forward,
            backward=self.backward,
            transfer=self.sizes / rate,
            latency=nothing,
            tail=nothing,
        )


def make_case(
    *,
    num_stages: int = 8,
    num_micro_batches: int = 64,
    num_steps: int = 64,
    num_candidates: int = 4096,
    seed: int = 0,
) -> Case:
    """``num_steps`` of every link's bandwidth; one is a link that does not change, all of them the
    same."""
    random = np.random.default_rng(seed)
    forward = random.uniform(0.004, 0.010, (num_stages, num_candidates))
    return Case(
        schedule=build_schedule(ScheduleSpec(), num_stages, num_micro_batches),
        cluster=line_cluster(num_stages, num_steps, random),
        forward=forward,
        backward=forward * random.uniform(1.8, 2.2, forward.shape),
        sizes=16e6 * random.uniform(0.5, 2.0, forward.shape),
    )


def line_cluster(
    num_stages: int, num_steps: int, random: np.random.Generator, horizon: float = 3.0
) -> Cluster:
    """Single-device hosts in a row, a link of its own between neighbours, each direction under its
    own trace."""
    kind = device_kind("A100-80GB")
    names = [f"n{index}" for index in range(num_stages)]
    links, wires = [], []
    for index in range(num_stages - 1):
        for way in ("forward", "back"):
            knots = [0.0, *np.sort(random.uniform(0, horizon, num_steps - 1)).tolist()]
            values = (
                (12.5e9 * random.uniform(0.2, 1.0, num_steps)).tolist()
                if num_steps > 1
                else [12.5e9]
            )
            trace = Trace(tuple(knots), tuple(values))
            name = f"wire{index}"
            links.append(
                Link(name=f"{name}.{way}", edge=name, bandwidth=trace, latency=Trace.constant(0))
            )
        wires.append(
            Wire(
                name=name,
                nodes=frozenset([names[index]]),
                far_nodes=frozenset([names[index + 1]]),
                forward=2 * index,
                back=2 * index + 1,
                bypasses_nic=True,
            )
        )
    return Cluster(
        name="line",
        nodes=tuple(Node(name=name, devices=(f"{name}.0",)) for name in names),
        devices=tuple(Device(name=f"{name}.0", node=name, kind=kind) for name in names),
        links=tuple(links),
        wires=tuple(wires),
    )
