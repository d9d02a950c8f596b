"""A plan as the torchrun commands that start it under Argosy's own runtime, one per host.

What the runtime does not execute is refused in the words of ``plan.runnable``; nothing of it can be lost, because a
plan that does not run as it is does not run.
"""

from __future__ import annotations

from argosy.errors import Problem
from argosy.export.form import Export, Limit, settle
from argosy.plan.plan import Plan
from argosy.plan.runnable import unsupported
from argosy.runtime.launch import Launch
from argosy.runtime.launch_script import dry_run
from argosy.runtime.run_spec import RunSpec


def export_torchrun(plan: Plan, *, plan_file: str, program: str, steps: int) -> Export:
    problems = (Problem(expected="a plan that the runtime executes", found=sentence) for sentence in unsupported(plan))
    settle((Limit(problem=problem, final=True) for problem in problems), lossy=False)
    launch = Launch(plan=plan, spec=RunSpec(plan=plan_file, program=program, out="run", steps=steps))
    return Export(files=(("torchrun.sh", dry_run(launch) + "\n"),))
