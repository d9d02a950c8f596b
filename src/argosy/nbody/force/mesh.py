"""Compute the long-range force on a mesh: deposit, transform, Green's function, gradient,
interpolation.

A particle is a cloud over 2, 3 or 4 cells per dimension (CIC, TSC, PCS). With N cells of side L/N
and W(k) the transform of the cloud, a product of sinc^2, sinc^3 or sinc^4 (k_i L / 2N), the force
of unit masses is, mode by mode,

    (1)  F(k) = -i k phi(k),   phi(0) = 0,
         phi(k) = -4 pi exp(-k^2 r_s^2) / k^2 / W(k)^2 x density(k):

W once for the deposit, once for the interpolation. The gradient is taken in Fourier space; the
highest frequency, whose sign is not defined, has none. Depositing and interpolating with the same
cloud makes the sum of all forces zero. Slopes along y and z are taken of modes that are already
transformed over x, so three fields need two transforms over x. The remaining error is aliasing. It
is largest if particles are still near a lattice, whose waves are far stronger than the density's:
then CIC is wrong by 4 %, TSC by 0.25 %, PCS by 0.04 %, at the same number of transforms.

Ranks hold slabs: the planes ``planes[r]``, ..., ``planes[r + 1] - 1`` of x, none for a rank that
only has particles. Particles are sent to the slab in which their cloud begins, and their force is
sent back: 24 bytes each way, less than the mesh cells that they touch. A slab is transformed over z
and y, turned so that x is whole, and transformed over x.

Mass is deposited in units of 2^-40 particles as integers, whose sum does not depend on the order; a
transform along one dim does not depend on what other rows a process holds. So the force has the
same bits on any number of ranks. Transforms are in float32: their error is about 1e-6 of the force,
those of the cloud and the cut-off 1e-4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import scipy.fft
from numpy.typing import NDArray

from argosy.errors import InfeasibleError
from argosy.nbody.force.cloud import UNIT, Fields, deposit, first_planes, interpolate, wrap_sums
from argosy.nbody.force.settings import Cloud
from argosy.nbody.particles import Floats
from argosy.nbody.ranks import Alone, Array, Ranks, send_rows
from argosy.units import SIZE

# Fourier modes, and numbers of planes.
Modes = NDArray[np.complexfloating[Any, Any]]
Planes = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """A mesh that covers a box."""

    box: float
    cells: int
    """Cells per dimension."""
    scale: float
    """The split scale r_s."""
    cloud: Cloud = Cloud.PCS


def mesh_force(
    positions: Floats,
    shape: MeshShape,
    *,
    workers: int = 1,
    ranks: Ranks | None = None,
    planes: Sequence[int] | None = None,
) -> Floats:
    """Return the smooth part of the force of unit masses on each other (1).

    By default the mesh is in this process.
    """
    return _fields_at(positions, shape, (0, 1, 2), workers, ranks or Alone(), planes)


def mesh_potential(
    positions: Floats,
    shape: MeshShape,
    *,
    workers: int = 1,
    ranks: Ranks | None = None,
    planes: Sequence[int] | None = None,
) -> Floats:
    """Return phi of (1) at every particle, including that of its own cloud."""
    return _fields_at(positions, shape, (None,), workers, ranks or Alone(), planes)[:, 0]


def _fields_at(
    positions: Floats,
    shape: MeshShape,
    axes: tuple[int | None, ...],
    workers: int,
    ranks: Ranks,
    planes: Sequence[int] | None,
) -> Floats:
    """Return, per particle, the slope of -phi along each of the axes; phi itself for None."""
    box, cells, order = shape.box, shape.cells, shape.cloud.order
    slab = Slab(
        box, cells, shape.cloud, ranks, np.asarray((0, cells) if planes is None else planes)
    )
    try:
        owner = slab.owner_of(first_planes(positions, cells / box, order) % cells)
        chosen = [owner == rank for rank in range(slab.ranks.size)]
        inbox = [columns[0] for columns in send_rows(slab.ranks, (positions,), chosen)]
        held = np.concatenate(inbox)
        modes = slab.forward(slab.density(held).astype(np.float32), workers)
        modes *= green(cells, box, shape.scale, shape.cloud, slab.first, slab.last)
        fields = slab.fields(modes, axes, workers)
        values = interpolate(held, cells / box, order, slab.first, fields)
    except MemoryError:
        need = SIZE.format(4.0 * cells**3)
        raise InfeasibleError(
            f"no memory for a mesh of {cells}^3 cells: several arrays of {need} are needed; "
            "use fewer cells"
        ) from None
    ends = np.cumsum([len(part) for part in inbox])
    counts = [int(mask.sum()) for mask in chosen]
    back = slab.ranks.exchange(np.split(values, ends[:-1]), counts)
    result = np.empty((len(positions), len(axes)))
    for mask, part in zip(chosen, back, strict=True):
        result[mask] = part
    return result


class Slab:
    """A rank's planes of the mesh, and the exchanges that it takes part in."""

    def __init__(self, box: float, cells: int, cloud: Cloud, ranks: Ranks, planes: Planes) -> None:
        self.box, self.cells, self.cloud, self.ranks, self.planes = box, cells, cloud, ranks, planes
        self.first, self.last = int(planes[ranks.rank]), int(planes[ranks.rank + 1])
        self.columns = slice(self.first, self.last)
        """The columns of y that the rank has when x is whole: as many as its planes."""

    def owner_of(self, plane: Planes) -> Planes:
        """Return the rank that holds each plane."""
        return np.searchsorted(self.planes, plane, side="right") - 1

    def density(self, positions: Floats) -> Floats:
        """Return the particles per cell on the own planes."""
        ghosts = self.cloud.order - 1
        cells, count = self.cells, self.last - self.first
        mass = np.zeros((count + ghosts if count else 0, cells + ghosts, cells + ghosts), np.int64)
        deposit(positions, cells / self.box, self.cloud.order, self.first, mass)
        mass = wrap_sums(mass, ghosts)
        # Clouds reach into the planes above, which may be another rank's, or the first ones again.
        owner = self.owner_of(self.ghosts_of(self.ranks.rank))
        above = [mass[count:][owner == rank] for rank in range(self.ranks.size)]
        for rank, part in enumerate(self.ranks.exchange(above, self._shared_ghosts())):
            for plane, row in zip(self._own(self.ghosts_of(rank)), part, strict=True):
                mass[plane - self.first] += row
        return mass[:count] / float(UNIT)

    def ghosts_of(self, rank: int) -> Planes:
        """Return the planes above a rank's slab that its clouds reach into."""
        begin, end = int(self.planes[rank]), int(self.planes[rank + 1])
        above = (end + np.arange(self.cloud.order - 1)) % self.cells
        return above if end > begin else above[:0]

    def _own(self, planes: Planes) -> Planes:
        """Return those of the planes that this rank holds."""
        return planes[(self.first <= planes) & (planes < self.last)]

    def _shared_ghosts(self) -> list[int]:
        """Return how many planes of this slab each rank's clouds reach into from below."""
        return [len(self._own(self.ghosts_of(rank))) for rank in range(self.ranks.size)]

    def fields(self, modes: Modes, axes: Sequence[int | None], workers: int) -> Fields:
        """Return the slopes of -phi along the axes, phi itself for None, with modes of phi.

        The fields have the planes above the slab, and the cells beyond the end of y and z.
        """
        ghosts, cells, planes = self.cloud.order - 1, self.cells, self.last - self.first
        across = cells + ghosts
        fields = np.empty((len(axes), planes + ghosts if planes else 0, across, across), np.float32)
        turned = None
        for number, axis in enumerate(axes):
            if axis == 0:
                part = self.turned_back(self.gradient(modes, 0), workers)
            else:
                turned = self.turned_back(modes, workers) if turned is None else turned
                part = turned if axis is None else self.gradient(turned, axis)
            if planes:
                part = scipy.fft.ifft(part, axis=1, workers=workers)
                part = scipy.fft.irfft(part, n=cells, axis=2, workers=workers)
                fields[number, :planes, :cells, :cells] = part
        sent = [
            fields[:, self._own(self.ghosts_of(rank)) - self.first, :cells, :cells].swapaxes(0, 1)
            for rank in range(self.ranks.size)
        ]
        above = self.owner_of(self.ghosts_of(self.ranks.rank))
        counts = np.bincount(above, minlength=self.ranks.size).tolist()
        received = self.ranks.exchange(sent, counts)
        for rank, rows in enumerate(received):
            places = planes + np.flatnonzero(above == rank)
            fields[:, places, :cells, :cells] = rows.swapaxes(0, 1)
        fields[:, :, cells:, :cells] = fields[:, :, :ghosts, :cells]
        fields[:, :, :, cells:] = fields[:, :, :, :ghosts]
        return fields

    def gradient(self, modes: Modes, axis: int) -> Modes:
        """Return -i k times the modes, along one axis of y or z, or along a whole x."""
        k = frequencies(self.cells, self.box)[axis == 2].copy()
        if self.cells % 2 == 0:
            k[self.cells // 2] = 0
        shape = [1, 1, 1]
        shape[axis] = len(k)
        return modes * (-1j * k).astype(modes.dtype).reshape(shape)

    def forward(self, density: Fields, workers: int) -> Modes:
        """Return the modes of the density: x is whole, and y has the own columns."""
        modes = (
            scipy.fft.rfft(density, axis=2, workers=workers) if len(density) else self._nothing()
        )
        modes = scipy.fft.fft(modes, axis=1, workers=workers) if len(density) else modes
        modes = self._turn(
            [modes[:, self.planes[r] : self.planes[r + 1]] for r in range(self.ranks.size)], axis=0
        )
        return scipy.fft.fft(modes, axis=0, workers=workers) if modes.size else modes

    def turned_back(self, modes: Modes, workers: int) -> Modes:
        """Return modes after the inverse transform over x, with the own planes and a whole y."""
        modes = scipy.fft.ifft(modes, axis=0, workers=workers) if modes.size else modes
        return self._turn(
            [modes[self.planes[r] : self.planes[r + 1]] for r in range(self.ranks.size)], axis=1
        )

    def _nothing(self) -> Modes:
        """Return the modes of an empty slab."""
        return np.zeros((0, self.cells, self.cells // 2 + 1), np.complex64)

    def _turn(self, parts: list[Array], axis: int) -> Modes:
        """Exchange blocks, and join those received along an axis."""
        if self.ranks.size == 1:
            return parts[0]
        counts, own = np.diff(self.planes), self.last - self.first
        shape = (-1, own) if axis == 0 else (own, -1)
        tail = self.cells // 2 + 1
        sizes = (counts * own * tail).tolist()
        flat = self.ranks.exchange([part.reshape(-1) for part in parts], sizes)
        blocks = [
            block.reshape(*(int(counts[rank]) if size < 0 else size for size in shape), tail)
            for rank, block in enumerate(flat)
        ]
        return np.concatenate(blocks, axis=axis)


@lru_cache(maxsize=2)
def green(cells: int, box: float, scale: float, cloud: Cloud, first: int, last: int) -> Fields:
    """Return phi(k) / density(k) of (1) for the modes of a real transform in these columns of y.

    The density is in particles per cell. The result is cached, because it is the same in every
    step.
    """
    columns = slice(first, last)
    full, halved = frequencies(cells, box)
    # All but 1 / k^2 is a product of one factor per axis; the cloud's transform is squared in it.
    along, along_last = (
        np.exp(-((k * scale) ** 2)) / np.sinc(k * box / (2 * np.pi * cells)) ** (2 * cloud.order)
        for k in (full, halved)
    )
    squares = full[:, None, None] ** 2 + full[None, columns, None] ** 2 + halved[None, None, :] ** 2
    squares[squares == 0] = math.inf
    factor = along[:, None, None] * along[None, columns, None]
    factor = factor * (-4 * math.pi * (cells / box) ** 3 * along_last)
    single: Fields = np.divide(factor, squares, out=squares).astype(np.float32)
    single.setflags(write=False)
    return single


def frequencies(cells: int, box: float) -> tuple[Floats, Floats]:
    """Return the wave numbers of a full and of the halved last dim."""
    step = box / cells
    return 2 * np.pi * scipy.fft.fftfreq(cells, step), 2 * np.pi * scipy.fft.rfftfreq(cells, step)


def wave_squares(cells: int, box: float) -> Floats:
    """Return the squares of the wave numbers of all modes."""
    full, last = frequencies(cells, box)
    return full[:, None, None] ** 2 + full[None, :, None] ** 2 + last[None, None, :] ** 2
