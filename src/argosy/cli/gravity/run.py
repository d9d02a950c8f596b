"""Run ``argosy nbody run``: evolve a box, in this process or in several."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.command import takes_options
from argosy.cli.names import known_name
from argosy.cli.options import Json, MeshCells, Quiet
from argosy.cli.terminal import no_stdout, print_json, stdout_console
from argosy.cluster.file import load_cluster
from argosy.errors import RunError, bad_input, excluded, impossible, refused
from argosy.plan.file import read_plan
from argosy.units import TIME

if TYPE_CHECKING:
    from argosy.nbody.files.lightcone import LightConeSettings
    from argosy.nbody.force.settings import GravitySettings
    from argosy.nbody.planning.plan_file import GravityPlan
    from argosy.nbody.run import Processes, RunProgress, RunResult, RunSettings

# Seconds between lines of progress if stderr is no terminal.
_SECONDS_BETWEEN_LINES = 5.0
# The largest default number of measurements of energy.
_ENERGY_SAMPLES = 32
# The largest number of times that the criterion of block steps may halve a step.
_MOST_LEVELS = 8
# Options that the first process keeps, and those of several values, which are passed on as such.
_NOT_PASSED_ON = {"snapshot", "output", "resume", "processes", "json", "quiet"}
_NOT_PASSED_ON |= {"snapshots", "observer"}


@dataclass(frozen=True, kw_only=True)
class GravityRunOptions:
    """The options that ``argosy nbody run`` takes."""

    snapshot: Annotated[
        Path, typer.Argument(metavar="SNAPSHOT", help="Where to start.", show_default=False)
    ]
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the run.")]
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            help="Uniform in the root of the expansion factor; by default an error criterion's.",
        ),
    ] = None
    integrator: Annotated[str, typer.Option("--integrator", help="leapfrog or bullfrog.")] = (
        "leapfrog"
    )
    until: Annotated[float, typer.Option("--until", help="Redshift of the end.")] = 0.0
    snapshots: Annotated[
        list[float] | None,
        typer.Option("--snapshot", help="Redshift of one more snapshot. Repeatable.", metavar="Z"),
    ] = None
    mesh: MeshCells = None
    softening: Annotated[
        float | None,
        typer.Option("--softening", help="Mpc/h; by default 1/30 of the mean separation."),
    ] = None
    force_error: Annotated[
        float,
        typer.Option(
            "--force-error", help="Relative error of 99 % of the forces, in the worst box."
        ),
    ] = 0.003
    cloud: Annotated[
        str, typer.Option("--cloud", help="A particle on the mesh: cic, tsc or pcs.")
    ] = "pcs"
    block_levels: Annotated[
        int | None,
        typer.Option(
            "--block-levels",
            min=0,
            max=10,
            help="How often a step may be halved; by default 8, with --steps 0.",
        ),
    ] = None
    energy_samples: Annotated[
        int | None,
        typer.Option(
            "--energy-samples",
            min=0,
            help="Moments at which energy is measured; by default up to 32, on a GPU none.",
        ),
    ] = None
    light_cone: Annotated[
        float | None,
        typer.Option(
            "--light-cone",
            help="Keep particles as they cross the past light cone, from this redshift on.",
        ),
    ] = None
    observer: Annotated[
        tuple[float, float, float],
        typer.Option("--observer", help="Of the light cone: parts of the box along each axis."),
    ] = (0.0, 0.0, 0.0)
    restart_every: Annotated[
        int, typer.Option("--restart-every", min=1, help="Steps between restart files.")
    ] = 16
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = (
        False
    )
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, max=4096, help="Per process; by default all cores."),
    ] = None
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            max=4096,
            help="Start so many on this machine; by default one for each device that has work.",
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", "-c", help="Plan for this cluster, and run as argosy nbody plan says."
        ),
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="A plan of argosy nbody plan -o, which assigns devices their parts."
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            "--device", help="cpu, cuda, or auto: for each process what its device in the plan is."
        ),
    ] = "cpu"
    json: Json = False
    quiet: Quiet = False

    @cached_property
    def planned(self) -> GravityPlan | None:
        """Return the plan of ``--plan``, or one for ``--cluster``; None without both."""
        from argosy.nbody.planning.plan_file import gravity_plan_from_document

        if self.plan is not None:
            return gravity_plan_from_document(read_plan(self.plan))
        if self.cluster is None:
            return None
        from argosy.cli.gravity.commands import needs_extra

        with needs_extra():
            from argosy.nbody.files.snapshot import num_particles
            from argosy.nbody.planning.placement import plan_on
        count = num_particles(self.snapshot)
        return plan_on(load_cluster(self.cluster), count, self.mesh_cells(count))

    def measured_energies(self, steps: int) -> int:
        """Return how often energy is measured.

        A potential is computed on CPUs and costs as much as a force there, so the default beside a
        GPU is 0.
        """
        if self.energy_samples is not None:
            return self.energy_samples
        return 0 if any(self.on_gpus()) else min(_ENERGY_SAMPLES, max(steps // 4, 8))

    def on_gpus(self) -> list[bool]:
        """Return, per process or once for all, whether it computes on a GPU."""
        if self.device != "auto":
            return [self.device != "cpu"]
        from argosy.nbody.planning.pricing import is_cpu

        if self.planned is None:
            raise refused("--device auto needs --cluster or --plan, which name the devices")
        return [not is_cpu(device.kind) for device in self.planned.ranks]

    def cone(self) -> LightConeSettings | None:
        """Return the settings of the light cone; None if none is requested."""
        from argosy.nbody.files.lightcone import LightConeSettings

        if self.light_cone is None:
            return None
        return LightConeSettings(redshift=self.light_cone, observer=self.observer)

    def arguments(self) -> list[str]:
        """Return the options that are passed on to other processes, as a command line."""
        given = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in _NOT_PASSED_ON
        }
        named = [
            (f"--{name.replace('_', '-')}", value)
            for name, value in given.items()
            if value is not None
        ]
        named += [("--snapshot", redshift) for redshift in self.snapshots or ()]
        words = [text for name, value in named for text in (name, str(value))]
        return [*words, "--observer", *(str(part) for part in self.observer)]

    def mesh_cells(self, count: int) -> int:
        """Return the cells of the mesh per side.

        By default a whole number per particle of a lattice: on other meshes the lattice causes
        spurious waves.
        """
        from argosy.nbody.force.settings import accuracy_for

        if self.mesh is not None:
            return self.mesh
        side = round(count ** (1 / 3))
        return max(2, math.ceil(accuracy_for(self.force_error).least_mesh / side)) * side

    def gravity(self, box: float, count: int, processes: int) -> GravitySettings:
        """Return the settings of the force for a box."""
        from argosy.nbody.force.settings import Cloud, GravitySettings, accuracy_for

        accuracy = accuracy_for(self.force_error)
        cloud = Cloud(known_name("--cloud", self.cloud, Cloud))
        side = count ** (1 / 3)
        settings = GravitySettings(
            mesh_cells=self.mesh_cells(count),
            softening=box / side / 30 if self.softening is None else self.softening,
            split_cells=accuracy.split_cells,
            cutoff_scales=accuracy.cutoff_scales,
            tolerance=accuracy.tolerance,
            cloud=cloud,
            threads=self.threads or max((os.cpu_count() or 1) // processes, 1),
        )
        if not all(self.on_gpus()):
            return settings
        from argosy.nbody.gpu.force import for_gpu

        return for_gpu(settings)


@takes_options
def run(options: GravityRunOptions) -> None:
    """Simulate a box of particles to a later time.

    Runs on one process, on several of this machine (--processes), or on many machines under
    torchrun. A run that was killed continues with --resume, to the same bits. With --cluster or
    --plan, the processes are the devices that have work in the plan, in the order of the cluster:
    none gets more than fits into its memory; the work is first divided by the devices' speeds, then
    by measured ones. Forces are computed on the --device; if only some processes have a GPU, these
    sum pairs there, and all build their tree on CPUs.

    \b
    Examples:
        argosy nbody run ic.hdf5 -o run --steps 128 --snapshot 2 --snapshot 1
        argosy nbody run ic.hdf5 -o run --cluster two-cards
        argosy nbody run ic.hdf5 -o run --plan gravity.json
    """
    no_stdout(options.output, "a folder")
    if (options.output / "run.json").exists() and not options.resume:
        remedy = "another folder, or --resume to continue that run"
        raise impossible(f"start a run in {options.output}", "the folder contains a run", remedy)
    if options.cluster is not None and options.plan is not None:
        raise excluded("--cluster", "--plan, which has its own")
    count = _count_processes(options.processes, options.planned)
    if count > 1 and "RANK" not in os.environ:
        _start_processes(count, options)
    else:
        _evolve(options)


def _count_processes(requested: int | None, plan: GravityPlan | None) -> int:
    """Return the number of processes.

    Raises ``InputError`` unless each device that the plan gives work has one.
    """
    if plan is None:
        return requested or 1
    needed, devices = len(plan.ranks), len(plan.cluster.devices)
    started = int(os.environ.get("WORLD_SIZE", requested or needed))
    if started != needed:
        which = f"{needed} devices of {plan.cluster.name}"
        which += " that have work" if needed < devices else ""
        raise bad_input(f"one for each of the {which}", f"{started} processes", "--processes")
    return started


def _evolve(options: GravityRunOptions) -> None:
    """Evolve the box in this process, or as one of the processes that torchrun started."""
    from argosy.cli.gravity.commands import needs_extra

    with needs_extra():
        from argosy.nbody.files.snapshot import num_particles, read_snapshot
        from argosy.nbody.ranks import leave_processes
        from argosy.nbody.run import run_box
    count = num_particles(options.snapshot)
    device = _device(options)
    group = _processes(options)
    rank, size = (group.ranks.rank, group.ranks.size) if group else (0, 1)
    try:
        box = read_snapshot(options.snapshot, rank=rank, processes=size)
        settings = _settings(options, options.gravity(box.size, count, size), box.expansion)
        begin = time.monotonic()
        report = _reporter(quiet=options.quiet or rank > 0)
        final = run_box(
            box, options.output, settings, processes=group, device=device, report=report
        )
        seconds = time.monotonic() - begin
    finally:
        if size > 1:
            leave_processes()
    if rank == 0:
        _conclude(options.output, final, seconds, json=options.json)


def _settings(options: GravityRunOptions, gravity: GravitySettings, start: float) -> RunSettings:
    """Return the settings of the run.

    Without ``--steps``, the expansion determines the steps and the acceleration of each particle
    its block level.
    """
    from argosy.nbody.motion.evolve import BlockSteps, chosen_steps
    from argosy.nbody.run import Integrator, RunSettings

    integrator = Integrator(known_name("--integrator", options.integrator, Integrator))
    plain = options.steps is not None or integrator is Integrator.BULLFROG or gravity.softening == 0
    levels = (
        (0 if plain else _MOST_LEVELS) if options.block_levels is None else options.block_levels
    )
    for redshift in (options.until, *(options.snapshots or ())):
        if redshift < 0:
            raise bad_input("a redshift of at least 0", redshift, "--until or --snapshot")
    steps = chosen_steps(start, 1 / (1 + options.until)) if options.steps is None else options.steps
    return RunSettings(
        gravity=gravity,
        steps=steps,
        integrator=integrator,
        end=1 / (1 + options.until),
        snapshots=tuple(1 / (1 + redshift) for redshift in options.snapshots or ()),
        restart_every=options.restart_every,
        energy_samples=options.measured_energies(steps),
        light_cone=options.cone(),
        blocks=BlockSteps(most_levels=levels) if levels else None,
    )


def _conclude(output: Path, result: RunResult, seconds: float, *, json: bool) -> None:
    """Print the result of a run."""
    files = sorted(str(path) for path in output.glob("snapshot_*.hdf5"))
    if json:
        drift = {"momentum_drift": result.drift.momentum, "energy_drift": result.drift.energy}
        figures = {"redshift": result.box.redshift, "steps": result.steps, **drift}
        print_json("nbody run", {"files": files, **figures, "seconds": seconds})
        return
    done = f"{result.steps} steps to z = {result.box.redshift:.3g} in {seconds:.1f} s"
    energy = "not measured" if result.drift.energy is None else f"{result.drift.energy:.1e}"
    drifts = f"drift of momentum {result.drift.momentum:.1e}, of energy {energy}"
    stdout_console().print(f"{done}, {drifts}: {', '.join(files)}")


def _start_processes(count: int, options: GravityRunOptions) -> None:
    """Start this command under torchrun on this machine."""
    launch = [
        "-m",
        "argosy.runtime.processes.meeting",
        "--nproc-per-node",
        str(count),
        "-m",
        "argosy",
    ]
    flags = ["--resume"]
    flags += ["--json"] if options.json else []
    flags += ["--quiet"] if options.quiet else []
    command = ["nbody", "run", str(options.snapshot), "--output", str(options.output)]
    command += [*options.arguments(), *flags]
    done = subprocess.run([sys.executable, *launch, *command], check=False)
    if done.returncode:
        raise RunError(f"one of {count} processes failed; their messages are above")


def _device(options: GravityRunOptions) -> str:
    """Return the torch device of this process."""
    on_gpus, rank = options.on_gpus(), int(os.environ.get("RANK", "0"))
    if not on_gpus[rank % len(on_gpus)]:
        return "cpu"
    from argosy.nbody.gpu.force import usable_device

    name = "cuda" if options.device == "auto" else options.device
    return usable_device(name, int(os.environ.get("LOCAL_RANK", "0")))


def _processes(options: GravityRunOptions) -> Processes | None:
    """Join the processes that torchrun started; return None if there is only one and no plan."""
    alone, plan = int(os.environ.get("WORLD_SIZE", "1")) == 1, options.planned
    if alone and plan is None:
        return None
    from argosy.nbody.ranks import Alone, join_processes
    from argosy.nbody.run import Processes

    ranks, mesh_ranks = (Alone(), Alone()) if alone else join_processes()
    return Processes(ranks=ranks, mesh_ranks=mesh_ranks, plan=plan)


def _reporter(*, quiet: bool) -> Callable[[RunProgress], None] | None:
    """Return a function that shows progress with the time left: a bar on a terminal, else lines."""
    if quiet:
        return None
    last = [0.0]
    terminal = sys.stderr.isatty()

    def show(now: RunProgress) -> None:
        """Show the progress of the run."""
        over = now.step == now.steps
        if not over and not terminal and now.seconds - last[0] < _SECONDS_BETWEEN_LINES:
            return
        last[0] = now.seconds
        text = f"step {now.step} of {now.steps}, z = {1 / now.expansion - 1:.2f}"
        if not over:
            text += f", {TIME.format(now.left, digits=2)} left"
        if len(now.rank_seconds) > 1:
            mean = sum(now.rank_seconds) / len(now.rank_seconds)
            text += f", slowest process {max(now.rank_seconds) / mean:.2f} of the mean"
        if terminal:
            done = round(30 * now.step / now.steps)
            text = f"\r{'█' * done}{'░' * (30 - done)} {text}\x1b[K" + ("\n" if over else "")
        else:
            text += "\n"
        sys.stderr.write(text)
        sys.stderr.flush()

    return show
