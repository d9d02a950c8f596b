"""Train data-parallel on unequal devices: every device holds the model and takes a part of the
batch.

Source: the baselines of HAP (Zhang et al., EuroSys'24; arXiv 2401.05965).

    (1)  DP-EV   the same number of samples for every device
    (2)  DP-CP   samples in proportion to the devices' speed, measured on the model itself; rounded
                 down, the rest to the largest fractions
    (3)  sharded (1) with ZeRO 3 (Rajbhandari et al., SC'20), as "fully sharded" data parallelism
                 does

Gradients are summed once per iteration; the batch is cut into the number of micro-batches that is
fastest among those that fit, with the least recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from argosy.baselines.assemble import Groups, assemble, fastest_fitting, shared_by, shared_evenly
from argosy.baselines.job import NoPlan, PlanningJob
from argosy.plan.plan import Plan
from argosy.units import counted


def even_batches(job: PlanningJob) -> Plan | NoPlan:
    """Return the fastest plan with equal numbers of samples (1)."""
    return _fastest(job, lambda size: shared_evenly(size, len(job.devices)))


def proportional_batches(job: PlanningJob) -> Plan | NoPlan:
    """Return the fastest plan with samples proportional to speed (2)."""
    speeds = [1 / job.pace(name) for name in job.devices]
    return _fastest(job, lambda size: shared_by(speeds, size))


def sharded(job: PlanningJob) -> Plan | NoPlan:
    """Return the fastest plan with equal numbers of samples and ZeRO 3 (3)."""
    return _fastest(job, lambda size: shared_evenly(size, len(job.devices)), zero=3)


def _fastest(
    job: PlanningJob, share: Callable[[int], tuple[int, ...]], *, zero: int = 0
) -> Plan | NoPlan:
    if job.global_batch < len(job.devices):
        return NoPlan(
            reason=f"{counted(job.global_batch, 'sample')}, too few for {len(job.devices)} devices"
        )
    return fastest_fitting(job, _plans(job, share, zero))


def _plans(job: PlanningJob, share: Callable[[int], tuple[int, ...]], zero: int) -> Iterator[Plan]:
    groups = tuple((name,) for name in job.devices)
    for size in job.batches:
        samples = share(size)
        if min(samples) > 0:
            yield assemble(
                job,
                [Groups(first=0, end=len(job.chain.layers), groups=groups, samples=samples)],
                zero=zero,
            )
