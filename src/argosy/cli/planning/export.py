"""Run ``argosy export``: write a plan for another system."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.command import takes_options
from argosy.cli.inputs import model_of
from argosy.cli.options import ClusterSource, Json, PlanSource
from argosy.cli.terminal import STDOUT, check_output, print_json, write_file
from argosy.cluster.file import cluster_from_content, load_cluster
from argosy.exporters.systems import System
from argosy.plan.file import plan_from_document, read_plan

if TYPE_CHECKING:
    from argosy.exporters.form import Export


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The options that ``argosy export`` takes."""

    plan: PlanSource
    to: Annotated[
        System,
        typer.Option(
            "--to", metavar="SYSTEM", help="The system that the plan is for.", show_default=False
        ),
    ]
    cluster: ClusterSource = None
    lossy: Annotated[
        bool,
        typer.Option("--lossy", help="Write what can be said, and list on stderr what is lost."),
    ] = False
    zone: Annotated[
        str | None, typer.Option("--zone", help="Sailor: the zone that all devices are in.")
    ] = None
    program: Annotated[
        str | None,
        typer.Option(
            "--program",
            metavar="FILE.py:build",
            help="torchrun, jobset, kubeflow, skypilot: what to start.",
        ),
    ] = None
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="The same: steps to train (100).")
    ] = None
    image: Annotated[
        str | None,
        typer.Option(
            "--image", help="jobset, kubeflow: a container image with Argosy, torch, the program."
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A file, or a folder where there are several, instead of stdout (-).",
        ),
    ] = None
    json: Json = False


@takes_options
def export(options: ExportRequest) -> None:
    """Write a plan for another system.

    Writes the plan in the form of the target: torchtitan (a recipe module, schedule CSV), megatron
    (a script with its flags), deepspeed (JSON, a pipeline module), flagscale (YAML of heterogeneous
    meshes), torch (a module for torch.distributed.pipelining, schedule CSV), sailor (JSON); and for
    argosy's own runtime torchrun (a script), jobset (Kubernetes), kubeflow (a TrainJob), skypilot
    (YAML). Everything that the target cannot express is reported at once, with its place in the
    plan and the reason. With --lossy it is listed and omitted, unless the target has nothing
    similar. A plan made with argosy plan --for TARGET is always accepted.

    \b
    Examples:
        argosy export plan.json --to megatron -o megatron.sh
        argosy export plan.json --to torchtitan -o job/
    """
    to_stdout = options.output is None or options.output == STDOUT
    if options.output == STDOUT:
        check_output(options.output, json=options.json)
    exported = _exported(options)
    for problem in exported.lost:
        sys.stderr.write(f"lost: {problem}\n")
    if not to_stdout:
        _write(exported, options)
    if options.json:
        lost = [
            {"path": problem.path, "found": problem.found, "expected": problem.expected}
            for problem in exported.lost
        ]
        print_json("export", {"target": options.to, "files": dict(exported.files), "lost": lost})
    elif to_stdout:
        for name, text in exported.files:
            typer.echo(f"# ---- {name}\n{text}" if len(exported.files) > 1 else text, nl=False)
    else:
        names = ", ".join(name for name, _ in exported.files)
        typer.echo(f"wrote {options.output}" + (f": {names}" if len(exported.files) > 1 else ""))


def _exported(options: ExportRequest) -> Export:
    """Return the files of the target system."""
    from argosy.exporters.write import ExportOptions, export_plan

    document = read_plan(options.plan)
    plan = plan_from_document(document)
    cluster = (
        cluster_from_content(plan.cluster.content)
        if options.cluster is None
        else load_cluster(options.cluster)
    )
    needs_model = not options.to.starts_argosy and options.to is not System.SAILOR
    export_options = ExportOptions(
        lossy=options.lossy,
        model=model_of(plan, document) if needs_model else None,
        zone=options.zone,
        plan_file=options.plan,
        program=options.program,
        steps=options.steps,
        image=options.image,
    )
    return export_plan(plan, cluster, options.to, export_options)


def _write(exported: Export, options: ExportRequest) -> None:
    """Write one file, or several into a folder."""
    assert options.output is not None
    if len(exported.files) > 1:
        for name, text in exported.files:
            write_file(options.output / name, text.encode(), make_folder=True)
        return
    check_output(options.output, options.plan, options.cluster)
    for _, text in exported.files:
        write_file(options.output, text.encode())
