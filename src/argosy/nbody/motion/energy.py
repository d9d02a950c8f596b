"""Sample energy and momentum of a run, and compute their drift.

With kinetic energy K = sum of p^2 / 2 and the potential energy U of the comoving positions, both
per particle's mass, the equations of motion of ``cosmology`` give dK = -a dU (Layzer and Irvine).
So

    (1)  I = K + a U - integral of U da

is constant. U is sampled at some steps and integrated as a cubic spline. A constant in U changes I
by a constant. Samples are rows of ``energy.csv`` in the folder of the run; a resumed run appends to
them.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from scipy.interpolate import CubicSpline

from argosy.errors import invalid
from argosy.nbody.particles import Floats, Particles
from argosy.nbody.ranks import Ranks, total


@dataclass(frozen=True, kw_only=True)
class EnergySample:
    """The sums that all particles have after one step."""

    step: int
    expansion: float
    kinetic: float
    """The kinetic energy in (km/s)^2, per mass of a particle."""
    potential: float
    momentum_x: float
    momentum_y: float
    momentum_z: float
    magnitudes: float
    """The sum of the lengths of all momenta."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The drifts of energy and momentum, which should be 0."""

    energy: float | None
    """The change of (1) over the kinetic energy at the end; None for fewer than four samples."""
    momentum: float
    """The change of the sum of all momenta, over the sum of their lengths at the end."""


def sample(
    particles: Particles, ranks: Ranks, *, step: int, expansion: float, potential: float
) -> EnergySample:
    """Return the sums over all ranks; ``potential`` already is such a sum."""
    momenta = particles.momenta
    lengths: Floats = np.linalg.norm(momenta, axis=1)
    sums = total(
        ranks, np.array([*momenta.sum(axis=0), lengths.sum(), np.square(lengths).sum() / 2])
    )
    return EnergySample(
        step=step,
        expansion=expansion,
        kinetic=float(sums[4]),
        potential=potential,
        momentum_x=float(sums[0]),
        momentum_y=float(sums[1]),
        momentum_z=float(sums[2]),
        magnitudes=float(sums[3]),
    )


def drift(samples: Sequence[EnergySample]) -> Drift:
    """Return the drift from the first sample to the last."""
    first, last = samples[0], samples[-1]
    moved = math.hypot(
        last.momentum_x - first.momentum_x,
        last.momentum_y - first.momentum_y,
        last.momentum_z - first.momentum_z,
    )
    momentum = moved / max(last.magnitudes, 1e-300)
    known = [row for row in samples if math.isfinite(row.potential)]
    if len(known) < _FEWEST:
        return Drift(energy=None, momentum=momentum)
    times, potentials = [row.expansion for row in known], [row.potential for row in known]
    integral = float(CubicSpline(times, potentials).integrate(times[0], times[-1]))
    begin, end = (row.kinetic + row.expansion * row.potential for row in (known[0], known[-1]))
    return Drift(
        energy=(end - begin - integral) / max(known[-1].kinetic, 1e-300), momentum=momentum
    )


# The number of samples that a cubic spline needs.
_FEWEST = 4


def write_samples(path: Path, samples: Sequence[EnergySample]) -> None:
    """Replace the content of the file by these samples."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(
            file, [field.name for field in fields(EnergySample)], lineterminator="\n"
        )
        table.writeheader()
        table.writerows(asdict(row) for row in samples)
    partial.replace(path)


def read_samples(path: Path, last_step: int) -> list[EnergySample]:
    """Return the samples up to a step; empty if there is no file."""
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [
                EnergySample(
                    step=int(row.pop("step")), **{name: float(value) for name, value in row.items()}
                )
                for row in csv.DictReader(file)
            ]
    except (KeyError, TypeError, ValueError) as error:
        raise invalid(file=str(path), found=str(error), expected="samples of energy") from None
    return [row for row in rows if row.step <= last_step]
