"""Move particles by a leapfrog of kicks and drifts, with steps uniform in sqrt(a).

    (1)  a_n = (sqrt(a_0) + n (sqrt(a_end) - sqrt(a_0)) / steps)^2
    (2)  p += F kick(a_n, m);   x += p drift(a_n, a_n+1);   F again;   p += F kick(m, a_n+1),
         m halfway in sqrt(a).

Kicks and drifts are those of ``cosmology``: a growing wave grows as linear theory predicts, for any
step.

A step needs one force, and the forces at the end of a step are those at the beginning of the next.
They follow from the positions alone, so a run can stop after any step and continue from its
particles to the same bits.

With block steps, the force of the mesh keeps the step of (2), and the short-range force of a
particle is applied in 2^level parts of it. The level follows from its acceleration at the beginning
of the step, with eps the softening:

    (3)  dt <= sqrt(2 eta eps a^3 / |F|).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from argosy.errors import bad_input
from argosy.nbody.cosmology import Cosmology
from argosy.nbody.force.gravity import compute_forces, compute_potential, short_force, smooth_force
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.force.tasks import Flags
from argosy.nbody.particles import Box, Floats, Particles, wrapped


class ForceEngine(Protocol):
    """An object that computes forces.

    It may send particles to other processes, and returns those that are now its own.
    """

    def forces(self, particles: Particles) -> tuple[Particles, Floats]: ...

    def potential_energy(self, particles: Particles) -> float:
        """Return half the sum of the potential over all processes' particles, per mass of a
        particle.

        It is defined up to a constant.
        """
        ...


class BlockEngine(Protocol):
    """An object that computes the two parts of a force separately.

    The short-range part can be computed for some particles only.
    """

    @property
    def size(self) -> float: ...

    @property
    def settings(self) -> GravitySettings: ...

    def settle(self, particles: Particles, carried: Floats) -> tuple[Particles, Floats]:
        """Send particles, each with its row of ``carried``, to their owners; return those that are
        now own."""
        ...

    def short(self, particles: Particles, active: Flags) -> Floats:
        """Return the tree's part of the force on the ``active`` particles; other rows are
        undefined."""
        ...

    def smooth(self, particles: Particles) -> Floats:
        """Return the mesh's part of the force."""
        ...

    def most(self, value: int) -> int:
        """Return the largest value over all processes."""
        ...

    def account(self, particles: Particles) -> None:
        """End a step: balance the work by the times that it took."""
        ...


@dataclass(frozen=True, kw_only=True)
class LocalGravity:
    """An engine that computes forces within this process."""

    size: float
    """The side of the box."""
    strength: float
    """G m of a particle."""
    settings: GravitySettings

    def forces(self, particles: Particles) -> tuple[Particles, Floats]:
        return particles, compute_forces(
            particles.positions, self.size, self.strength, self.settings
        ).total

    def potential_energy(self, particles: Particles) -> float:
        return float(
            compute_potential(particles.positions, self.size, self.strength, self.settings).sum()
            / 2
        )

    def settle(self, particles: Particles, carried: Floats) -> tuple[Particles, Floats]:
        return particles, carried

    def short(self, particles: Particles, active: Flags) -> Floats:
        return short_force(particles.positions, self.size, self.strength, self.settings, active)

    def smooth(self, particles: Particles) -> Floats:
        return smooth_force(particles.positions, self.size, self.strength, self.settings)

    def most(self, value: int) -> int:
        return value

    def account(self, particles: Particles) -> None:
        return None


# Per particle, the number of times that its step is halved.
Levels = NDArray[np.int64]
# The longest step in ln a; twice that left the power at z = 2 up to 2.5 % off, in bins in which it
# is faint.
_LONGEST = 0.05
AfterStep = Callable[[int, Box], None]
"""A callback for the number of steps done and the box after them."""


OnDrift = Callable[[Particles, Floats, float, float], None]
"""A callback before particles move: the particles, their displacement, and the expansion factors
before and after."""


def expansion_steps(
    start: float, end: float, steps: int, *, also: Sequence[float] = ()
) -> tuple[float, ...]:
    """Return the expansion factors of (1), with the factors ``also`` inserted for snapshots."""
    if steps < 1:
        raise bad_input("at least 1 step", steps, "steps")
    if not 0 < start < end:
        raise bad_input(f"an end after the start at a = {start:g}", end, "end")
    uniform = (np.linspace(math.sqrt(start), math.sqrt(end), steps + 1) ** 2).tolist()
    uniform[0], uniform[-1] = start, end
    between = [
        a for a in also if start < a < end and min(abs(a / factor - 1) for factor in uniform) > 1e-9
    ]
    return tuple(sorted([*uniform, *between]))


def chosen_steps(start: float, end: float) -> int:
    """Return the number of steps of (1) whose first one is at most ``_LONGEST`` in ln a.

    The first step is the longest one relative to the expansion.
    """
    if not 0 < start < end:
        raise bad_input(f"an end after the start at a = {start:g}", end, "end")
    return math.ceil((math.sqrt(end) - math.sqrt(start)) / (_LONGEST / 2 * math.sqrt(start)))


def evolve(
    box: Box,
    steps: Sequence[float],
    engine: ForceEngine,
    *,
    first: int = 0,
    after_step: AfterStep | None = None,
    on_drift: OnDrift | None = None,
) -> Box:
    """Move a box by (2) from ``steps[first]``, its present expansion factor, to the last."""
    particles, force = engine.forces(box.particles)
    cosmology = box.cosmology
    for number in range(first, len(steps) - 1):
        a, b = steps[number], steps[number + 1]
        middle = halfway(a, b)
        momenta = particles.momenta + force * cosmology.kick(a, middle, a)
        shift = momenta * cosmology.drift(a, b, middle)
        if on_drift is not None:
            on_drift(replace(particles, momenta=momenta), shift, a, b)
        positions = wrapped(particles.positions + shift, box.size)
        particles, force = engine.forces(
            Particles(positions=positions, momenta=momenta, ids=particles.ids)
        )
        particles = replace(
            particles, momenta=particles.momenta + force * cosmology.kick(middle, b, b)
        )
        box = replace(box, expansion=b, particles=particles)
        if after_step is not None:
            after_step(number + 1, box)
    return box


def halfway(a: float, b: float) -> float:
    """Return the expansion factor halfway in sqrt(a)."""
    return ((math.sqrt(a) + math.sqrt(b)) / 2) ** 2


@dataclass(frozen=True, kw_only=True)
class BlockSteps:
    """The settings that determine how steps are divided."""

    accuracy: float = 0.025
    """The accuracy eta of (3)."""
    most_levels: int = 5


@dataclass(frozen=True, kw_only=True)
class StepHooks:
    """The step at which a run begins, and the functions that follow it."""

    first: int = 0
    after_step: AfterStep | None = None
    on_drift: OnDrift | None = None


def evolve_in_blocks(
    box: Box,
    steps: Sequence[float],
    engine: BlockEngine,
    blocks: BlockSteps,
    hooks: StepHooks | None = None,
) -> Box:
    """Move a box like ``evolve``, with the short-range force in the parts of a step that (3)
    requires."""
    if engine.settings.softening == 0:
        raise bad_input(
            "a length above 0 with block steps, whose criterion needs it", 0.0, "softening"
        )
    hooks, cosmology = hooks or StepHooks(), box.cosmology
    particles, _ = engine.settle(box.particles, np.zeros((len(box.particles), 0)))
    smooth, short = engine.smooth(particles), engine.short(particles, np.ones(len(particles), bool))
    for number in range(hooks.first, len(steps) - 1):
        a, b = steps[number], steps[number + 1]
        level = _levels(smooth + short, a, b, cosmology, engine.settings.softening, blocks)
        parts = 2 ** engine.most(int(level.max(initial=0)))
        roots = np.linspace(math.sqrt(a), math.sqrt(b), parts + 1)
        times = [a, *(roots[1:-1] ** 2).tolist(), b]
        span = parts >> level  # parts of the step from one kick of a particle to its next
        momenta = particles.momenta + smooth * cosmology.kick(a, halfway(a, b), a)
        for part in range(parts):
            momenta = momenta + short * _kicks(times, part, span, cosmology, opening=True)
            now, then = times[part], times[part + 1]
            shift = momenta * cosmology.drift(now, then, halfway(now, then))
            if hooks.on_drift is not None:
                hooks.on_drift(replace(particles, momenta=momenta), shift, now, then)
            positions = wrapped(particles.positions + shift, box.size)
            particles = Particles(positions=positions, momenta=momenta, ids=particles.ids)
            closing = _kicks(times, part + 1, span, cosmology, opening=False)
            if part == parts - 1:  # all intervals close, so particles can change their rank
                particles, closing = engine.settle(particles, closing)
                short = engine.short(particles, np.ones(len(particles), bool))
            else:
                ending = (part + 1) % span == 0
                short = np.where(ending[:, None], engine.short(particles, ending), short)
            momenta = particles.momenta + short * closing
        smooth = engine.smooth(particles)
        particles = replace(
            particles, momenta=momenta + smooth * cosmology.kick(halfway(a, b), b, b)
        )
        engine.account(particles)
        box = replace(box, expansion=b, particles=particles)
        if hooks.after_step is not None:
            hooks.after_step(number + 1, box)
    return box


def _levels(
    force: Floats, a: float, b: float, cosmology: Cosmology, softening: float, blocks: BlockSteps
) -> Levels:
    """Return the number of halvings that (3) requires."""
    strength = np.maximum(np.linalg.norm(force, axis=1), 1e-30)
    wanted = np.sqrt(2 * blocks.accuracy * softening * a**3 / strength)
    halvings = np.ceil(np.log2(cosmology.seconds_of_expansion(a, b) / wanted))
    return np.clip(halvings, 0, blocks.most_levels).astype(np.int64)


def _kicks(
    times: Sequence[float], part: int, span: Levels, cosmology: Cosmology, *, opening: bool
) -> Floats:
    """Return a column with half a kick for particles whose interval opens or closes at
    ``times[part]``.

    It is zero for the others.
    """
    kicks = np.zeros(len(span))
    for width in np.unique(span):
        if part % width == 0:
            opposite = part + int(width) if opening else part - int(width)
            early, late = sorted((times[part], times[opposite]))
            middle = halfway(early, late)
            kicks[span == width] = (
                cosmology.kick(early, middle, early)
                if opening
                else cosmology.kick(middle, late, late)
            )
    return kicks[:, None]
