"""Plan Megatron-style 3D parallelism for equal devices, tuned by trying everything.

Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
Megatron-LM" (SC'21): n = t d p devices in rank order, tensor-parallel groups of t neighbours inside
a node, d replicas next to them, p stages of equally many blocks, equal samples everywhere, 1F1B,
the optimizer state sharded among replicas. All devices count as equal, so the slowest device limits
all.

The best plan over every t, d, p and micro-batch size, with the least recomputation that fits, is
chosen in Argosy's simulator: once over all devices and, if there are several kinds, once over those
of a single kind, as users do who set old cards aside. Interleaved stages are not covered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from argosy.baselines.assemble import Groups, assemble, even_cuts, fastest_fitting, shared_evenly
from argosy.baselines.job import NoPlan, PlanningJob
from argosy.plan.plan import Plan


def even_plan(job: PlanningJob) -> Plan | NoPlan:
    """Return the best even plan on all devices."""
    return fastest_fitting(job, even_plans(job, job.nodes))


def even_on_one_kind(job: PlanningJob) -> Plan | NoPlan:
    """Return the best even plan on the devices of the best single kind."""
    if len(job.kinds) == 1:
        return NoPlan(reason="there is one kind only: the same as on all devices")
    plans = itertools.chain.from_iterable(
        even_plans(job, _of_kind(job, kind)) for kind in job.kinds
    )
    return fastest_fitting(job, plans)


def _of_kind(job: PlanningJob, kind: str) -> tuple[tuple[str, ...], ...]:
    nodes = (
        tuple(name for name in node if job.device(name).kind.name == kind) for node in job.nodes
    )
    return tuple(node for node in nodes if node)


def even_plans(job: PlanningJob, nodes: tuple[tuple[str, ...], ...]) -> Iterator[Plan]:
    """Yield every legal (t, d, p, micro-batch), without recomputation."""
    devices = tuple(itertools.chain.from_iterable(nodes))
    for tensor, stages in itertools.product(
        range(1, job.widest + 1), range(1, len(job.chain.layers) + 1)
    ):
        aligned = all(len(node) % tensor == 0 for node in nodes)
        if not aligned or len(devices) % (tensor * stages):
            continue
        replicas = len(devices) // (tensor * stages)
        for size in job.batches:
            if size % replicas == 0:
                yield _even(job, devices, tensor, stages, size)


def _even(job: PlanningJob, devices: tuple[str, ...], tensor: int, stages: int, size: int) -> Plan:
    per_stage = len(devices) // stages
    layout = [
        Groups(
            first=first,
            end=end,
            groups=tuple(
                devices[at : at + tensor]
                for at in range(stage * per_stage, (stage + 1) * per_stage, tensor)
            ),
            samples=shared_evenly(size, per_stage // tensor),
        )
        for stage, (first, end) in enumerate(even_cuts(job, stages))
    ]
    return assemble(job, layout, zero=1)
