"""``argosy plan --program`` and ``argosy explain FILE.py:build``: a torch program shared by a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.cluster.topology import Cluster
    from argosy.dtype import Dtype
    from argosy.solve.placement import Pricing
    from argosy.solve.spmd import Program
    from argosy.workload.graph import Graph

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp32"}


def share_program(text: str, cluster: str, *, dtype: str | None, quiet: bool) -> tuple[Program, Pricing, Cluster]:
    """Capture a program and find the cheapest way to share its step."""
    from argosy.cli.terminal import progress
    from argosy.cluster.file import load_cluster
    from argosy.cost.group import device_group
    from argosy.runtime.program import load_program, split_name
    from argosy.solve.placement import Pricing
    from argosy.solve.spmd import find_program
    from argosy.workload.capture.trace import capture

    where = load_cluster(cluster)
    with progress(f"capturing {text}", quiet=quiet):
        graph = capture(load_program(text).build, name=split_name(text)[0].stem)
    group = device_group(where, [device.name for device in where.devices], _dtype(graph, dtype))
    pricing = Pricing(group=group)
    with progress(f"sharing {len(graph.nodes):,} operations between {len(group)} devices", quiet=quiet):
        return find_program(graph, pricing), pricing, where


def _dtype(graph: Graph, named: str | None) -> Dtype:
    """The number format of matrix products: as named, or that of the largest parameter."""
    from argosy.dtype import Dtype
    from argosy.errors import bad_input, closest

    known = [str(dtype) for dtype in Dtype]
    if named is not None and named not in known:
        raise bad_input(f"one of the dtypes {', '.join(known)}", named, where="dtype", suggestion=closest(named, known))
    largest = max(graph.parameters, key=lambda value: graph.values[value].elements, default=None)
    own = DTYPES.get(graph.values[largest].dtype, "fp32") if largest is not None else "fp32"
    return Dtype(named or own)


def plan_program(text: str, cluster: str, *, dtype: str | None, width: int | None, json: bool, quiet: bool) -> None:
    """Print the program that was found."""
    from argosy.cli.terminal import print_json, stdout_console
    from argosy.report.program import collective_table, parameter_table, program_title, program_to_dict, share_table

    found, _, where = share_program(text, cluster, dtype=dtype, quiet=quiet)
    if json:
        print_json("plan", {"program": program_to_dict(found)})
        return
    console = stdout_console(width)
    console.print(f"{program_title(found, where)}\n")
    for table in (share_table(found, where), collective_table(found), parameter_table(found)):
        console.print(table)
        console.print()
    console.print(f"why: argosy explain {text} --cluster {cluster}", soft_wrap=True)


def explain_program(text: str, cluster: str | None, *, width: int | None, json: bool, quiet: bool) -> None:
    """Print where the largest parameters are, and what any other place would cost."""
    from argosy.cli.terminal import print_json, progress, stdout_console
    from argosy.errors import bad_input
    from argosy.report.program import program_title, program_to_dict, reason_table, share_table

    if cluster is None:
        raise bad_input("a cluster file or a bundled name, because a program names none", where="--cluster")
    found, pricing, where = share_program(text, cluster, dtype=None, quiet=quiet)
    if json:
        print_json("explain", {"program": program_to_dict(found)})
        return
    with progress("asking what other placements would cost", quiet=quiet):
        reasons = reason_table(found, pricing)
    console = stdout_console(width)
    console.print(f"{program_title(found, where)}\n")
    console.print(share_table(found, where))
    console.print("\nthe largest parameters, and the best program with each of them placed otherwise", style="dim")
    console.print(reasons)
