"""``argosy export``: a plan for another system."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.options import ClusterSource, Json, PlanSource

if TYPE_CHECKING:
    from argosy.cluster.topology import Cluster
    from argosy.export.form import Export
    from argosy.plan.plan import Plan
    from argosy.workload.chain import Chain


class Target(StrEnum):
    """Systems that plans can be written for."""

    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"
    FLAGSCALE = "flagscale"
    TORCH = "torch"
    TORCHRUN = "torchrun"
    JOBSET = "jobset"
    SKYPILOT = "skypilot"
    SAILOR = "sailor"


def export(
    plan: PlanSource,
    to: Annotated[
        Target, typer.Option("--to", metavar="SYSTEM", help="The system that the plan is for.", show_default=False)
    ],
    cluster: ClusterSource = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Write what can be said, and list on stderr what is lost.")
    ] = False,
    zone: Annotated[str | None, typer.Option("--zone", help="Sailor: the zone that all devices are in.")] = None,
    program: Annotated[
        str, typer.Option("--program", metavar="FILE.py:build", help="torchrun, jobset, skypilot: what to start.")
    ] = "train.py:build",
    steps: Annotated[int, typer.Option("--steps", min=1, help="The same: steps to train.")] = 100,
    image: Annotated[
        str | None, typer.Option("--image", help="jobset: a container image with Argosy, torch and the program.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A file, or a folder where there are several, instead of stdout (-)."),
    ] = None,
    json: Json = False,
) -> None:
    """A plan for another system.

    Writes the plan in the form of the target: torchtitan (a recipe module, schedule CSV), megatron (a script with its
    flags), deepspeed (JSON, a pipeline module), flagscale (YAML of heterogeneous meshes), torch (a module for
    torch.distributed.pipelining, schedule CSV), sailor (JSON); and for argosy's own runtime torchrun (a script), jobset
    (Kubernetes), skypilot (YAML). Whatever the target cannot express is refused, all of it at once, with its place in
    the plan and the reason. With --lossy it is listed and left out, unless nothing comes close. A plan made with argosy
    plan --for TARGET is never refused.

    \b
    Examples:
        argosy export plan.json --to megatron -o megatron.sh
        argosy export plan.json --to torchtitan -o job/
    """
    import sys
    from dataclasses import replace

    from argosy.cli.inputs import model_of, plan_of_known_model, refuse_options
    from argosy.cli.terminal import STDOUT, check_output, print_json, write_file
    from argosy.cluster.file import cluster_from_content, load_cluster
    from argosy.plan.check import check_devices
    from argosy.plan.file import plan_from_document, read_plan

    if output == STDOUT:
        check_output(output, json=json)
        output = None
    if to is not Target.SAILOR:
        refuse_options({"--zone": zone}, f"for {to}")
    if to is not Target.JOBSET:
        refuse_options({"--image": image}, f"for {to}")
    own_runtime = to in (Target.TORCHRUN, Target.JOBSET, Target.SKYPILOT)
    document = read_plan(plan)
    found = plan_from_document(document) if own_runtime else plan_of_known_model(document)
    where = cluster_from_content(found.cluster.content) if cluster is None else load_cluster(cluster)
    check_devices(found, where)
    if not own_runtime and to is not Target.SAILOR:  # which say nothing of the model
        found = replace(found, model=replace(found.model, name=model_of(found, document) or found.model.name))
    made = _export(found, where, to, lossy=lossy, zone=zone, plan_file=plan, program=program, steps=steps, image=image)
    for problem in made.lost:
        sys.stderr.write(f"lost: {problem}\n")
    if output is not None:
        folder = len(made.files) > 1
        if not folder:
            check_output(output, plan, cluster)
        for name, text in made.files:
            write_file(output / name if folder else output, text.encode(), make_folder=folder)
    if json:
        lost = [{"path": problem.path, "found": problem.found, "expected": problem.expected} for problem in made.lost]
        print_json("export", {"target": str(to), "files": dict(made.files), "lost": lost})
    elif output is not None:
        typer.echo(f"wrote {output}" + (f": {', '.join(name for name, _ in made.files)}" if folder else ""))
    else:
        for name, text in made.files:
            typer.echo(f"# ---- {name}\n{text}" if len(made.files) > 1 else text, nl=False)


def _export(
    plan: Plan,
    cluster: Cluster,
    to: Target,
    *,
    lossy: bool,
    zone: str | None,
    plan_file: str,
    program: str,
    steps: int,
    image: str | None,
) -> Export:
    from argosy.export.form import Export
    from argosy.plan.model import planned_chain
    from argosy.workload.load import load_architecture

    def chain() -> Chain:
        return planned_chain(plan.model)

    match to:
        case Target.TORCHTITAN:
            from argosy.export.torchtitan import export_torchtitan

            return export_torchtitan(plan, chain(), load_architecture(plan.model.name), lossy=lossy)
        case Target.MEGATRON:
            from argosy.export.megatron import export_megatron

            return export_megatron(plan, chain(), load_architecture(plan.model.name), lossy=lossy)
        case Target.DEEPSPEED:
            from argosy.export.deepspeed import export_deepspeed

            return export_deepspeed(plan, chain(), lossy=lossy)
        case Target.FLAGSCALE:
            from argosy.export.flagscale import export_flagscale

            return export_flagscale(plan, chain(), load_architecture(plan.model.name), cluster, lossy=lossy)
        case Target.TORCH:
            from argosy.export.torch import export_torch

            return export_torch(plan, chain(), lossy=lossy)
        case Target.TORCHRUN:
            from argosy.export.torchrun import export_torchrun

            return export_torchrun(plan, plan_file=plan_file, program=program, steps=steps)
        case Target.JOBSET | Target.SKYPILOT:
            from argosy.errors import bad_input
            from argosy.export.jobset import export_jobset
            from argosy.export.skypilot import export_skypilot
            from argosy.runtime.launch import Launch
            from argosy.runtime.run_spec import RunSpec

            launch = Launch(plan=plan, spec=RunSpec(plan=plan_file, program=program, out="run", steps=steps))
            if to is Target.SKYPILOT:
                return export_skypilot(launch)
            if image is None:
                raise bad_input("a container image with Argosy, torch and the program", where="--image")
            return export_jobset(launch, image=image)
        case Target.SAILOR:
            from argosy.export.sailor import ZONE, dumps_sailor

            return Export(files=(("plan_config.json", dumps_sailor(plan, cluster, zone=zone or ZONE)),))
