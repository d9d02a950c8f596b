"""Capture a torch program, so that it can be planned like any model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from argosy.cli.names import known_name

if TYPE_CHECKING:
    from argosy.cli.inputs import Scenario
    from argosy.dtype import Dtype
    from argosy.planner import CapturedProgram
    from argosy.workload.graph import Graph

# Our names of torch's dtypes, which decide the price of matrix products.
DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp32"}


def capture_program(
    text: str, *, dtype: str | None, quiet: bool, powersgd: int = 0
) -> CapturedProgram:
    """Run a program's build without values, and capture its step."""
    from argosy.cli.terminal import needs, progress
    from argosy.planner import CapturedProgram
    from argosy.runtime.job.program import load_program, split_name
    from argosy.space.operations.calls import is_known
    from argosy.space.operations.segments import chain_of_step

    with needs("capturing a program needs torch", "torch"):
        from argosy.runtime.sources.operations import (
            divides,
            forward_of,
            group_programs,
            mixes_samples,
        )
        from argosy.workload.capture.initial import build_fake
        from argosy.workload.capture.trace import capture_fake, num_samples
    with progress(f"capturing {text}", quiet=quiet):
        fake = build_fake(load_program(text).build)
        graph, forward = capture_fake(fake, name=split_name(text)[0].stem), forward_of(fake)
    samples, mixes = num_samples(fake), mixes_samples(forward)
    if mixes is not None:
        reason = mixes.partition(", expected")[0]
        sys.stderr.write(
            f"warning: the batch is not divided, because the program mixes samples: {reason}\n"
        )
    for op in sorted({node.op for node in graph.nodes if not is_known(node.op)}):
        sys.stderr.write(f"warning: no rule knows {op}: every device of a group does it in full\n")
    return CapturedProgram(
        graph=graph,
        chain=chain_of_step(graph, samples, _dtype(graph, dtype), powersgd=powersgd),
        samples=samples,
        mixes=mixes,
        divides=lambda plan: divides(forward, plan),
        programs=lambda plan: group_programs(fake, plan),
    )


def _dtype(graph: Graph, named: str | None) -> Dtype:
    """Return the dtype of matrix products: the named one, or that of the largest parameter."""
    from argosy.dtype import Dtype

    if named is not None:
        return Dtype(known_name("--dtype", named, Dtype, "dtypes"))
    largest = max(graph.parameters, key=lambda value: graph.values[value].elements, default=None)
    own = DTYPES.get(graph.values[largest].dtype, "fp32") if largest is not None else "fp32"
    return Dtype(own)


def scenario_of_program(
    text: str, cluster: str | None, *, dtype: str | None, quiet: bool
) -> Scenario:
    """Plan a program on a cluster, and return everything that is needed to explain the plan."""
    from argosy.cli.inputs import Scenario
    from argosy.cli.terminal import progress
    from argosy.cluster.file import load_cluster
    from argosy.cost.compute import ComputeModel
    from argosy.errors import bad_input
    from argosy.planner import find_plan

    if cluster is None:
        raise bad_input(
            "a cluster file or a bundled name, because a program names none", where="--cluster"
        )
    where = load_cluster(cluster)
    program = capture_program(text, dtype=dtype, quiet=quiet).on(where)
    with progress(f"planning {program.chain.name} for {where!r}", quiet=quiet):
        plan = find_plan(program, where)
    return Scenario(plan=plan, chain=program.chain, cluster=where, model=ComputeModel())
