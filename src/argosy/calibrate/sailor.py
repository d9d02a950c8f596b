"""Real runs published with Sailor as measured runs: each plan on the cluster that its own bandwidths describe.

The cluster of a run has a node for each of its groups of GPUs. Its links are Sailor's saturated bandwidths: within a
node among its GPUs, between nodes those of all GPUs of one to all of the other. Latencies were not published and are
0. The runs are DeepSpeed's, whose pipeline engine does not overlap transfers with compute (``Calibration.blocking``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from argosy.calibrate.run import MeasuredRun, Measurements
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import Document
from argosy.errors import InputError, Problem
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.schedule import ScheduleSpec
from argosy.workload.chain import Chain
from argosy.workload.sailor import DeviceGroup, SailorBandwidths, read_sailor, read_sailor_bandwidths
from argosy.workload.sailor_runs import SailorRun, read_sailor_measured


def read_sailor_runs(folder: Path | str, *, model: str = "OPT-350") -> Measurements:
    """Every ``*.json`` of a folder of measured runs; the layer times are in a folder above it."""
    folder = Path(folder)
    home = next((place for place in folder.parents if (place / "layer-times.json").exists()), None)
    paths = sorted(folder.glob("*.json"))
    if home is None or not paths:
        expected = "runs as JSON files, and layer-times.json in a folder above them"
        raise InputError([Problem(file=str(folder), expected=expected)])
    chain, profiles = read_sailor(home, model)
    bandwidths = read_sailor_bandwidths(home)
    runs = tuple(_run(path, chain, bandwidths) for path in paths)
    return Measurements(source=f"Sailor, {folder.name}", runs=runs, profiles=profiles, blocking=True)


def _run(path: Path, chain: Chain, bandwidths: SailorBandwidths) -> MeasuredRun:
    run = read_sailor_measured(path)
    groups = [group for stage in run.stages for replica in stage.replicas for group in replica.groups]
    cluster = sailor_cluster(groups, bandwidths, name=path.stem.replace("_", "-"))
    return MeasuredRun(
        name=path.stem.removeprefix("plan_config_"),
        plan=sailor_plan(run, chain, cluster),
        chain=chain,
        cluster=cluster,
        seconds=run.iteration_seconds,
        peak_bytes=run.peak_bytes,
    )


def sailor_cluster(groups: Iterable[DeviceGroup], bandwidths: SailorBandwidths, *, name: str) -> Cluster:
    """A node for each group of GPUs."""
    counts = Counter(groups)
    nodes: list[dict[str, Any]] = []
    for index, (group, count) in enumerate(counts.items()):
        node: dict[str, Any] = {
            "name": f"g{index}n",
            "count": count,
            "devices": {"kind": group.kind, "count": group.num_devices},
            "nic": {"bandwidth": _rate(_widest(group, counts, bandwidths))},
        }
        if group.num_devices > 1:
            inside = bandwidths.within_node(group.kind, group.num_devices)
            node["intra"] = [{"medium": "nvlink", "bandwidth": _rate(inside)}]
        nodes.append(node)
    links = [
        {
            "between": [f"g{one}n*", f"g{other}n*"],
            "bandwidth": _rate(bandwidths.between_nodes(sender, receiver)),
            "name": f"wire{one}{other}",
        }
        for (one, sender), (other, receiver) in itertools.combinations(enumerate(counts), 2)
    ]
    content = {"name": name, "nodes": nodes, "links": links}
    return build_cluster(Document(name, content, {}), folder=Path())


def _widest(group: DeviceGroup, others: Iterable[DeviceGroup], bandwidths: SailorBandwidths) -> float:
    return max(bandwidths.between_nodes(group, other) for other in others)


def _rate(bandwidth: float) -> str:
    return f"{bandwidth} B/s"


def sailor_plan(run: SailorRun, chain: Chain, cluster: Cluster) -> Plan:
    """The run's plan in our form: groups take the nodes of their kind in order."""
    free: dict[str, list[str]] = {}
    for node in cluster.nodes:
        free.setdefault(cluster.device(node.devices[0]).kind.name, []).append(node.name)
    devices = {node.name: node.devices for node in cluster.nodes}
    stages = []
    for stage in run.stages:
        replicas = []
        for replica in stage.replicas:
            names = [name for group in replica.groups for name in devices[free[group.kind].pop(0)]]
            replicas.append(Replica(devices=tuple(names), samples=run.micro_batch))
        stages.append(Stage(first=stage.layers[0], end=stage.layers[-1] + 1, replicas=tuple(replicas)))
    size = run.micro_batch * len(run.stages[0].replicas)
    return Plan(
        model=ModelRef.of(chain),
        cluster=ClusterRef.of(cluster),
        global_batch=run.global_batch,
        micro_batch_size=size,
        num_micro_batches=run.num_micro_batches,
        schedule=ScheduleSpec(),
        stages=tuple(stages),
    )
