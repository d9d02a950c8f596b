"""Plan as GPipe does: a pipeline of equal work, all forwards of a batch before the first backward.

Source: Huang et al., "GPipe: efficient training of giant neural networks using pipeline
parallelism" (NeurIPS'19): K devices in a row, layers cut so that the cells cost as nearly the same
as possible, estimated for equal devices; the batch in M micro-batches; activations recomputed in
the backward if memory requires it. With n devices there are n / K such pipelines side by side. The
best plan over all K and M is chosen in Argosy's simulator.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from argosy.baselines.assemble import Groups, assemble, fastest_fitting, shared_evenly
from argosy.baselines.job import NoPlan, PlanningJob
from argosy.plan.plan import Plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.solve.search.chain import cut_chain


def gpipe_plan(job: PlanningJob) -> Plan | NoPlan:
    """Return the fastest plan that fits."""
    return fastest_fitting(job, _plans(job))


def _plans(job: PlanningJob) -> Iterator[Plan]:
    times = [
        forward + backward for forward, backward in job.layer_times(job.usual, job.typical_samples)
    ]
    schedule = ScheduleSpec(kind=ScheduleKind.GPIPE)
    for stages in range(1, min(len(job.devices), len(times)) + 1):
        if len(job.devices) % stages:
            continue
        copies = len(job.devices) // stages
        ends = cut_chain(times, [1.0] * stages, allow_empty=False).ends
        cuts = itertools.pairwise((0, *ends))
        layout = [
            (first, end, tuple((name,) for name in job.devices[at * copies : (at + 1) * copies]))
            for at, (first, end) in enumerate(cuts)
        ]
        for size in job.batches:
            if size >= copies:
                samples = shared_evenly(size, copies)
                groups = [
                    Groups(first=first, end=end, groups=devices, samples=samples)
                    for first, end, devices in layout
                ]
                yield assemble(job, groups, schedule=schedule)
