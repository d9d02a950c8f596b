"""Run a box from initial conditions to snapshots, with restarts, on one process or several.

A run's folder holds ``run.json`` (the settings), ``snapshot_000.hdf5``, ... (one per requested
redshift, the last at the end), ``energy.csv`` and ``restart/``. A resumed run gives the same bits
as a run without the interruption.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from argosy.document import make_folder, read_json
from argosy.errors import bad_input, excluded, impossible
from argosy.nbody.files.lightcone import LightCone, LightConeSettings
from argosy.nbody.files.restart import last_restart, read_restart, write_restart
from argosy.nbody.files.snapshot import write_snapshot
from argosy.nbody.force.gravity import TreeForce, tree_force
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.motion.bullfrog import evolve_bullfrog
from argosy.nbody.motion.energy import (
    Drift,
    EnergySample,
    drift,
    read_samples,
    sample,
    write_samples,
)
from argosy.nbody.motion.evolve import (
    BlockSteps,
    LocalGravity,
    StepHooks,
    evolve,
    evolve_in_blocks,
    expansion_steps,
)
from argosy.nbody.particles import Box, Particles
from argosy.nbody.planning.balance import Balancer
from argosy.nbody.planning.placement import InitialPlacement, place_as_planned
from argosy.nbody.planning.plan_file import GravityPlan
from argosy.nbody.processes.shared import Clock, SharedGravity, measured
from argosy.nbody.ranks import Alone, Ranks, gather, total


class Integrator(StrEnum):
    """The choice of how particles are moved: by ``evolve`` or by ``bullfrog``."""

    LEAPFROG = "leapfrog"
    BULLFROG = "bullfrog"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings that determine what a run computes, but not where it runs."""

    gravity: GravitySettings
    steps: int
    end: float = 1.0
    """The expansion factor at the end."""
    snapshots: tuple[float, ...] = ()
    """Expansion factors between start and end at which a snapshot is written too."""
    restart_every: int = 16
    """Steps between restart files."""
    energy_samples: int = 32
    """How often the potential energy is computed, besides the start; 0 for never."""
    blocks: BlockSteps | None = None
    integrator: Integrator = Integrator.LEAPFROG
    light_cone: LightConeSettings | None = None

    def __post_init__(self) -> None:
        if self.integrator is Integrator.BULLFROG and self.light_cone is not None:
            raise excluded("a light cone", "the bullfrog integrator, whose drifts are not timed")
        if self.integrator is Integrator.BULLFROG and self.blocks is not None:
            raise excluded("block steps", "the bullfrog integrator, which has none")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The state that a finished run reached."""

    box: Box
    """This process's particles at the end."""
    steps: int
    """The number of all steps, including those before an interruption."""
    drift: Drift
    """The drift of energy and momentum since the run began."""


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """The progress that a run has made."""

    step: int
    steps: int
    expansion: float
    seconds: float
    """Seconds since this start."""
    left: float
    """Seconds left at the speed so far."""
    rank_seconds: tuple[float, ...]
    """Seconds of the last force, per rank."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes that take part in a run; ``Alone`` by default."""

    ranks: Ranks
    mesh_ranks: Ranks
    balance: bool = True
    clock: Clock = measured
    plan: GravityPlan | None = None
    """The plan whose devices with work the processes are, in order: their memory limits them, and
    the run begins with its domains."""


# Called with the progress after every step.
Report = Callable[[RunProgress], None]


def run_box(
    box: Box,
    folder: Path,
    settings: RunSettings,
    *,
    processes: Processes | None = None,
    device: str = "cpu",
    report: Report | None = None,
) -> RunResult:
    """Run this process's part of a box, in an empty folder or in the folder of a run to resume.

    ``device`` is the torch device on which forces are computed. If only some processes have a GPU,
    these sum pairs there.
    """
    ranks: Ranks = processes.ranks if processes else Alone()
    count = int(total(ranks, np.array([len(box.particles)]))[0])
    strength = box.cosmology.particle_gravity(box.size, count)
    steps = expansion_steps(box.expansion, settings.end, settings.steps, also=settings.snapshots)
    plan = None if processes is None else processes.plan
    begin = None if plan is None else place_as_planned(plan, count, settings.gravity.mesh_cells)
    shared = (
        None
        if processes is None or ranks.size == 1
        else _shared(processes, begin, box.size, strength, settings.gravity, device)
    )
    engine = shared or _local(box.size, strength, settings.gravity, device)
    first = _begin(folder, box, settings, count, ranks)
    if first:
        particles = read_restart(folder / "restart", ranks.rank, ranks.size)
        box = replace(box, expansion=steps[first], particles=particles)
    cone = _light_cone(settings.light_cone, box, steps, ranks, folder)
    record = _Record(
        folder=folder,
        settings=settings,
        steps=steps,
        first=first,
        engine=engine,
        ranks=ranks,
        cone=cone,
        shared=shared,
        report=report,
        samples=read_samples(folder / "energy.csv", first),
    )
    if not record.samples:
        record.measure_energy(first, box)
    final = _evolved(box, steps, engine, settings, record)
    if cone is not None:
        cone.finish(folder / "lightcone.hdf5", count)
    return RunResult(box=final, steps=len(steps) - 1, drift=drift(record.samples))


def _evolved(
    box: Box,
    steps: Sequence[float],
    engine: SharedGravity | LocalGravity,
    settings: RunSettings,
    record: _Record,
) -> Box:
    """Move a box through all steps with the integrator of the settings."""
    first, after_step = record.first, record.after_step
    on_drift = None if record.cone is None else record.cone.drifting
    if settings.blocks is not None:
        hooks = StepHooks(first=first, after_step=after_step, on_drift=on_drift)
        return evolve_in_blocks(box, steps, engine, settings.blocks, hooks)
    if settings.integrator is Integrator.BULLFROG:
        return evolve_bullfrog(box, steps, engine, first=first, after_step=after_step)
    return evolve(box, steps, engine, first=first, after_step=after_step, on_drift=on_drift)


@dataclass(kw_only=True)
class _Record:
    """The files and the progress that a run writes after its steps."""

    folder: Path
    settings: RunSettings
    steps: Sequence[float]
    first: int
    """The number of steps that were done before this start."""
    engine: SharedGravity | LocalGravity
    ranks: Ranks
    cone: LightCone | None
    shared: SharedGravity | None
    report: Report | None
    samples: list[EnergySample]
    begin: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        wanted = {*(a for a in self.settings.snapshots if a in self.steps), self.steps[-1]}
        self.snapshot_numbers = {a: number for number, a in enumerate(sorted(wanted))}
        self.num_steps = len(self.steps) - 1
        samples = self.settings.energy_samples
        # Steps between measurements of energy; 0 for none.
        self.energy_every = math.ceil(self.num_steps / samples) if samples else 0

    def measure_energy(self, done: int, now: Box) -> None:
        """Record a sample of energy and momentum, on rank 0's disk."""
        potential = self.engine.potential_energy(now.particles) if self.energy_every else math.nan
        self.samples.append(
            sample(
                now.particles, self.ranks, step=done, expansion=now.expansion, potential=potential
            )
        )
        if self.ranks.rank == 0:
            write_samples(self.folder / "energy.csv", self.samples)

    def after_step(self, done: int, now: Box) -> None:
        """Write what is due after a step: light cone, energy, snapshot, restart file, progress."""
        is_last = done == self.num_steps
        if self.cone is not None:
            self.cone.after_step(done)
        if is_last or (self.energy_every and done % self.energy_every == 0):
            self.measure_energy(done, now)
        if now.expansion in self.snapshot_numbers:
            number = self.snapshot_numbers[now.expansion]
            _write_together(self.folder / f"snapshot_{number:03d}.hdf5", now, self.ranks)
        if done % self.settings.restart_every == 0 or is_last:
            write_restart(
                self.folder / "restart",
                now.particles,
                step=done,
                rank=self.ranks.rank,
                processes=self.ranks.size,
                wait_for_all=self.ranks.barrier,
            )
        if self.report is not None:
            self.report(self._progress(done, now))

    def _progress(self, done: int, now: Box) -> RunProgress:
        """Return the progress after a step."""
        seconds = time.monotonic() - self.begin
        spent = () if self.shared is None else tuple(self.shared.seconds.sum(axis=1).tolist())
        return RunProgress(
            step=done,
            steps=self.num_steps,
            expansion=now.expansion,
            seconds=seconds,
            left=seconds / (done - self.first) * (self.num_steps - done),
            rank_seconds=spent,
        )


def _light_cone(
    settings: LightConeSettings | None, box: Box, steps: Sequence[float], ranks: Ranks, folder: Path
) -> LightCone | None:
    """Return the light cone of a run; None if none is requested."""
    if settings is None:
        return None
    if settings.redshift > 1 / steps[0] - 1:
        expected = f"at most z = {1 / steps[0] - 1:.4g}, where the run begins"
        raise bad_input(expected, settings.redshift, "--light-cone")
    return LightCone(
        settings=settings,
        box=replace(box, expansion=steps[-1]),
        ranks=ranks,
        folder=folder / "lightcone",
    )


def _shared(
    processes: Processes,
    begin: InitialPlacement | None,
    size: float,
    strength: float,
    gravity: GravitySettings,
    device: str,
) -> SharedGravity:
    """Return the engine that several processes share."""
    ranks, mesh_ranks = processes.ranks, processes.mesh_ranks
    engine: SharedGravity
    if all(np.concatenate(gather(ranks, np.array([device != "cpu"])))):
        from argosy.nbody.gpu.shared import SharedGpuGravity

        engine = SharedGpuGravity(
            size=size,
            strength=strength,
            settings=gravity,
            ranks=ranks,
            mesh_ranks=mesh_ranks,
            device=device,
        )
    else:
        engine = SharedGravity(
            size=size, strength=strength, settings=gravity, ranks=ranks, mesh_ranks=mesh_ranks
        )
        engine.sum_tree = _tree_on(device)
    engine.clock = processes.clock
    if begin is not None:
        engine.parts, engine.planes, engine.balancer = begin.parts, begin.planes, begin.balancer
    elif processes.balance:
        engine.balancer = Balancer(capacity=(float("inf"),) * processes.ranks.size)
    return engine


def _tree_on(device: str) -> Callable[..., TreeForce]:
    """Return the function that sums pairs on a device."""
    if device == "cpu":
        return tree_force
    from argosy.nbody.gpu.force import GpuTree

    return GpuTree(device)


def _local(size: float, strength: float, gravity: GravitySettings, device: str) -> LocalGravity:
    """Return the engine of a single process."""
    if device == "cpu":
        return LocalGravity(size=size, strength=strength, settings=gravity)
    from argosy.nbody.gpu.force import GpuGravity

    return GpuGravity(size=size, strength=strength, settings=gravity, device=device)


def _begin(folder: Path, box: Box, settings: RunSettings, count: int, ranks: Ranks) -> int:
    """Return the step from which to continue.

    Every rank checks the folder before rank 0 writes into it.
    """
    requested = _what_is_asked(box, settings, count) | {
        "initial": _fingerprint(box.particles, ranks)
    }
    mark = folder / "run.json"
    known = read_json(mark).data if mark.exists() else None
    if known is not None and known != requested:
        differs = ", ".join(
            sorted(key for key in {*known, *requested} if known.get(key) != requested.get(key))
        )
        reason = f"the run there has another {differs}"
        raise impossible(f"continue in {folder}", reason, "the same options, or a new folder")
    ranks.barrier()
    if known is None and ranks.rank == 0:
        make_folder(folder)
        mark.write_text(json.dumps(requested, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    ranks.barrier()
    state = last_restart(folder / "restart")
    return 0 if state is None else state[0]


def _what_is_asked(box: Box, settings: RunSettings, count: int) -> dict[str, object]:
    """Return every setting that changes the particles of a run; threads and processes do not."""
    gravity = {name: value for name, value in asdict(settings.gravity).items() if name != "threads"}
    content = {
        "version": 1,
        "box": box.size,
        "start": box.expansion,
        "particles": count,
        "cosmology": asdict(box.cosmology),
        "gravity": gravity,
        "steps": settings.steps,
        "end": settings.end,
        "snapshots": sorted(settings.snapshots),
        "blocks": None if settings.blocks is None else asdict(settings.blocks),
        "integrator": str(settings.integrator),
    }
    if settings.light_cone is not None:
        content["light_cone"] = asdict(settings.light_cone)
    return json.loads(json.dumps(content))


def _fingerprint(particles: Particles, ranks: Ranks) -> str:
    """Return a hash of the particles of all ranks.

    It does not depend on which rank holds which particle, and changes if any particle moves.
    """
    state = np.ascontiguousarray(np.concatenate([particles.positions, particles.momenta], axis=1))
    mixed = particles.ids.astype(np.uint64)
    for column in state.view(np.uint64).T:
        mixed = (mixed ^ (mixed >> np.uint64(29)) ^ column) * np.uint64(0x9E3779B97F4A7C15)
    parts = np.array([mixed.sum(dtype=np.uint64)]).view(np.int64)
    return f"{total(ranks, parts).view(np.uint64)[0]:016x}"


def _write_together(path: Path, box: Box, ranks: Ranks) -> None:
    """Write one file by rank 0, with particles in the order of their ids."""
    mine = box.particles
    to_first = [slice(None)] + [slice(0)] * (ranks.size - 1)
    positions, momenta, ids = (
        np.concatenate(ranks.exchange([values[part] for part in to_first]))
        for values in (mine.positions, mine.momenta, mine.ids)
    )
    if ranks.rank == 0:
        order = np.argsort(ids, kind="stable")
        whole = Particles(positions=positions[order], momenta=momenta[order], ids=ids[order])
        write_snapshot(path, replace(box, particles=whole), overwrite=True)
    ranks.barrier()
