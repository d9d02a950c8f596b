"""Group the nodes of a plan by their requests, and write their scripts, for container
schedulers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from argosy.cluster.file import cluster_from_content
from argosy.errors import Problem
from argosy.exporters.form import Limit, limit
from argosy.plan.runnable import unsupported
from argosy.runtime.job.launch import DEFAULT_PORT, Launch
from argosy.runtime.job.launch_script import writing
from argosy.runtime.processes.run_spec import RUN

# The Kubernetes resource of each vendor of cards; devices of other vendors are CPUs.
RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Intel": "gpu.intel.com/i915"}


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """A group of nodes, by their ranks, that have the same number of cards of the same kind."""

    name: str = ""
    """The name ``a``, ``b``, ..."""
    ranks: tuple[int, ...] = ()
    processes: int
    kind: str
    vendor: str
    cards: int
    """The highest card number in use plus 1: a process takes the card with its device's number."""
    cpus: int | None
    host: str | None = None
    """The only host of the group, if the cluster file names hosts."""


def node_groups(launch: Launch) -> tuple[NodeGroup, ...]:
    """Return every node by itself if hosts are named, else equal nodes together."""
    cluster = cluster_from_content(launch.plan.cluster.content)
    ranks_of: dict[NodeGroup, list[int]] = {}
    for rank, node in enumerate(launch.nodes()):
        kind = cluster.device(node.devices[0]).kind
        group_key = NodeGroup(
            processes=len(node.devices),
            kind=kind.name,
            vendor=kind.vendor,
            cards=max(int(name.rpartition(".")[2]) for name in node.devices) + 1,
            cpus=launch.cluster_nodes[node.name].cpus,
            host=launch.machine(node).name if launch.names_hosts else None,
        )
        ranks_of.setdefault(group_key, []).append(rank)
    return tuple(
        replace(group, name=chr(ord("a") + at) if at < 26 else f"n{at}", ranks=tuple(ranks))
        for at, (group, ranks) in enumerate(ranks_of.items())
    )


def nodes_have_one_kind(launch: Launch, target: str) -> Iterable[Limit]:
    """Yield limits for nodes with several device kinds, and for a plan that the runtime does not
    execute."""
    for sentence in unsupported(launch.plan):
        yield Limit(problem=Problem(path="plan", message=sentence.removesuffix(".")), final=True)
    cluster = cluster_from_content(launch.plan.cluster.content)
    for node in launch.nodes():
        kinds = sorted({cluster.device(name).kind.name for name in node.devices})
        if len(kinds) > 1:
            yield limit(
                node.name,
                " and ".join(kinds),
                f"one kind of device per node in {target}",
                final=True,
            )


def start(launch: Launch, group: NodeGroup, *, index: str, address: str) -> str:
    """Return the script of a node; ``index`` is the shell expression of its position in the
    group."""
    ranks = " ".join(map(str, group.ranks))
    run = launch.spec.folder / RUN
    nodes = len(launch.nodes())
    return f"""set -euo pipefail
ranks=({ranks})
rank=${{ranks[{index}]}}
{writing(launch.spec)}
python -m argosy.runtime.processes.meeting --nproc-per-node {group.processes} --nnodes {nodes} \\
  --rdzv-endpoint {address}:{launch.meeting_port or DEFAULT_PORT} --rdzv-conf "rank=$rank" \\
  -m argosy.runtime.job.worker {run}
"""
