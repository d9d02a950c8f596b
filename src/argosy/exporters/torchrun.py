"""Export a plan as the torchrun commands that start it under Argosy's own runtime, one per host.

A plan that the runtime does not execute is rejected with the sentences of ``plan.runnable``;
nothing of it can be lost, because a plan that does not run as it is does not run.
"""

from __future__ import annotations

from argosy.errors import Problem
from argosy.exporters.form import Export, Limit, settle
from argosy.plan.runnable import unsupported
from argosy.runtime.job.launch import Launch
from argosy.runtime.job.launch_script import dry_run


def export_torchrun(launch: Launch) -> Export:
    """Return ``torchrun.sh``, which is run on every host."""
    sentences = unsupported(launch.plan)
    problems = (Problem(message=sentence.removesuffix(".")) for sentence in sentences)
    settle((Limit(problem=problem, final=True) for problem in problems), lossy=False)
    return Export(files=(("torchrun.sh", dry_run(launch) + "\n"),))
