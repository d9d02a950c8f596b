"""Capture a torch program, so that it can be planned like any model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from argosy.cli.inputs import Scenario
from argosy.cli.names import known_name
from argosy.cli.terminal import needs, progress
from argosy.cluster.file import load_cluster
from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.errors import refused

if TYPE_CHECKING:
    from argosy.planner import CapturedProgram


def capture_program(
    text: str, *, dtype: str | None, quiet: bool, powersgd: int = 0
) -> CapturedProgram:
    """Run a program's build without values, and capture its step."""
    from argosy.runtime.job.program import load_program, split_name
    from argosy.space.operations.calls import is_known

    with needs("capturing a program needs torch", "torch"):
        from argosy.runtime.sources import operations
    wanted = None if dtype is None else Dtype(known_name("--dtype", dtype, Dtype, "dtypes"))
    with progress(f"capturing {text}", quiet=quiet):
        build, name = load_program(text).build, split_name(text)[0].stem
        program = operations.capture_program(build, name=name, dtype=wanted, powersgd=powersgd)
    if program.mixes is not None:
        reason = program.mixes.partition(", expected")[0]
        sys.stderr.write(
            f"warning: the batch is not divided, because the program mixes samples: {reason}\n"
        )
    for op in sorted({node.op for node in program.graph.nodes if not is_known(node.op)}):
        sys.stderr.write(f"warning: no rule knows {op}: every device of a group does it in full\n")
    return program


def scenario_of_program(
    text: str, cluster: str | None, *, dtype: str | None, quiet: bool
) -> Scenario:
    """Plan a program on a cluster, and return everything that is needed to explain the plan."""
    from argosy.planner import find_plan

    if cluster is None:
        raise refused("a program needs --cluster with a cluster file or a bundled name")
    where = load_cluster(cluster)
    program = capture_program(text, dtype=dtype, quiet=quiet).on(where)
    with progress(f"planning {program.chain.name} for {where!r}", quiet=quiet):
        plan = find_plan(program, where)
    return Scenario(plan=plan, chain=program.chain, cluster=where, model=ComputeModel())
