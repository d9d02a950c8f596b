"""Run ``argosy run``: start a plan's processes, follow them, and report the results."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.command import given, takes_options
from argosy.cli.inputs import costs_of_run, refuse_options
from argosy.cli.options import (
    Clip,
    Json,
    LostAfter,
    Patience,
    PlanSource,
    Profiles,
    Quiet,
    Width,
    no_nan,
)
from argosy.cli.running.processes import POLL
from argosy.cli.running.run_checks import (
    check_folder_is_new,
    check_init,
    check_launch,
    check_steps,
    check_torch,
    warn_of_other_compilation,
    warn_of_other_options,
    warning_line,
)
from argosy.cli.running.run_figures import figures_of, show_figures
from argosy.cli.terminal import (
    check_output,
    no_stdout,
    print_json,
    say_written,
    stdout_console,
    write_file,
)
from argosy.document import Document, JsonObject, make_folder
from argosy.errors import RunError, excluded
from argosy.plan.file import plan_from_document, read_plan
from argosy.plan.plan import Plan
from argosy.units import TIME

if TYPE_CHECKING:
    from argosy.runtime.job.launch import Launch
    from argosy.runtime.processes.run_spec import RunSpec


ProgramName = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:build", help="A Python file and its function.", show_default=False
    ),
]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options that ``argosy run`` takes."""

    plan: PlanSource
    program: ProgramName
    steps: Annotated[
        int, typer.Option("--steps", "-n", min=1, help="Of the whole run, also with --resume.")
    ] = 10
    out: Annotated[
        Path, typer.Option("--out", help="Folder for progress, checkpoints and the timeline.")
    ] = Path("run")
    save_every: Annotated[
        int, typer.Option("--save-every", min=0, help="Steps; always after the last one.")
    ] = 0
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")
    ] = False
    init: Annotated[
        Path | None, typer.Option("--init", help="Weights to begin with: a checkpoint or a file.")
    ] = None
    clip: Clip = None
    seed: Annotated[int, typer.Option("--seed", help="Of the initial values.")] = 0
    compile_stages: Annotated[
        bool, typer.Option("--compile", help="Have torch.compile make one graph of each stage.")
    ] = False
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", min=0, help="This node; else by its name.")
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            "--address", help="Where node 0 is reached; with --elastic, where this node is."
        ),
    ] = None
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="On which port of it.")
    ] = None
    patience: Patience = 600.0
    any_device: Annotated[
        bool, typer.Option("--any-device", help="Run also where the hardware is not the plan's.")
    ] = False
    here: Annotated[
        bool, typer.Option("--here", help="All of the plan's nodes on this machine.")
    ] = False
    lab: Annotated[str | None, typer.Option("--lab", help="On the hosts of a lab that is up.")] = (
        None
    )
    adapt: Annotated[
        str,
        typer.Option(
            "--adapt", help="How far the run may adapt: off, k, shares or full.", show_default=True
        ),
    ] = "off"
    horizon: Annotated[
        int,
        typer.Option(
            "--horizon", min=1, help="Steps over which a move must pay, at most those left."
        ),
    ] = 1000
    min_gain: Annotated[
        float,
        typer.Option(
            "--min-gain", min=0, max=1, help="Least gain that is worth a change.", callback=no_nan
        ),
    ] = 0.02
    profile: Profiles = None
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port", min=0, max=65535, help="Figures for Prometheus on loopback."
        ),
    ] = None
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Go on when nodes are lost, and when they come.")
    ] = False
    node: Annotated[
        str | None, typer.Option("--node", help="With --elastic: this node's name.")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help=(
                "Where the model's costs are, to predict and plan again; else by its name in the "
                "plan."
            ),
        ),
    ] = None
    copy_every: Annotated[
        int,
        typer.Option(
            "--copy-every", min=0, help="Steps between copies in other nodes' memory; 0: none."
        ),
    ] = 1
    lost_after: LostAfter = 10.0
    island: Annotated[
        int | None,
        typer.Option("--island", min=0, help="Of an island plan: start only this island."),
    ] = None
    meeting: Annotated[
        str | None,
        typer.Option(
            "--meeting",
            metavar="HOST:PORT",
            help="With --island: where islands meet; island 0 serves it.",
        ),
    ] = None
    max_sync_every: Annotated[
        int,
        typer.Option(
            "--max-sync-every", min=1, help="Of an island plan with --adapt full: most steps apart."
        ),
    ] = 500
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts",
            min=0,
            help="Of an island plan: times that a lost island is started again.",
        ),
    ] = 3
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print a script for every node, and stop.")
    ] = False
    slurm: Annotated[
        Path | None,
        typer.Option("--slurm", help="Write a batch script for SLURM (- is stdout), and stop."),
    ] = None
    width: Width = None
    json: Json = False
    quiet: Quiet = False

    def common_spec(self) -> RunSpec:
        """Return what runs with and without islands have in common."""
        from argosy.adapt.controller import AdaptationLevel
        from argosy.runtime.processes.run_spec import RunSpec

        return RunSpec(
            plan=self.plan,
            program=self.program,
            out=str(self.out),
            steps=self.steps,
            save_every=self.save_every,
            resume=self.resume,
            init=None if self.init is None else str(self.init),
            clip=self.clip,
            seed=self.seed,
            patience=self.patience,
            any_device=self.any_device,
            adapt=AdaptationLevel(self.adapt),
            lost_after=self.lost_after,
        )


@takes_options
def run(options: RunOptions) -> None:
    """Train a program by a plan, and measure.

    The file defines build() -> (model, loss_fn, batch), with loss_fn(model, batch) a mean; it may
    define optimizer(parameters), scheduler(optimizer), data(step) or a DataLoader data, and
    callbacks. With several nodes, run the same on each: which it is follows from the host names in
    the cluster file, or from --node-rank.

    \b
    Examples:
        argosy run plan.json train.py:build --steps 100
        argosy run plan.json train.py --dry-run
        argosy run plan.json train.py --slurm job.sh
        argosy run plan.json train.py --adapt full --metrics-port 9400
        argosy run plan.json train.py --elastic --here --copy-every 5
        argosy run plan.json train.py --elastic --node v1 \\
            --out /shared/run --adapt k
        argosy run islands.json train.py --steps 1000
        argosy run islands.json train.py --island 1 --meeting x0:29600
    """
    from argosy.cli.planning.adapting import check_reach
    from argosy.cli.running.islands_run import run_islands
    from argosy.runtime.job.program import check_program

    no_stdout(options.out, "a folder", option="--out")
    check_program(options.program)
    check_reach(options.adapt)
    document = read_plan(options.plan)
    if document.data.get("kind") == "islands":
        run_islands(document, options)
        return
    launch, node_rank = _launch(document, options)
    if options.slurm is not None:
        _write_slurm_script(launch, options.slurm, options)
    elif options.dry_run:
        _print_commands(launch, json=options.json)
    else:
        _train(launch, node_rank, options)


def _launch(document: Document, options: RunOptions) -> tuple[Launch, int]:
    """Return the launch of a plan, and the rank of this node; raise ``InputError``."""
    from argosy.runtime.job.launch import Launch

    for_islands = given(options, "island", "meeting")
    refuse_options(for_islands, "does not apply to a plan without islands")
    plan = plan_from_document(document)
    spec = replace(
        options.common_spec(),
        compile_stages=options.compile_stages,
        model=costs_of_run(plan, document, options.model, needed=options.adapt != "off"),
        horizon=options.horizon,
        min_gain=options.min_gain,
        profiles=tuple(options.profile or ()),
        metrics_port=options.metrics_port,
        copy_every=options.copy_every,
    )
    launch = Launch(
        plan=plan,
        spec=spec,
        here=options.here,
        lab=options.lab,
        address=options.address,
        port=options.port,
    )
    node_rank = options.node_rank
    if node_rank is None:
        starts_nothing = options.dry_run or options.slurm is not None
        node_rank = 0 if starts_nothing or options.elastic else launch.own_rank()
    check_launch(launch, node_rank, quiet=options.quiet)
    if not options.quiet:
        warn_of_other_compilation(plan, spec)
    if options.slurm is not None and options.dry_run:
        raise excluded("--dry-run", "--slurm")
    if options.elastic:
        conflicting = given(options, "metrics_port", "lab", "slurm", "dry_run")
        refuse_options(conflicting, "cannot be combined with --elastic")
    return launch, node_rank


def _write_slurm_script(launch: Launch, file: Path, options: RunOptions) -> None:
    """Write the batch script of ``--slurm``."""
    from argosy.runtime.job.slurm import slurm_script

    program = options.program.partition(":")[0]
    check_output(file, options.plan, program, json=options.json, option="--slurm")
    write_file(file, slurm_script(launch).encode())
    if options.json:
        print_json("run", {"file": str(file)})
    else:
        say_written(f"wrote {file}; submit it with: sbatch {shlex.quote(str(file))}", file)


def _print_commands(launch: Launch, *, json: bool) -> None:
    """Print a script for every node."""
    from argosy.runtime.job.launch import commands
    from argosy.runtime.job.launch_script import dry_run
    from argosy.runtime.processes.run_spec import RUN, run_spec_to_dict

    if not json:
        typer.echo(dry_run(launch))
        return
    listed = [
        {"node": node.name, "devices": node.devices, "command": text}
        for node, text in commands(launch)
    ]
    spec = launch.spec
    run_file = str(spec.folder / RUN)
    print_json("run", {"commands": listed, "run": run_spec_to_dict(spec), "run_file": run_file})


def _train(launch: Launch, node_rank: int, options: RunOptions) -> None:
    """Train, and print the figures of the run."""
    from argosy.cli.running.elastic import follow_elastic

    plan, quiet = launch.plan, options.quiet
    check_init(launch.spec)
    check_steps(launch.spec)
    check_torch()
    if options.elastic:
        lines = follow_elastic(
            launch, options.node, show=lambda line: _progress_line(line, plan), quiet=quiet
        )
    else:
        lines = _follow(launch, node_rank, quiet=quiet, is_new=not options.resume)
    figures = figures_of(plan, lines, options.out)
    if options.json:
        print_json("run", figures)
    else:
        show_figures(stdout_console(options.width), plan, figures)


def start_here(
    launch: Launch, *, quiet: bool, environment: Mapping[str, str] | None = None
) -> JsonObject:
    """Run a plan with all its processes on this machine or in a lab on it; return its figures."""
    check_launch(launch, 0, quiet=quiet)
    return figures_of(
        launch.plan, _follow(launch, 0, quiet=quiet, environment=environment), launch.spec.folder
    )


def _follow(
    launch: Launch,
    node_rank: int,
    *,
    quiet: bool,
    is_new: bool = False,
    environment: Mapping[str, str] | None = None,
) -> list[JsonObject]:
    """Start the processes, show progress, and return every step's figures; raise if one fails.

    If ``is_new`` is set, a folder with checkpoints of an earlier run is rejected.
    """
    from argosy.cli.running.processes import end_process, exit_at_sigterm, start_process
    from argosy.runtime.job.launch import command_line
    from argosy.runtime.processes.run_folder import held, keep_private
    from argosy.runtime.processes.run_spec import dumps_run_spec

    spec, own = launch.spec, f"-{node_rank}" if node_rank else ""
    keep_private()
    make_folder(spec.folder)
    log, spec_file = spec.folder / f"torchrun{own}.log", spec.folder / f"run{own}.json"
    with held(spec.folder, str(node_rank)) as lock:
        if is_new:
            check_folder_is_new(spec)
        if node_rank == 0:  # the folder is common to all nodes
            _clear(spec)
        warn_of_other_options(spec, spec_file)
        spec_file.write_text(dumps_run_spec(spec), encoding="utf-8")
        with log.open("a" if spec.resume else "w") as file:
            began = file.tell()
            command = command_line(launch, node_rank, spec_file)
            process = start_process(command, file, lock, environment)
            with exit_at_sigterm():
                try:
                    lines = _watch(process, launch, is_first=node_rank == 0, quiet=quiet)
                finally:
                    end_process(process)
        if process.returncode != 0:
            _fail(launch, log, began)
    return lines


def _clear(spec: RunSpec) -> None:
    """Remove what an earlier run recorded, except for the steps from which this one continues."""
    from argosy.runtime.processes.failure import clear_notes
    from argosy.runtime.processes.run_folder import TIMELINE, forget_after, steps_saved

    clear_notes(spec.folder)
    forget_after(spec.folder, steps_saved(spec.folder) if spec.resume else 0)
    if not spec.resume:
        (spec.folder / TIMELINE).unlink(missing_ok=True)


def _watch(
    process: subprocess.Popen[bytes], launch: Launch, *, is_first: bool, quiet: bool
) -> list[JsonObject]:
    """Wait until the processes end; return the steps' figures on the first node."""
    from argosy.report.decisions import event_in_a_line
    from argosy.runtime.processes.run_folder import DECISIONS, EVENTS, PROGRESS, Tail

    if not is_first:
        process.wait()
        return []
    progress, decisions = (
        Tail(launch.spec.folder / name, skip=launch.spec.resume) for name in (PROGRESS, DECISIONS)
    )
    events = Tail(launch.spec.folder / EVENTS)
    while True:
        ended = process.poll() is not None
        lines = [_progress_line(line, launch.plan) for line in progress.read()]
        lines += [event_in_a_line(line) for line in decisions.read()]
        lines += [
            warning_line(event)
            for event in events.read()
            if event["event"] in ("skipped", "not written")
        ]
        if lines and not quiet:
            sys.stderr.write("\n".join(lines) + "\n")
        if ended:
            return progress.lines
        time.sleep(POLL)


def _progress_line(line: JsonObject, plan: Plan) -> str:
    """Return the figures of a step as a line of text."""
    rate = plan.global_batch / line["seconds"]
    text = (
        f"step {line['step']}  loss {line['loss']:.6g}  {rate:.4g} samples/s  "
        f"{TIME.format(line['seconds'])}"
    )
    if plan.predicted is not None:
        text += f" (predicted {TIME.format(plan.predicted.iteration_seconds)})"
    return text + (f"  {line['schedule']}" if "schedule" in line else "")


def _fail(launch: Launch, log: Path, began: int) -> None:
    """Raise the error of a failed run.

    ``began`` is the offset of its output in the log, after that of the run which it resumes.
    """
    from argosy.runtime.processes.failure import verdict
    from argosy.runtime.processes.ranks import devices_by_rank

    printed = log.read_bytes()[began:].decode(errors="replace")
    sentence, exit_code = verdict(launch.spec.folder, printed, devices_by_rank(launch.plan))
    error = RunError(f"{sentence}\nall output is in {log}")
    error.exit_code = exit_code
    raise error
