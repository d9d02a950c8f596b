"""``argosy export``: a plan for another system."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.options import ClusterSource, PlanSource


class Target(StrEnum):
    """Systems that plans can be written for."""

    SAILOR = "sailor"


def export(
    plan: PlanSource,
    to: Annotated[Target, typer.Option("--to", help="The system that the plan is for.", show_default=False)],
    cluster: ClusterSource = None,
    zone: Annotated[str | None, typer.Option("--zone", help="Sailor: the zone that all devices are in.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it here instead of to stdout.")] = None,
) -> None:
    """A plan for another system.

    Prints the plan in the form of the target. Whatever the target cannot express is refused, all of it at once, with
    its place in the plan and the reason. Sailor: uneven shares, recomputation, ZeRO, schedules other than 1f1b.

    \b
    Examples:
        argosy export plan.json --to sailor -o plan_config.json
    """
    from argosy.cli.terminal import write_file
    from argosy.cluster.file import cluster_from_content, load_cluster
    from argosy.export.sailor import ZONE, dumps_sailor
    from argosy.plan.file import plan_from_document, read_plan

    found = plan_from_document(read_plan(plan))
    where = cluster_from_content(found.cluster.content) if cluster is None else load_cluster(cluster)
    match to:
        case Target.SAILOR:
            text = dumps_sailor(found, where, zone=zone or ZONE)
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_file(output, text.encode())
