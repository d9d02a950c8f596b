"""Build the command lines for torchrun that start the processes of a plan, one per node. Needs no
torch.

``launch_script`` and ``slurm`` write scripts around these commands.
"""

from __future__ import annotations

import shlex
import socket
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from argosy.cluster.file import cluster_from_content
from argosy.cluster.topology import Machine
from argosy.cluster.topology import Node as ClusterNode
from argosy.errors import bad_input, impossible
from argosy.plan.plan import Plan
from argosy.runtime.processes.ranks import NodeRanks, devices_by_rank, nodes_of
from argosy.runtime.processes.run_spec import RUN, RunSpec

# TCP port of rank 0's store unless given; torchrun's default master port is the same.
DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run that is to be started, and the hosts that its processes run on."""

    plan: Plan
    spec: RunSpec
    here: bool = False
    """True if the processes of all nodes run on this machine."""
    lab: str | None = None
    """The name of a lab that is up and whose hosts are the nodes of the plan."""
    address: str | None = None
    """The address at which rank 0 can be reached; the cluster file's unless given."""
    port: int | None = None

    @property
    def worker(self) -> str:
        """Return the name of the module that a process runs."""
        return (
            "argosy.runtime.job.worker"
            if self.spec.island is None
            else "argosy.runtime.islands.worker"
        )

    def nodes(self) -> tuple[NodeRanks, ...]:
        """Return the nodes to start processes on."""
        nodes = nodes_of(self.plan)
        if not self.here and self.lab is None:
            return nodes
        return (
            NodeRanks(
                name="here", devices=tuple(device for node in nodes for device in node.devices)
            ),
        )

    @cached_property
    def cluster_nodes(self) -> dict[str, ClusterNode]:
        """Return the nodes of the plan's cluster by name."""
        return {node.name: node for node in cluster_from_content(self.plan.cluster.content).nodes}

    def machine(self, node: NodeRanks) -> Machine:
        """Return the machine of a node; if the cluster file names none, one with the node's own
        name."""
        known = self.cluster_nodes.get(node.name)
        return (known and known.machine) or Machine(name=node.name)

    @property
    def names_hosts(self) -> bool:
        """Return whether the cluster file names the machine of every node in use."""
        known = [self.cluster_nodes.get(node.name) for node in self.nodes()]
        return all(node is not None and node.machine is not None for node in known)

    @property
    def meeting_address(self) -> str:
        """Return the address at which rank 0's store is reached."""
        first = self.machine(self.nodes()[0])
        return self.address or first.address or first.name

    @property
    def meeting_port(self) -> int | None:
        """Return the port of rank 0's store, or None if neither option nor cluster file names
        one."""
        return self.port or self.machine(self.nodes()[0]).port

    def own_rank(self) -> int:
        """Return the node rank of this machine, by its host name; 0 if the cluster file names no
        hosts."""
        nodes = self.nodes()
        if len(nodes) == 1 or not self.names_hosts:
            return 0
        names = [self.machine(node).name for node in nodes]
        own = own_host(names)
        if own is None:
            expected = f"one of the plan's hosts ({', '.join(names)}), or --node-rank"
            raise bad_input(expected, socket.gethostname(), "this host")
        return names.index(own)


def own_host(names: list[str]) -> str | None:
    """Return the name that this machine has among given hosts, with or without its domain; None if
    it is none of them."""
    own, shorter = socket.gethostname(), short_names(names)
    for name in names:
        if own in (name, *shorter.get(name, ())) or own.partition(".")[0] == name:
            return name
    return None


def short_names(names: list[str]) -> dict[str, tuple[str, ...]]:
    """Return, for every host name with a domain, its first label, if no other host has that label.

    >>> short_names(["gpu1.east", "gpu2.east", "gpu2.west", "v1"])
    {'gpu1.east': ('gpu1',)}
    """
    labels = [name.partition(".")[0] for name in names]
    return {
        name: (label,)
        for name, label in zip(names, labels, strict=True)
        if "." in name and labels.count(label) == 1
    }


def command_line(
    launch: Launch, node_rank: int, spec_file: Path, *, python: str = sys.executable
) -> list[str]:
    """Return the torchrun command of one node.

    A run on a single node listens on the loopback interface only. A lab starts all processes at
    once. ``spec_file`` is the file that the options of the run are written to.
    """
    worker = ["-m", launch.worker, str(spec_file)]
    if launch.lab is not None:
        options = [
            "--clock",
            "ready",
            "--timeout",
            "inf",
            "--devices",
            ",".join(devices_by_rank(launch.plan)),
        ]
        return [python, "-m", "argosy", "lab", "run", launch.lab, *options, "--", python, *worker]
    nodes = launch.nodes()
    place = ["--nproc-per-node", str(len(nodes[node_rank].devices))]
    if len(nodes) == 1 and launch.address is None:
        if launch.port is not None:
            place += ["--rdzv-endpoint", f"127.0.0.1:{launch.port}"]
    else:
        endpoint = f"{launch.meeting_address}:{launch.meeting_port or DEFAULT_PORT}"
        interface = launch.machine(nodes[node_rank]).interface
        settings = f"rank={node_rank}" + (f",interface={interface}" if interface else "")
        place += ["--nnodes", str(len(nodes)), "--rdzv-endpoint", endpoint, "--rdzv-conf", settings]
    return [python, "-m", "argosy.runtime.processes.meeting", *place, *worker]


def commands(launch: Launch) -> tuple[tuple[NodeRanks, str], ...]:
    """Return every node with its command, which expects that ``run.json`` is written."""
    file = launch.spec.folder / RUN
    return tuple(
        (node, shlex.join(command_line(launch, rank, file, python="python")))
        for rank, node in enumerate(launch.nodes())
    )


def check_port(launch: Launch, node_rank: int) -> None:
    """Raise an ``InputError`` if rank 0's port is in use, before anything is started."""
    if node_rank != 0 or launch.port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", launch.port))
        except OSError as error:
            raise impossible(f"use port {launch.port}", error, "another --port") from None
