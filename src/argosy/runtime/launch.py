"""From a plan to the processes that carry it out: command lines for torchrun, one per node. Needs no torch."""

from __future__ import annotations

import re
import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from argosy.errors import InputError, Problem
from argosy.plan.plan import Plan
from argosy.runtime.ranks import Node, devices_by_rank, nodes_of
from argosy.runtime.run_spec import RUN, RunSpec, dumps_run_spec

DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run to be started, and where its processes are to be."""

    plan: Plan
    spec: RunSpec
    here: bool = False
    """Every node's processes on this machine."""
    lab: str | None = None
    """A lab that is up, whose hosts are the plan's nodes."""
    address: str | None = None
    """Where rank 0 can be reached; its node's own name unless given."""
    port: int | None = None

    @property
    def worker(self) -> str:
        """The module that a process runs."""
        return "argosy.runtime.worker" if self.spec.island is None else "argosy.runtime.islands.worker"

    def nodes(self) -> tuple[Node, ...]:
        """The hosts to start processes on."""
        nodes = nodes_of(self.plan)
        if not self.here and self.lab is None:
            return nodes
        return (Node(name="here", devices=tuple(device for node in nodes for device in node.devices)),)


def command_line(launch: Launch, node_rank: int, spec_file: Path, *, python: str = sys.executable) -> list[str]:
    """torchrun for one node; on a single node out of the network's reach. A lab starts all processes at once.

    ``spec_file`` is where the run's options are written.
    """
    worker = ["-m", launch.worker, str(spec_file)]
    if launch.lab is not None:
        options = ["--clock", "ready", "--timeout", "inf", "--devices", ",".join(devices_by_rank(launch.plan))]
        return [python, "-m", "argosy", "lab", "run", launch.lab, *options, "--", python, *worker]
    nodes = launch.nodes()
    processes = ["--nproc-per-node", str(len(nodes[node_rank].devices))]
    if len(nodes) == 1 and launch.address is None:
        port = [] if launch.port is None else ["--rdzv-endpoint", f"127.0.0.1:{launch.port}"]
        return [python, "-m", "argosy.runtime.meeting", *processes, *port, *worker]
    place = ["--nnodes", str(len(nodes)), "--node-rank", str(node_rank)]
    place += ["--master-addr", launch.address or nodes[0].name, "--master-port", str(launch.port or DEFAULT_PORT)]
    return [python, "-m", "torch.distributed.run", *processes, *place, *worker]


def commands(launch: Launch) -> tuple[tuple[Node, str], ...]:
    """Every node with its command, once ``run.json`` is written."""
    file = launch.spec.folder / RUN
    return tuple(
        (node, shlex.join(command_line(launch, rank, file, python="python")))
        for rank, node in enumerate(launch.nodes())
    )


def dry_run(launch: Launch) -> str:
    """A script: ``run.json``, and the command of every node under its name."""
    lines = [comment("once, in the folder that all nodes see"), writing(launch.spec)]
    for node, command in commands(launch):
        lines += [comment(f"on {node.name}: {', '.join(node.devices)}"), command]
    return "\n".join(lines)


def writing(spec: RunSpec) -> str:
    """The shell commands that write ``run.json``; no line of JSON can be the one that ends it."""
    folder, file = (shlex.quote(str(path)) for path in (spec.folder, spec.folder / RUN))
    return f"mkdir -p {folder}\ncat > {file} <<'END'\n{dumps_run_spec(spec)}END"


def comment(text: str) -> str:
    """A line of a script that says something, whatever a file has for names: what follows it is not part of it.

    >>> comment("gpt\\nrm -r /")
    '# gpt rm -r /'
    """
    return f"# {' '.join(text.split())}"


def slurm_script(launch: Launch) -> str:
    """A batch script with one task per node; SLURM's own list of hosts stands in for the plan's names, in order."""
    nodes = launch.nodes()
    most = max(len(node.devices) for node in nodes)
    counts = " ".join(str(len(node.devices)) for node in nodes)
    on_each = f"""
devices=($devices_text)
python -m torch.distributed.run --nproc-per-node "${{devices[$SLURM_NODEID]}}" \\
  --nnodes {len(nodes)} --node-rank "$SLURM_NODEID" \\
  --master-addr "$address" --master-port {launch.port or DEFAULT_PORT} \\
  -m argosy.runtime.worker {shlex.quote(str(launch.spec.folder / RUN))}
"""
    return f"""#!/bin/bash
#SBATCH --job-name=argosy-{re.sub(r"[^A-Za-z0-9._-]+", "-", launch.plan.model.name)}
#SBATCH --nodes={len(nodes)}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={most}
#SBATCH --output={shlex.quote(f"{launch.spec.folder}/slurm-%j.out")}
{comment("The plan's nodes, in this order: " + ", ".join(node.name for node in nodes))}
set -euo pipefail
{writing(launch.spec)}
devices=({counts})
export devices_text="${{devices[*]}}"
address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export address
srun --kill-on-bad-exit=1 bash -c {shlex.quote(on_each)}
"""


def check_port(launch: Launch, node_rank: int) -> None:
    """Raise an ``InputError`` where rank 0's port is taken, before anything is started."""
    if node_rank != 0 or launch.port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", launch.port))
        except OSError as error:
            problem = Problem(path="--port", found=f"{launch.port} ({error.strerror})", expected="a free port")
            raise InputError([problem]) from None
