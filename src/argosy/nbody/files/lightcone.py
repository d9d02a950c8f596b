"""Record particles when they cross an observer's past light cone.

Light that reaches the observer today left the comoving distance chi(a) at the expansion a,

    (1)  chi(a) = c x integral from a to 1 of da / (a^2 H).

While particles drift from a to b, chi shrinks from chi(a) to chi(b). A particle, or an image of it
in another copy of the box, crosses the cone if its distance r is below chi(a) before and not below
chi(b) after. Both move uniformly within a drift, so it crosses at the fraction

    (2)  s = (chi(a) - r(a)) / (chi(a) - r(a) + r(b) - chi(b)).

A drift begins where the previous one ended, so every crossing is found once, whichever process has
the particle. The crossings of each step are in a file of their own until the run ends; a resumed
run writes the same files again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from argosy.errors import bad_input, invalid
from argosy.nbody.compiled import compiled
from argosy.nbody.cosmology import LIGHT, Cosmology
from argosy.nbody.files.header import KPC
from argosy.nbody.files.snapshot import read_array, read_names, reading, write_header, writing
from argosy.nbody.particles import Box, Floats, Names, Particles
from argosy.nbody.ranks import Ranks

# Points per unit of ln a, between which chi is interpolated linearly: the error is at most 0.01
# Mpc/h.
_POINTS = 200
# The largest number of boxes from the observer to the farthest crossing, along an axis.
_MOST_IMAGES = 200


@dataclass(frozen=True, kw_only=True)
class LightConeSettings:
    """The part of the universe that the observer sees."""

    redshift: float
    """The largest redshift."""
    observer: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The observer's position as shares of the box."""

    def __post_init__(self) -> None:
        if not 0 < self.redshift < math.inf:
            raise bad_input("a redshift above 0", self.redshift, "--light-cone")
        if not all(0 <= part < 1 for part in self.observer):
            raise bad_input("parts of the box, at least 0 and below 1", self.observer, "--observer")


def distance(cosmology: Cosmology, a: float) -> float:
    """Return the comoving distance chi(a) in Mpc/h (1)."""
    return LIGHT * cosmology.conformal_time(a) if a < 1 else 0.0


@dataclass(kw_only=True)
class LightCone:
    """A recorder that collects the crossings of a run."""

    settings: LightConeSettings
    box: Box
    """A box whose size and cosmology are used."""
    ranks: Ranks
    folder: Path
    """The folder for the files of steps."""

    _rows: list[Floats] = field(default_factory=list)
    _ids: list[Names] = field(default_factory=list)

    def __post_init__(self) -> None:
        reach = distance(self.box.cosmology, 1 / (1 + self.settings.redshift)) / self.box.size
        if reach > _MOST_IMAGES:
            expected = f"a light cone of at most {_MOST_IMAGES} boxes"
            raise bad_input(
                expected, f"{reach:.0f} boxes to z = {self.settings.redshift:g}", "--light-cone"
            )

    def drifting(self, particles: Particles, shift: Floats, a: float, b: float) -> None:
        """Find the crossings of particles that move by ``shift`` between two expansion factors."""
        cosmology, size = self.box.cosmology, self.box.size
        if b <= 1 / (1 + self.settings.redshift) or not len(particles):
            return
        far, near = distance(cosmology, a), distance(cosmology, b)
        observer = np.array(self.settings.observer) * size
        moved = float(np.linalg.norm(shift, axis=1).max())
        most = min(far, distance(cosmology, 1 / (1 + self.settings.redshift)) + moved)
        images = _images(observer, size, near - moved, most)
        crossings = _crossings(
            particles.positions - observer, shift, images * size, most, far, near
        )
        rows = crossings[:, 0].astype(np.int64)
        images_of = crossings[:, 1].astype(np.int64)
        parts = crossings[:, 2]
        times = np.geomspace(a, b, 3 + math.ceil(_POINTS * math.log(b / a)))
        chi = np.array([distance(cosmology, float(time)) for time in times])
        expansion = np.interp(far + parts * (near - far), chi[::-1], times[::-1])
        places = (
            particles.positions[rows]
            - observer
            + images[images_of] * size
            + parts[:, None] * shift[rows]
        )
        velocities = particles.momenta[rows] / expansion[:, None] ** 1.5
        seen = expansion > 1 / (1 + self.settings.redshift)
        self._rows.append(np.concatenate([places, velocities, expansion[:, None]], axis=1)[seen])
        self._ids.append(particles.ids[rows][seen])

    def after_step(self, step: int) -> None:
        """Write the crossings of a step, by rank 0, in the order in which they happened."""
        rows = np.concatenate([np.empty((0, 7)), *self._rows])
        ids = np.concatenate([np.empty(0, np.int64), *self._ids])
        self._rows, self._ids = [], []
        to_first = [slice(None)] + [slice(0)] * (self.ranks.size - 1)
        rows, ids = (
            np.concatenate(self.ranks.exchange([values[part] for part in to_first]))
            for values in (rows, ids)
        )
        if self.ranks.rank or not len(ids):
            return
        order = np.lexsort((rows[:, 0], ids, rows[:, 6]))
        with writing(self.folder / f"step-{step:06d}.hdf5") as file:
            file["positions"], file["velocities"] = rows[order, :3], rows[order, 3:6]
            file["expansions"], file["ids"] = np.repeat(rows[order, 6:], 3, axis=1), ids[order]

    def finish(self, path: Path, count: int) -> None:
        """Write all steps into one file of GADGET's format; ``count`` is the particles of the
        run."""
        if self.ranks.rank:
            return
        parts = [_read(file) for file in sorted(self.folder.glob("step-*.hdf5"))]
        nothing = np.empty((0, 3)), np.empty((0, 3)), np.empty(0), np.empty(0, np.int64)
        places, velocities, expansions, ids = (
            np.concatenate(columns) for columns in zip(nothing, *parts, strict=True)
        )
        with writing(path) as file:
            write_header(file, self.box, rows=len(ids), particles=count)
            file["Header"].attrs["ObserverPosition"] = (
                np.array(self.settings.observer) * self.box.size * KPC
            )
            group = file.create_group("PartType1")
            group["Coordinates"], group["Velocities"] = places * KPC, velocities
            group["ParticleIDs"], group["ExpansionFactors"] = ids.astype(np.uint64), expansions


def _read(path: Path) -> tuple[Floats, Floats, Floats, Names]:
    """Read the crossings of one step."""
    with reading(path) as file:
        ids = read_names(path, file, "ids")
        places, velocities, expansions = (
            read_array(path, file, name, rows=len(ids))
            for name in ("positions", "velocities", "expansions")
        )
    if not np.isfinite(places).all():
        raise invalid(file=str(path), path="positions", expected="finite numbers")
    return places, velocities, expansions[:, 0], ids


def _images(observer: Floats, size: float, near: float, far: float) -> Floats:
    """Return the copies of the box, as offsets, that intersect a shell around the observer."""
    most = math.ceil(far / size) + 1
    line = np.arange(-most, most + 1)
    grid = np.stack(np.meshgrid(line, line, line, indexing="ij"), axis=-1).reshape(-1, 3)
    low = grid * size - observer
    high = low + size
    nearest = np.linalg.norm(np.maximum(np.maximum(low, -high), 0.0), axis=1)
    farthest = np.linalg.norm(np.maximum(np.abs(low), np.abs(high)), axis=1)
    return grid[(nearest <= far) & (farthest >= near)].astype(np.float64)


@compiled
def _crossings(
    places: Floats, shift: Floats, images: Floats, most: float, far: float, near: float
) -> Floats:
    """Return rows of (particle, image, fraction of the drift).

    Places are relative to the observer; only those closer than ``most`` before the drift count.
    """
    room = 1024
    crossings = np.empty((room, 3))
    count = 0
    for image in range(images.shape[0]):
        for p in range(places.shape[0]):
            x = places[p, 0] + images[image, 0]
            y = places[p, 1] + images[image, 1]
            z = places[p, 2] + images[image, 2]
            before = x * x + y * y + z * z
            if before >= most * most:
                continue
            x, y, z = x + shift[p, 0], y + shift[p, 1], z + shift[p, 2]
            after = x * x + y * y + z * z
            if after < near * near:
                continue
            gap, over = far - math.sqrt(before), math.sqrt(after) - near
            if count == room:
                room *= 2
                larger = np.empty((room, 3))
                larger[:count] = crossings
                crossings = larger
            crossings[count, 0], crossings[count, 1], crossings[count, 2] = (
                p,
                image,
                gap / (gap + over),
            )
            count += 1
    return crossings[:count]
