"""Write a run as a batch script for Slurm.

Nodes with equal requests form one component of a heterogeneous job; if all nodes of a plan have
equal requests, the job is an ordinary one. A node requests the generic resources of its devices
(``gres`` in the cluster file; otherwise ``gpu``, with the type only if the plan's nodes differ in
kind and no host is named), CPUs, and its host if the cluster file names all hosts. Ranks are
assigned by the names of the hosts that Slurm allocates, so that a host always has the rank of a
node of its own component.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from argosy.cluster.device import Device
from argosy.cluster.file import cluster_from_content
from argosy.cluster.topology import Cluster
from argosy.runtime.job.launch import Launch
from argosy.runtime.job.launch_script import comment, writing
from argosy.runtime.processes.ranks import NodeRanks
from argosy.runtime.processes.run_spec import RUN

# The first command of a script, for people who start it themselves.
_SUBMITTED = ': "${SLURM_JOB_ID:?is not set: submit this script with sbatch}"'
_NO_CARD = "generic"
"""The vendor of device kinds that are parts of a CPU, for which Slurm has no generic resource."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The resources that a node requests from Slurm."""

    gres: str
    """The generic resources, as in ``gpu:a100:4``; empty for none."""
    cpus: int
    processes: int


@dataclass(frozen=True, kw_only=True)
class Component:
    """Nodes with equal requests, given by their node ranks."""

    request: Request
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """Names of the hosts; empty if Slurm may choose them."""


def components(launch: Launch) -> tuple[Component, ...]:
    """Return the components of the job, in the order in which the plan first needs them."""
    nodes = launch.nodes()
    cluster = cluster_from_content(launch.plan.cluster.content)
    kinds = {cluster.device(name).kind.name for node in nodes for name in node.devices}
    typed = len(kinds) > 1 and not launch.names_hosts
    ranks: dict[Request, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(_request(launch, node, cluster, typed=typed), []).append(rank)
    return tuple(
        Component(
            request=request,
            ranks=tuple(members),
            hosts=tuple(launch.machine(nodes[rank]).name for rank in members)
            if launch.names_hosts
            else (),
        )
        for request, members in ranks.items()
    )


def _request(launch: Launch, node: NodeRanks, cluster: Cluster, *, typed: bool) -> Request:
    """Return the request of a node. A process uses the card with its device's number, so all cards
    up to the highest number are requested."""
    known = launch.cluster_nodes[node.name]
    highest = max(int(name.rpartition(".")[2]) for name in node.devices)
    requested = Counter(
        _resource(cluster.device(name), gres, typed=typed)
        for name, gres in list(zip(known.devices, known.gres, strict=True))[: highest + 1]
    )
    share = len(node.devices) / len(known.devices)
    return Request(
        gres=",".join(f"{gres}:{count}" for gres, count in requested.items() if gres),
        cpus=max(len(node.devices), int((known.cpus or 0) * share)),
        processes=len(node.devices),
    )


def _resource(device: Device, gres: str | None, *, typed: bool) -> str:
    if gres is not None:
        return gres
    if device.kind.vendor == _NO_CARD:
        return ""
    return f"gpu:{re.split(r'[^a-z0-9]', device.kind.name.lower())[0]}" if typed else "gpu"


def slurm_script(launch: Launch) -> str:
    """Return the text of the batch script."""
    parts = components(launch)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", launch.plan.model.name)
    lines = ["#!/bin/bash", f"#SBATCH --job-name=argosy-{name}"]
    for index, component in enumerate(parts):
        lines += ["#SBATCH hetjob"] if index else []
        lines += [f"#SBATCH {option}" for option in _options(component)]
    lines += [
        "set -euo pipefail",
        _SUBMITTED,
        writing(launch.spec),
        *_table(launch, parts),
        *_meeting(launch),
    ]
    lines += [f"start={shlex.quote(_start(launch))}"]
    steps = []
    for index, component in enumerate(parts):
        group = f"--het-group={index} " if len(parts) > 1 else ""
        steps.append(f'{group}--cpus-per-task={component.request.cpus} bash -c "$start"')
    lines += [f"srun --kill-on-bad-exit=1 --mpi=none {' : '.join(steps)}"]
    return "\n".join(lines) + "\n"


def _options(component: Component) -> Iterator[str]:
    yield f"--nodes={len(component.ranks)}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={component.request.cpus}"
    if component.request.gres:
        yield f"--gres={component.request.gres}"
    if component.hosts:
        yield f"--nodelist={','.join(component.hosts)}"


def _table(launch: Launch, parts: tuple[Component, ...]) -> Iterator[str]:
    """Yield the lines that fill ``hosts`` with host, node rank, number of processes and interface
    ("-" for any) of every node."""
    nodes = launch.nodes()
    yield comment("The plan's nodes by rank: " + ", ".join(node.name for node in nodes))
    yield "hosts=()"
    for index, component in enumerate(parts):
        rows = [
            f"{rank} {component.request.processes} {launch.machine(nodes[rank]).interface or '-'}"
            for rank in component.ranks
        ]
        if component.hosts:
            for host, row in zip(component.hosts, rows, strict=True):
                yield f"hosts+=({host} {row})"
            continue
        variable = (
            f"SLURM_JOB_NODELIST_HET_GROUP_{index}" if len(parts) > 1 else "SLURM_JOB_NODELIST"
        )
        yield f'mapfile -t names < <(scontrol show hostnames "${variable}")'
        for at, row in enumerate(rows):
            yield f'hosts+=("${{names[{at}]}}" {row})'


def _meeting(launch: Launch) -> Iterator[str]:
    """Yield the lines that set ``address`` and ``port`` of rank 0's store, and export the variables
    that every host needs."""
    stated = launch.address or launch.machine(launch.nodes()[0]).address
    if stated:
        yield f"address={shlex.quote(stated)}"
    else:
        yield "for ((at = 0; at < ${#hosts[@]}; at += 4)); do"
        yield '  if [ "${hosts[at + 1]}" = 0 ]; then first=${hosts[at]}; fi'
        yield "done"
        yield "address=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')"
    port = launch.meeting_port
    yield f"port={port}" if port else "port=$((20000 + SLURM_JOB_ID % 20000))"
    yield 'table="${hosts[*]}"'
    yield "export table address port"


def _start(launch: Launch) -> str:
    """Return the script that every host runs: it finds its row by the name that Slurm has for
    it."""
    run = shlex.quote(str(launch.spec.folder / RUN))
    return f"""
set -- $table
while [ $# -gt 0 ] && [ "$1" != "$SLURMD_NODENAME" ]; do shift 4; done
if [ $# -eq 0 ]; then \
echo "$SLURMD_NODENAME is none of the hosts of this job: $table" >&2; exit 2; fi
settings=rank=$2
if [ "$4" != - ]; then settings=$settings,interface=$4; fi
python -m argosy.runtime.processes.meeting --nproc-per-node "$3" --nnodes {len(launch.nodes())} \\
  --rdzv-endpoint "$address:$port" --rdzv-conf "$settings" -m argosy.runtime.job.worker {run}
"""
