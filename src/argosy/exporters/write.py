"""Write a plan for a system that is given by name, for ``argosy export`` and ``argosy.export``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from argosy.errors import bad_input, refused
from argosy.exporters.form import Export
from argosy.exporters.systems import System
from argosy.plan.check import check_devices
from argosy.plan.model import planned_chain
from argosy.workload.load import load_architecture

if TYPE_CHECKING:
    from argosy.cluster.topology import Cluster
    from argosy.plan.plan import Plan

_PROGRAM = "train.py:build"
"""The program that a run starts unless another is named."""
# Steps of a run unless a number is given.
_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options that an export may have beside its plan."""

    lossy: bool = False
    """If set, parts that the target cannot express are reported and omitted instead of rejected."""
    model: str | None = None
    """The location of the model, if it differs from the name in the plan."""
    zone: str | None = None
    """For sailor: the zone of all devices."""
    plan_file: str = "plan.json"
    """For torchrun, jobset, kubeflow and skypilot: the plan that their processes read."""
    program: str | None = None
    """For the same: the program that they start; by default ``train.py:build``."""
    steps: int | None = None
    """For the same: steps to train; by default 100."""
    image: str | None = None
    """For jobset and kubeflow: a container image with Argosy, torch and the program."""


def export_plan(plan: Plan, cluster: Cluster, to: System, options: ExportOptions) -> Export:
    """Write a plan for a system; raise ``InputError`` with everything that it cannot express."""
    _check_options(to, options)
    check_devices(plan, cluster)
    if to.starts_argosy:
        return _for_argosy(plan, to, options)
    _check_known_model(plan)
    if to is System.SAILOR:
        from argosy.exporters.sailor import ZONE, dumps_sailor

        return Export(
            files=(("plan_config.json", dumps_sailor(plan, cluster, zone=options.zone or ZONE)),)
        )
    if options.model is not None:
        plan = replace(plan, model=replace(plan.model, name=options.model))
    return _for_target(plan, cluster, to, lossy=options.lossy)


def _check_options(to: System, options: ExportOptions) -> None:
    """Raise ``InputError`` for an option that does not apply to the system."""
    unused: dict[str, object] = {} if to is System.SAILOR else {"--zone": options.zone}
    if not to.needs_image:
        unused["--image"] = options.image
    if not to.starts_argosy:
        unused |= {"--program": options.program, "--steps": options.steps}
    for option, value in unused.items():
        if value is not None:
            raise refused(f"{option} does not apply to {to}")


def _check_known_model(plan: Plan) -> None:
    """Raise ``InputError`` for a captured program, frozen weights or PowerSGD.

    Other systems do not train these.
    """
    if plan.model.content:
        expected = (
            "a model that the target knows; for a captured program use --to torchrun, or argosy run"
        )
        raise bad_input(expected, "the layers of a program", "model.content")
    if not plan.model.tuning.is_full:
        expected = (
            "a plan that trains all weights, as the targets do; for frozen ones use argosy run"
        )
        raise bad_input(expected, str(plan.model.tuning), "model.tuning")
    if plan.model.powersgd:
        expected = (
            "a plan that sums gradients as they are, as the targets do; for PowerSGD use argosy run"
        )
        raise bad_input(expected, plan.model.powersgd, "model.powersgd")


def _for_target(plan: Plan, cluster: Cluster, to: System, *, lossy: bool) -> Export:
    """Write a plan for a system that runs it by its own runtime."""
    chain = planned_chain(plan.model)
    match to:
        case System.DEEPSPEED:
            from argosy.exporters.deepspeed import export_deepspeed

            return export_deepspeed(plan, chain, lossy=lossy)
        case System.TORCH:
            from argosy.exporters.torch import export_torch

            return export_torch(plan, chain, lossy=lossy)
        case System.TORCHTITAN:
            from argosy.exporters.torchtitan import export_torchtitan

            return export_torchtitan(plan, chain, load_architecture(plan.model.name), lossy=lossy)
        case System.MEGATRON:
            from argosy.exporters.megatron import export_megatron

            return export_megatron(plan, chain, load_architecture(plan.model.name), lossy=lossy)
        case _:
            from argosy.exporters.flagscale import export_flagscale

            assert to is System.FLAGSCALE, "every system has a case"
            return export_flagscale(
                plan, chain, load_architecture(plan.model.name), cluster, lossy=lossy
            )


def _for_argosy(plan: Plan, to: System, options: ExportOptions) -> Export:
    """Write a plan for a system that starts Argosy's own runtime."""
    from argosy.exporters.jobset import export_jobset, export_kubeflow
    from argosy.exporters.skypilot import export_skypilot
    from argosy.exporters.torchrun import export_torchrun
    from argosy.runtime.job.launch import Launch
    from argosy.runtime.processes.run_spec import RunSpec

    program, steps = options.program or _PROGRAM, _STEPS if options.steps is None else options.steps
    spec = RunSpec(plan=options.plan_file, program=program, out="run", steps=steps)
    launch = Launch(plan=plan, spec=spec)
    if to is System.TORCHRUN:
        return export_torchrun(launch)
    if to is System.SKYPILOT:
        return export_skypilot(launch)
    if options.image is None:
        raise refused(f"--to {to} needs --image, a container with Argosy, torch and the program")
    export = export_jobset if to is System.JOBSET else export_kubeflow
    return export(launch, image=options.image)
