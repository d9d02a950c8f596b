"""Run ``argosy export``: write a plan for another system."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.options import ClusterSource, Json, PlanSource
from argosy.exporters.systems import System


def export(
    plan: PlanSource,
    to: Annotated[
        System,
        typer.Option(
            "--to", metavar="SYSTEM", help="The system that the plan is for.", show_default=False
        ),
    ],
    cluster: ClusterSource = None,
    lossy: Annotated[
        bool,
        typer.Option("--lossy", help="Write what can be said, and list on stderr what is lost."),
    ] = False,
    zone: Annotated[
        str | None, typer.Option("--zone", help="Sailor: the zone that all devices are in.")
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(
            "--program", metavar="FILE.py:build", help="torchrun, jobset, skypilot: what to start."
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="The same: steps to train (100).")
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            "--image", help="jobset: a container image with Argosy, torch and the program."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A file, or a folder where there are several, instead of stdout (-).",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a plan for another system.

    Writes the plan in the form of the target: torchtitan (a recipe module, schedule CSV), megatron
    (a script with its flags), deepspeed (JSON, a pipeline module), flagscale (YAML of heterogeneous
    meshes), torch (a module for torch.distributed.pipelining, schedule CSV), sailor (JSON); and for
    argosy's own runtime torchrun (a script), jobset (Kubernetes), skypilot (YAML). Everything that
    the target cannot express is reported at once, with its place in the plan and the reason. With
    --lossy it is listed and omitted, unless the target has nothing similar. A plan made with argosy
    plan --for TARGET is always accepted.

    \b
    Examples:
        argosy export plan.json --to megatron -o megatron.sh
        argosy export plan.json --to torchtitan -o job/
    """
    import sys

    from argosy.cli.inputs import model_of
    from argosy.cli.terminal import STDOUT, check_output, print_json, write_file
    from argosy.cluster.file import cluster_from_content, load_cluster
    from argosy.exporters.write import ExportOptions, export_plan
    from argosy.plan.file import plan_from_document, read_plan

    if output == STDOUT:
        check_output(output, json=json)
        output = None
    document = read_plan(plan)
    loaded_plan = plan_from_document(document)
    where = (
        cluster_from_content(loaded_plan.cluster.content)
        if cluster is None
        else load_cluster(cluster)
    )
    named = None if to.starts_argosy or to is System.SAILOR else model_of(loaded_plan, document)
    options = ExportOptions(
        lossy=lossy,
        model=named,
        zone=zone,
        plan_file=plan,
        program=program,
        steps=steps,
        image=image,
    )
    exported = export_plan(loaded_plan, where, to, options)
    for problem in exported.lost:
        sys.stderr.write(f"lost: {problem}\n")
    if output is not None:
        folder = len(exported.files) > 1
        if not folder:
            check_output(output, plan, cluster)
        for name, text in exported.files:
            write_file(output / name if folder else output, text.encode(), make_folder=folder)
    if json:
        lost = [
            {"path": problem.path, "found": problem.found, "expected": problem.expected}
            for problem in exported.lost
        ]
        print_json("export", {"target": str(to), "files": dict(exported.files), "lost": lost})
    elif output is not None:
        typer.echo(
            f"wrote {output}"
            + (f": {', '.join(name for name, _ in exported.files)}" if folder else "")
        )
    else:
        for name, text in exported.files:
            typer.echo(f"# ---- {name}\n{text}" if len(exported.files) > 1 else text, nl=False)
