"""Check everything that can be known of a run before a process is started."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.cli.planning.adapting import check_adapting
from argosy.cluster.file import cluster_from_content
from argosy.cost.remembered import cost_model_of
from argosy.document import JsonObject, check_readable
from argosy.errors import InputError, Problem, RunError, bad_input, impossible
from argosy.plan.check import check_devices
from argosy.plan.plan import Plan
from argosy.plan.runnable import unsupported

if TYPE_CHECKING:
    from argosy.runtime.job.launch import Launch
    from argosy.runtime.processes.run_spec import RunSpec


def check_launch(launch: Launch, node_rank: int, *, quiet: bool) -> None:
    """Raise ``InputError`` for everything that can be known before a process is started."""
    from argosy.lab.lab import open_lab
    from argosy.runtime.job.launch import check_port

    check_devices(launch.plan, cluster_from_content(launch.plan.cluster.content))
    sentences = unsupported(launch.plan)
    if sentences:
        hint = "argosy plan --runnable finds a plan that can be run"
        raise InputError(
            Problem(path="plan", message=sentence.removesuffix("."), suggestion=hint)
            for sentence in sentences
        )
    check_adapting(launch.plan, launch.spec, quiet=quiet)
    if node_rank >= len(launch.nodes()):
        raise bad_input(
            f"at most {len(launch.nodes()) - 1}, the plan's last node", node_rank, "--node-rank"
        )
    check_port(launch, node_rank)
    if launch.lab is not None:
        open_lab(launch.lab)


def check_init(spec: RunSpec) -> None:
    """Raise ``InputError`` if the initial weights do not exist on the node that reads them, or
    cannot be read to an end."""
    if spec.init is None:
        return
    if not Path(spec.init).exists():
        remedy = "a file of weights, or the folder of a checkpoint"
        raise impossible(f"read --init {spec.init}", "it does not exist", remedy)
    check_readable(Path(spec.init))


def check_steps(spec: RunSpec) -> None:
    """Raise ``InputError`` if a run to resume has already done all of its steps."""
    from argosy.runtime.processes.run_folder import steps_saved

    done = steps_saved(spec.folder) if spec.resume else 0
    if done >= spec.steps:
        expected = f"more than the {done} that the run has done: steps are those of the whole run"
        raise bad_input(expected, spec.steps, "--steps")


def warn_of_other_options(spec: RunSpec, file: Path) -> None:
    """Warn on stderr if a resumed run gets options that change the training.

    ``file`` is the ``run.json`` of the run that is resumed; nothing is printed if it cannot be
    read.
    """
    from argosy.runtime.processes.run_spec import read_run_spec

    if not spec.resume:
        return
    with contextlib.suppress(InputError):
        before = read_run_spec(file)
        for name in ("plan", "program", "clip", "seed"):
            old, new = before.shown(name), spec.shown(name)
            if old != new:
                option = name if name in ("plan", "program") else f"--{name}"
                sys.stderr.write(f"warning: {option}: {new}; the run that is resumed had {old}\n")


def warn_of_other_compilation(plan: Plan, spec: RunSpec) -> None:
    """Warn on stderr if a plan's times were measured on compiled layers and the run is eager, or
    the reverse."""
    kinds = {profile.compiled for profile in cost_model_of(plan, spec.profiles).profiles}
    if kinds == {not spec.compile_stages}:
        measured, change = ("eager", "without") if spec.compile_stages else ("compiled", "with")
        sys.stderr.write(
            f"warning: the plan's profiles are of {measured} layers; run it {change} --compile\n"
        )


def check_torch() -> None:
    """Raise ``RunError`` if torch is not installed."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise RunError("training needs torch; pip install 'argosy[torch]'")


def check_folder_is_new(spec: RunSpec) -> None:
    """Raise ``InputError`` if a folder has checkpoints of an earlier run.

    Only the newest two checkpoints of a folder are kept, so the runs would delete each other's.
    """
    from argosy.runtime.processes.run_folder import CHECKPOINTS, checkpoints

    saved = checkpoints(spec.folder / CHECKPOINTS)
    if saved:
        reason = f"it contains {saved[-1].name} of an earlier run"
        remedy = "another --out, or --resume to continue that run"
        raise impossible(f"start a run in {spec.folder}", reason, remedy)


def warning_line(event: JsonObject) -> str:
    """Return an event of the run's checkpoints and files as a sentence."""
    if event["event"] == "skipped":
        return f"warning: skipped {event['checkpoint']}, which is not whole: {event['why']}"
    return f"warning: {event['why']}; training goes on"
