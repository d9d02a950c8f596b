"""Read runs published with Sailor as measured runs: each plan on the cluster that its own
bandwidths describe.

The cluster of a run has a node for each of its groups of GPUs. Its links are Sailor's saturated
bandwidths: within a node among its GPUs, and between each pair of nodes from all GPUs of one to all
of the other. Latencies were not published and are 0. The runs are DeepSpeed's, whose pipeline
engine does not overlap transfers with compute (``Calibration.blocking``), and whose tensor-parallel
groups do not split the sequence. The table of the mixed RTX runs marks impossible figures: peaks
below the bytes of the weights, and a run that is a copy of another (``read_mixed``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from argosy.calibrate.run import MeasuredRun, Measurements
from argosy.calibrate.table import TableRow, read_rows, whole_number
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import Document, JsonObject
from argosy.errors import invalid
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.schedule import ScheduleSpec
from argosy.workload.chain import Chain
from argosy.workload.imports.sailor import (
    SailorBandwidths,
    SailorGroup,
    device_group,
    read_sailor,
    read_sailor_bandwidths,
)
from argosy.workload.imports.sailor_runs import (
    SailorReplica,
    SailorRun,
    SailorStage,
    read_sailor_measured,
)

_ZONE = "us-central1-a"
# The model of the runs.
_MODEL = "OPT-350"
"""The only zone in the published bandwidths of these device kinds."""


def read_sailor_runs(folder: Path | str) -> Measurements:
    """Read every ``*.json`` of a folder of measured runs; the layer times are in a folder above
    it."""
    folder = Path(folder)
    home = next((place for place in folder.parents if (place / "layer-times.json").exists()), None)
    paths = sorted(folder.glob("*.json"))
    if home is None or not paths:
        expected = "runs as JSON files, and layer-times.json in a folder above them"
        raise invalid(file=str(folder), expected=expected)
    chain, profiles = read_sailor(home, _MODEL)
    bandwidths = read_sailor_bandwidths(home)
    runs = tuple(_run(path, chain, bandwidths) for path in paths)
    return Measurements(
        source=f"Sailor, {folder.name}", runs=runs, profiles=profiles, blocking=True
    )


# Columns that the table of mixed runs must have.
COLUMNS = frozenset(
    {
        "run",
        "layers_per_stage",
        "kinds",
        "tp",
        "mbs",
        "gbs",
        "seconds",
        "max_mem_bytes",
        "judgement",
    }
)
_NOT_A_RUN = "not a run"
"""Text in the judgement of a row whose figures are those of another run."""


def read_mixed(path: Path | str, *, partly: bool = False) -> Measurements:
    """Read the rows of a table of mixed runs whose times are possible; a folder ``sailor`` beside
    or above the table has the layer times.

    Their memory is omitted: it is all that was in use on a card, and nothing states how much of it
    a process took beside the model.
    """
    places = (parent / "sailor" for parent in Path(path).resolve().parents)
    home = next((place for place in places if (place / "layer-times.json").exists()), None)
    if home is None:
        raise invalid(
            file=str(path), expected="a folder sailor with layer-times.json beside or above it"
        )
    chain, profiles = read_sailor(home, _MODEL)
    bandwidths = read_sailor_bandwidths(home)

    def run_of(row: TableRow, number: int) -> list[MeasuredRun]:
        if _NOT_A_RUN in row["judgement"]:
            return []
        run = _mixed_run(row, len(chain.layers))
        measured = _measured(run, row["run"], chain, bandwidths, file=f"{path}:{row.line}")
        return [replace(measured, row=number, peak_bytes=None)]

    rows = read_rows(path, run_of, partly=partly)
    return Measurements(
        source=Path(path).stem,
        runs=rows.values,
        profiles=profiles,
        blocking=True,
        left_out=rows.left_out,
    )


def _mixed_run(row: TableRow, num_layers: int) -> SailorRun:
    """Return the run of a row; semicolons separate stages, plus signs the replicas of a stage."""
    width = row.count("tp")
    listed = row["layers_per_stage"]
    counts = [row.value("layers_per_stage", whole_number, text) for text in listed.split("/")]
    kinds = [stage.split("+") for stage in row["kinds"].split(";")]
    if sum(counts) != num_layers or len(kinds) != len(counts):
        expected = f"layers of {len(kinds)} stages, {num_layers} together"
        raise invalid(file=row.file, line=row.line, found=listed, expected=expected)
    ends = list(itertools.accumulate(counts))
    stages = []
    for end, count, replicas in zip(ends, counts, kinds, strict=True):
        groups = [(device_group(kind.strip(), width, _ZONE),) for kind in replicas]
        stages.append(
            SailorStage(
                layers=tuple(range(end - count, end)),
                replicas=tuple(SailorReplica(groups=group, tensor_width=width) for group in groups),
            )
        )
    return SailorRun(
        stages=tuple(stages),
        micro_batch=row.count("mbs"),
        global_batch=row.count("gbs"),
        iteration_seconds=row.amount("seconds"),
        peak_bytes=row.amount("max_mem_bytes"),
    )


def _run(path: Path, chain: Chain, bandwidths: SailorBandwidths) -> MeasuredRun:
    return _measured(read_sailor_measured(path), path.stem, chain, bandwidths, file=str(path))


def _measured(
    run: SailorRun, name: str, chain: Chain, bandwidths: SailorBandwidths, *, file: str
) -> MeasuredRun:
    num_layers = run.stages[-1].layers[-1] + 1
    if num_layers != len(chain.layers):
        expected = f"the {len(chain.layers)} layers of {chain.name}"
        raise invalid("layers_per_stage", str(num_layers), expected, file=file)
    groups = [
        group for stage in run.stages for replica in stage.replicas for group in replica.groups
    ]
    cluster = sailor_cluster(groups, bandwidths, name=name.replace("_", "-"))
    return MeasuredRun(
        name=name.removeprefix("plan_config_"),
        plan=sailor_plan(run, chain, cluster),
        chain=chain,
        cluster=cluster,
        seconds=run.iteration_seconds,
        peak_bytes=run.peak_bytes,
    )


def sailor_cluster(
    groups: Iterable[SailorGroup], bandwidths: SailorBandwidths, *, name: str
) -> Cluster:
    """Return a cluster with a node for each group of GPUs."""
    counts = Counter(groups)
    nodes: list[JsonObject] = []
    for index, (group, count) in enumerate(counts.items()):
        node: JsonObject = {
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
            "between": [f"g{source}n{source_node}", f"g{target}n{target_node}"],
            "bandwidth": _rate(bandwidths.between_nics(sender, receiver)),
            "name": f"wire{source}-{source_node}-{target}-{target_node}",
        }
        for (source, sender), (target, receiver) in itertools.combinations(enumerate(counts), 2)
        for source_node, target_node in itertools.product(
            range(counts[sender]), range(counts[receiver])
        )
    ]
    content = {"name": name, "nodes": nodes, "links": links}
    return build_cluster(Document(name, content, {}), folder=Path())


def _widest(
    group: SailorGroup, others: Iterable[SailorGroup], bandwidths: SailorBandwidths
) -> float:
    return max(bandwidths.between_nics(group, peer) for peer in others)


def _rate(bandwidth: float) -> str:
    return f"{bandwidth} B/s"


def sailor_plan(run: SailorRun, chain: Chain, cluster: Cluster) -> Plan:
    """Return the plan of a run; groups take the nodes of their kind in order."""
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
        stages.append(
            Stage(first=stage.layers[0], end=stage.layers[-1] + 1, replicas=tuple(replicas))
        )
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
