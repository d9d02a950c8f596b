"""Describe a plan with equal stages as a grid of ranks, and write the script that starts them.

Megatron-LM, torchtitan and DeepSpeed number ranks in the same way, the pipeline outermost and
tensors innermost:

    (1)  rank = ((pipeline D + data) C + context) T + tensor

so a plan's devices in that order are the ranks. torchrun numbers ranks agent by agent, so a host
has one agent for every run of consecutive ranks, and each agent sees the devices of its run only.
Scripts use the hosts, addresses, ports and interfaces that the cluster file names for its nodes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from argosy.cluster.file import cluster_from_content
from argosy.cluster.topology import Machine
from argosy.exporters.form import Limit, limit
from argosy.plan.plan import Plan
from argosy.runtime.job.launch import short_names
from argosy.runtime.job.launch_script import comment

# The default port of the first host, torchrun's own.
PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Run:
    """A host and the numbers of its devices that have consecutive ranks, in that order."""

    host: str
    """The name of the node in the cluster file."""
    machine: Machine
    """The machine of the node; one with the node's own name if the cluster file names none."""
    devices: tuple[int, ...]

    @property
    def address(self) -> str:
        """Return the address at which other hosts reach the machine."""
        return self.machine.address or self.machine.name


@dataclass(frozen=True, kw_only=True)
class ParallelGrid:
    """The degrees of parallelism that all groups of the plan share."""

    pipeline: int
    """The number of workers: stages, or under an interleaved schedule the stages of one round of
    chunks."""
    chunks: int
    data: int
    context: int
    tensor: int
    expert: int
    samples: int
    """The samples of a micro-batch per replica."""
    runs: tuple[Run, ...]


def grid_of(plan: Plan) -> ParallelGrid:
    """Return the grid of a plan whose stages are equal (``form.target_limits``)."""
    first = plan.stages[0]
    chunks = plan.schedule.stages_per_worker
    return ParallelGrid(
        pipeline=len(plan.stages) // chunks,
        chunks=chunks,
        data=len(first.replicas),
        context=first.context,
        tensor=first.replicas[0].width // first.context,
        expert=first.expert,
        samples=plan.micro_batch_size // len(first.replicas),
        runs=runs_of(plan),
    )


def runs_of(plan: Plan) -> tuple[Run, ...]:
    """Return all ranks in order, as runs on hosts."""
    machines = {
        node.name: node.machine for node in cluster_from_content(plan.cluster.content).nodes
    }
    runs = []
    for host, names in groupby(plan.devices, key=lambda name: name.rpartition(".")[0]):
        numbers = tuple(int(name.rpartition(".")[2]) for name in names)
        machine = machines.get(host) or Machine(name=host)
        runs.append(Run(host=host, machine=machine, devices=numbers))
    return tuple(runs)


def hosts_are_whole(plan: Plan, target: str) -> Iterator[Limit]:
    """Yield a limit for each host whose ranks are not consecutive."""
    hosts = [run.host for run in runs_of(plan)]
    for host in dict.fromkeys(hosts):
        if hosts.count(host) > 1:
            expected = (
                f"devices whose ranks follow one another: {target} numbers ranks host by host"
            )
            yield limit("stages", f"{host} in {hosts.count(host)} places", expected, final=True)


def launch_script(
    head: str, runs: Sequence[Run], program: str, *, before: Sequence[str] = ()
) -> str:
    """Return a script that is run once on every host and starts the processes of that host.

    ``program`` is the shell text that follows torchrun's own options; ``before`` are lines in
    front.
    """
    lines = [
        "#!/usr/bin/env bash",
        head,
        comment(
            "Run this on every host. ARGOSY_HOST replaces the host's name, MASTER_ADDR the "
            "first one's address."
        ),
        "set -euo pipefail",
        'HOST="${ARGOSY_HOST:-$(hostname)}"',
        f"FIRST={shlex.quote(runs[0].address)}",
        (
            'export MASTER_ADDR="${MASTER_ADDR:-$FIRST}" '
            f'MASTER_PORT="${{MASTER_PORT:-{runs[0].machine.port or PORT}}}"'
        ),
        *before,
        "",
        "agent() {  # the rank of this agent, its number of processes, their devices",
        '  local rank="$1" processes="$2" devices="$3"',
        "  shift 3",
        f'  CUDA_VISIBLE_DEVICES="$devices" torchrun --nnodes {len(runs)} --node-rank "$rank" \\',
        (
            '    --nproc-per-node "$processes" --master-addr "$MASTER_ADDR" --master-port '
            '"$MASTER_PORT" \\'
        ),
        f"    {program}",
        "}",
        "",
    ]
    return "\n".join([*lines, *_cases(runs)]) + "\n"


def _cases(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the lines that select the agents of a host by its name."""
    machines = list(dict.fromkeys(run.machine for run in runs))
    names = [machine.name for machine in machines]
    yield 'case "$HOST" in'
    for machine in machines:
        calls = [
            f'agent {rank} {len(run.devices)} {",".join(map(str, run.devices))} "$@"'
            for rank, run in enumerate(runs)
            if run.machine == machine
        ]
        yield f"  {_pattern(machine.name, names)}) {_interface(machine)}{_together(calls)} ;;"
    known = f"is no host of the plan, which has {', '.join(names)}; set ARGOSY_HOST"
    yield f'  *) printf "%s %s\\n" "$HOST" {shlex.quote(known)} >&2; exit 2 ;;'
    yield "esac"


def _pattern(name: str, names: list[str]) -> str:
    """Return the pattern of a host's name, with and without a domain."""
    others = [shlex.quote(short) for short in short_names(names).get(name, ())]
    domains = [] if "." in name else [f"{shlex.quote(name)}.*"]
    return "|".join([shlex.quote(name), *others, *domains])


def _interface(machine: Machine) -> str:
    """Return the command that names the network interface of a machine, if the cluster file has
    one."""
    if machine.interface is None:
        return ""
    name = shlex.quote(machine.interface)
    return f"export NCCL_SOCKET_IFNAME={name} GLOO_SOCKET_IFNAME={name}; "


def _together(calls: Sequence[str]) -> str:
    """Return one call in the foreground, or several in parallel; the script fails if one of them
    does."""
    if len(calls) == 1:
        return calls[0]
    started = " ".join(f"{call} & agents+=($!);" for call in calls)
    return f'agents=(); {started} for pid in "${{agents[@]}}"; do wait "$pid"; done'
