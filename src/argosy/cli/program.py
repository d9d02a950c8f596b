"""``argosy plan --program`` and ``argosy explain FILE.py:build``: a torch program shared by a cluster."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, NamedTuple

from argosy.cli.names import known_name

if TYPE_CHECKING:
    from pathlib import Path

    from argosy.cluster.topology import Cluster
    from argosy.dtype import Dtype
    from argosy.graph_planner import GraphPlan
    from argosy.workload.capture.forward import Forward
    from argosy.workload.graph import Graph

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp32"}


class Shared(NamedTuple):
    """A program, and how a cluster shares it."""

    found: GraphPlan
    cluster: Cluster
    dtype: Dtype
    forward: Forward
    samples: int


def share_program(text: str, cluster: str, *, dtype: str | None, level: int, quiet: bool) -> Shared:
    """Capture a program and find the cheapest way to share its step; what no rule knows is warned of."""
    from argosy.cli.terminal import needs, progress
    from argosy.cluster.file import load_cluster
    from argosy.errors import bad_input
    from argosy.graph_planner import find_graph_plan
    from argosy.report.graph_plan import without_rule
    from argosy.runtime.program import load_program, split_name

    where, name = load_cluster(cluster), split_name(text)[0].stem
    with needs("capturing a program needs torch", "torch"):
        from argosy.runtime.operations import forward_of, mixes_samples
        from argosy.workload.capture.initial import build_fake
        from argosy.workload.capture.trace import capture_fake, num_samples, with_samples
    with progress(f"capturing {text}", quiet=quiet):
        fake = build_fake(load_program(text).build)
        graph, forward = capture_fake(fake, name=name), forward_of(fake)
    samples = num_samples(fake)
    whole = mixes_samples(forward)
    if whole is not None:
        reason = whole.partition(", expected")[0]
        sys.stderr.write(f"warning: the batch is not divided, because the program mixes samples: {reason}\n")

    def step(count: int) -> Graph:
        if count != samples and whole is not None:
            raise bad_input(f"{samples} samples at once, because the program mixes them", count, where="samples")
        return graph if count == samples else capture_fake(with_samples(fake, count), name=name)

    with progress(f"sharing {len(graph.nodes):,} operations between {len(where.devices)} devices", quiet=quiet):
        products = _dtype(graph, dtype)
        found = find_graph_plan(step, samples, where, products, level=level)
    for op in found.unknown:
        sys.stderr.write(f"warning: {without_rule(op)}\n")
    return Shared(found, where, products, forward, samples)


def write_plan(shared: Shared, output: Path) -> None:
    """What was found as a plan file; stages that mix samples are not divided by them."""
    from argosy.cli.terminal import write_file
    from argosy.graph_plan import as_plan
    from argosy.plan.file import dumps_plan
    from argosy.runtime.operations import divides

    found, cluster, dtype, forward, samples = shared
    plan = as_plan(found, cluster, dtype, samples)
    if not divides(forward, plan):
        plan = as_plan(found, cluster, dtype, samples, divided=False)
    write_file(output, dumps_plan(plan).encode())


def _dtype(graph: Graph, named: str | None) -> Dtype:
    """The number format of matrix products: as named, or that of the largest parameter."""
    from argosy.dtype import Dtype

    if named is not None:
        return Dtype(known_name("--dtype", named, Dtype, "dtypes"))
    largest = max(graph.parameters, key=lambda value: graph.values[value].elements, default=None)
    own = DTYPES.get(graph.values[largest].dtype, "fp32") if largest is not None else "fp32"
    return Dtype(own)


def plan_program(
    text: str,
    cluster: str,
    *,
    dtype: str | None,
    level: int,
    width: int | None,
    json: bool,
    quiet: bool,
    output: Path | None,
) -> None:
    """Print the program or the pipeline of programs that was found, and write it as a plan where asked to."""
    from argosy.cli.terminal import STDOUT, check_output, print_json, stdout_console
    from argosy.report.graph_plan import graph_plan_title, graph_plan_to_dict, pipeline_table
    from argosy.report.program import collective_table, parameter_table, segment_lines, share_table

    if output is not None:
        check_output(output, cluster, text.partition(":")[0], json=json)
    shared = share_program(text, cluster, dtype=dtype, level=level, quiet=quiet)
    found, where = shared.found, shared.cluster
    if output is not None:
        write_plan(shared, output)
    if json:
        print_json("plan", graph_plan_to_dict(found))
        return
    console = stdout_console(width, beside=output)
    console.print(f"{graph_plan_title(found, where)}\n")
    if found.is_pipeline:
        assert found.pipeline is not None
        console.print(pipeline_table(found.pipeline, where))
        for number, stage in enumerate(found.pipeline.stages):
            console.print(f"\nstage {number}", style="bold")
            for table in (collective_table(stage.program), parameter_table(stage.program, most=6)):
                if table.rows:
                    console.print(table)
    else:
        assert found.program is not None
        console.print(share_table(found.program, where))
        for line in segment_lines(found.program):
            console.print(line, soft_wrap=True)
        for table in (collective_table(found.program), parameter_table(found.program)):
            if table.rows:
                console.print()
                console.print(table)
    if output is not None and output != STDOUT:
        console.print(f"\nrun it: argosy run {shlex.quote(str(output))} {shlex.quote(text)}", soft_wrap=True)
    as_asked = f" --dtype {dtype}" if dtype is not None else ""
    console.print(
        f"\nwhy: argosy explain {shlex.quote(text)} --cluster {shlex.quote(cluster)}{as_asked}", soft_wrap=True
    )


def explain_program(
    text: str, cluster: str | None, *, dtype: str | None, width: int | None, json: bool, quiet: bool
) -> None:
    """Print where the largest parameters are and what any other place would cost, and which pipelines were tried."""
    from argosy.cli.terminal import print_json, progress, stdout_console
    from argosy.errors import bad_input
    from argosy.report.graph_plan import attempt_table, graph_plan_title, graph_plan_to_dict, pipeline_table
    from argosy.report.program import collective_table, reason_table, share_table
    from argosy.solve.placement import Pricing

    if cluster is None:
        raise bad_input("a cluster file or a bundled name, because a program names none", where="--cluster")
    found, where = share_program(text, cluster, dtype=dtype, level=1, quiet=quiet)[:2]
    if json:
        print_json("explain", graph_plan_to_dict(found))
        return
    console = stdout_console(width)
    console.print(f"{graph_plan_title(found, where)}\n")
    if found.is_pipeline:
        assert found.pipeline is not None
        console.print(pipeline_table(found.pipeline, where))
        programs = [(stage.program, stage.pricing) for stage in found.pipeline.stages]
    else:
        assert found.program is not None
        console.print(share_table(found.program, where))
        programs = [(found.program, Pricing(group=found.program.group))]
    for number, (program, pricing) in enumerate(programs):
        with progress("asking what other placements would cost", quiet=quiet):
            reasons = reason_table(program, pricing, most=6 if len(programs) == 1 else 2)
        console.print(f"\nstage {number}" if len(programs) > 1 else "")
        collectives = collective_table(program)
        if collectives.rows:
            console.print(collectives)
        console.print("\nthe largest parameters, and the best program with each of them placed otherwise", style="dim")
        console.print(reasons)
    if found.attempts:
        console.print("\npipelines that were looked at, by their estimate", style="dim")
        console.print(attempt_table(found))
