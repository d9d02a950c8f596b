"""A plan whose stages are alike as a grid of ranks, and the hosts that they are on.

Megatron-LM, torchtitan and DeepSpeed number ranks the same way, the pipeline outermost and tensors innermost:

    (1)  rank = ((pipeline D + data) C + context) T + tensor

so a plan's devices in that order are the ranks, if every host has ranks that follow one another.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from argosy.export.form import Limit, limit
from argosy.plan.plan import Plan
from argosy.runtime.launch import comment

PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host and the numbers of its devices, in the order of their ranks."""

    name: str
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How many of everything; all groups alike."""

    pipeline: int
    """Workers: stages, or under an interleaved schedule those that one round of chunks has."""
    chunks: int
    data: int
    context: int
    tensor: int
    expert: int
    samples: int
    """Of a micro-batch, per replica."""
    hosts: tuple[Host, ...]


def grid_of(plan: Plan) -> Grid:
    """The grid of a plan whose stages are alike (``form.stages_are_alike``)."""
    first = plan.stages[0]
    chunks = plan.schedule.stages_per_worker
    return Grid(
        pipeline=len(plan.stages) // chunks,
        chunks=chunks,
        data=len(first.replicas),
        context=first.context,
        tensor=first.replicas[0].width // first.context,
        expert=first.expert,
        samples=plan.micro_batch_size // len(first.replicas),
        hosts=hosts_of(plan),
    )


def hosts_of(plan: Plan) -> tuple[Host, ...]:
    """The hosts by rank; one whose ranks do not follow one another stands where its first rank is."""
    numbers: dict[str, list[int]] = {}
    for name in plan.devices:
        node, _, number = name.rpartition(".")
        numbers.setdefault(node, []).append(int(number))
    return tuple(Host(name=node, devices=tuple(found)) for node, found in numbers.items())


def hosts_are_whole(plan: Plan, target: str, *, ascending: bool = False) -> Iterator[Limit]:
    """Every host's ranks follow one another; ``ascending``: and its devices are in the order of their numbers."""
    nodes = [node for node, _ in groupby(name.rpartition(".")[0] for name in plan.devices)]
    for node in dict.fromkeys(nodes):
        if nodes.count(node) > 1:
            expected = f"devices whose ranks follow one another: {target} numbers ranks host by host"
            yield limit("stages", f"{node} in {nodes.count(node)} places", expected)
    for host in hosts_of(plan) if ascending else ():
        if list(host.devices) != sorted(host.devices):
            found = f"{host.name}: {','.join(map(str, host.devices))}"
            yield limit("stages", found, f"a host's devices in the order of their numbers, as {target} takes them")


def torchrun_lines(hosts: Sequence[Host], program: str) -> Iterator[str]:
    """One command per host; ``program`` is what follows torchrun's own options, as it stands in a shell."""
    for rank, host in enumerate(hosts):
        options = ["--nnodes", str(len(hosts)), "--node-rank", str(rank), "--nproc-per-node", str(len(host.devices))]
        options += ["--master-addr", hosts[0].name, "--master-port", str(PORT)]
        visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, host.devices))}"
        yield comment(f"on {host.name}")
        yield f"{visible} torchrun {shlex.join(options)} {program}"
