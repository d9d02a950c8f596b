"""Move particles in few steps by BullFrog, a leapfrog that follows 2LPT exactly.

The method is that of Rampf, List and Hahn (2024). Time is the growing mode D, the velocity v =
dx/dD = p / (a^2 dD/dt). A step from D_n to D_n+1 with D in their middle is

    (1)  x += v dD/2;   v <- w v + (1 - w) A(x);   x += v dD/2,   A = F / (1.5 x 100^2 Om D),

with the force F of ``cosmology``. In Zel'dovich's approximation A = v, so any w keeps it. To second
order, with the second growth function E of

    (2)  E.. + (2 + dlnH/dlna) E. - 1.5 Om(a) E = -1.5 Om(a) D^2,
         dots over lna, E -> -3/7 D^2 early,

v has the part E' = dE/dD of the second-order field, and A at the middle the part e / D - D, with e
= E_n + E'_n dD/2:

    (3)  w = (E'_n+1 - f) / (E'_n - f),   f = e / D - D.

A step needs one force, at its middle; positions and momenta at its end follow from those at its
beginning alone, so a run can stop after any step and continue to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.integrate import solve_ivp

from argosy.nbody.cosmology import Cosmology
from argosy.nbody.motion.evolve import AfterStep, ForceEngine
from argosy.nbody.particles import Box, Floats, Particles, wrapped

# The expansion factor at which (2) begins; only matter counts then.
_EARLY = 1e-4


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The values that D, E and E' have at one expansion factor, and p / v there."""

    first: float
    second: float
    slope: float
    """The derivative E' of the second growth function."""
    momentum: float
    """The momentum p of a unit v: a^2 dD/dt."""


def growth_at(cosmology: Cosmology, times: Sequence[float]) -> list[Growth]:
    """Solve (2) once for all expansion factors of a run, in rising order."""
    begin = min(_EARLY, times[0] / 2)
    early = cosmology.growth(begin)

    def derivative(log_a: float, state: Floats) -> list[float]:
        """Return the derivative of (E, dE/dlna)."""
        a = math.exp(log_a)
        step = 1e-4
        friction = (
            2
            + math.log(cosmology.hubble_rate(a * math.exp(step)) / cosmology.hubble_rate(a)) / step
        )
        pull = 1.5 * cosmology.matter_at(a)
        return [state[1], -friction * state[1] + pull * (state[0] - cosmology.growth(a) ** 2)]

    start = [-3 / 7 * early**2, -6 / 7 * early**2]
    logs = np.log(np.asarray(times))
    span = (math.log(begin), float(logs[-1]))
    solved = solve_ivp(derivative, span, start, t_eval=logs, rtol=1e-9, atol=1e-14, method="DOP853")
    growths = []
    for a, second, per_log in zip(times, *solved.y.tolist(), strict=True):
        first, rate = cosmology.growth(a), cosmology.growth_rate(a)
        momentum = cosmology.growing_momentum(a)
        growths.append(
            Growth(first=first, second=second, slope=per_log / (rate * first), momentum=momentum)
        )
    return growths


def evolve_bullfrog(
    box: Box,
    steps: Sequence[float],
    engine: ForceEngine,
    *,
    first: int = 0,
    after_step: AfterStep | None = None,
) -> Box:
    """Move a box by (1) from ``steps[first]``, its present expansion factor, to the last."""
    growth = growth_at(box.cosmology, steps)
    gravity = 1.5 * 100.0**2 * box.cosmology.matter
    particles = box.particles
    for number in range(first, len(steps) - 1):
        now, then = growth[number], growth[number + 1]
        half, middle = (then.first - now.first) / 2, (then.first + now.first) / 2
        velocity = particles.momenta / now.momentum
        positions = wrapped(particles.positions + half * velocity, box.size)
        # An engine may send particles to other ranks with their momenta, which are velocities here.
        particles, force = engine.forces(
            Particles(positions=positions, momenta=velocity, ids=particles.ids)
        )
        weight = kick_weight(now, then)
        velocity = weight * particles.momenta + (1 - weight) / (gravity * middle) * force
        positions = wrapped(particles.positions + half * velocity, box.size)
        particles = Particles(
            positions=positions, momenta=velocity * then.momentum, ids=particles.ids
        )
        box = replace(box, expansion=steps[number + 1], particles=particles)
        if after_step is not None:
            after_step(number + 1, box)
    return box


def kick_weight(now: Growth, then: Growth) -> float:
    """Return the weight w of (3)."""
    step = then.first - now.first
    middle = (then.first + now.first) / 2
    part = (now.second + now.slope * step / 2) / middle - middle
    return (then.slope - part) / (now.slope - part)
