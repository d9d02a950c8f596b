"""Compute the mesh's part of the force on devices, (1) of ``mesh``, in slabs.

Clouds use Triton kernels on a GPU. Slabs are those of ``mesh.Slab``, held by the devices of the
ranks; ranks exchange data through their hosts. A single rank transforms its whole mesh at once.
Transforms are in float32, as on a CPU. Points are positions in cells of the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from argosy.nbody.force.cloud import UNIT
from argosy.nbody.force.mesh import MeshShape, frequencies, green
from argosy.nbody.ranks import Alone, Ranks


def mesh_on_device(
    positions: Tensor,
    shape: MeshShape,
    ranks: Ranks | None = None,
    planes: Sequence[int] | None = None,
) -> Tensor:
    """Return the smooth force of unit masses at this rank's ``positions`` on each other.

    By default there is one rank.
    """
    slab = DeviceSlab(
        shape, ranks or Alone(), (0, shape.cells) if planes is None else planes, positions.device
    )
    points = positions * (shape.cells / shape.box)
    owner = slab.owner_of(points)
    inbox = slab.exchange([points[owner == rank] for rank in range(slab.ranks.size)])
    held = torch.cat(inbox)
    modes = slab.forward(slab.density(held))
    modes *= slab.green()
    fields = slab.with_ghosts(torch.stack(slab.slopes(modes), dim=1)).transpose(0, 1).contiguous()
    force = _interpolate(held, fields, shape, slab.first)
    back = slab.exchange(list(torch.split(force, [len(part) for part in inbox])))
    result = torch.empty_like(positions)
    for rank, part in enumerate(back):
        result[owner == rank] = part
    return result


class DeviceSlab:
    """A rank's planes of the mesh, which are on its device."""

    def __init__(
        self, shape: MeshShape, ranks: Ranks, planes: Sequence[int], device: torch.device
    ) -> None:
        self.shape, self.ranks, self.device = shape, ranks, device
        self.planes = torch.tensor(list(planes), device=device)
        self.edges = list(planes)
        self.first, self.last = self.edges[ranks.rank], self.edges[ranks.rank + 1]
        self.ghosts = shape.cloud.order - 1

    def exchange(self, parts: list[Tensor]) -> list[Tensor]:
        """Send ``parts[r]`` to rank r through the hosts; return what every rank sent here."""
        if self.ranks.size == 1:
            return parts
        received = self.ranks.exchange([part.contiguous().cpu().numpy() for part in parts])
        return [torch.from_numpy(np.array(part)).to(self.device) for part in received]

    def owner_of(self, points: Tensor) -> Tensor:
        """Return the rank in whose slab each particle's cloud begins."""
        base, _ = _cloud(points[:, :1], self.shape.cloud.order)
        plane = torch.remainder(base[:, 0], self.shape.cells)
        return torch.searchsorted(self.planes, plane, right=True) - 1

    def _planes_above(self, rank: int) -> list[int]:
        """Return the planes above a rank's slab that its clouds reach into."""
        begin, end = self.edges[rank], self.edges[rank + 1]
        return (
            [(end + number) % self.shape.cells for number in range(self.ghosts)]
            if end > begin
            else []
        )

    def density(self, points: Tensor) -> Tensor:
        """Return the particles per cell on the own planes."""
        count = self.last - self.first
        mass = _deposit(points, self.shape, self.first, count + self.ghosts if count else 0)
        above = self._planes_above(self.ranks.rank)
        sent = []
        for rank in range(self.ranks.size):
            mine = [
                n
                for n, plane in enumerate(above)
                if self.edges[rank] <= plane < self.edges[rank + 1]
            ]
            sent.append(mass[[count + n for n in mine]] if mine else mass[:0])
        for rank, part in enumerate(self.exchange(sent)):
            planes = [
                plane for plane in self._planes_above(rank) if self.first <= plane < self.last
            ]
            for plane, row in zip(planes, part, strict=True):
                mass[plane - self.first] += row
        return (mass[:count].double() / float(UNIT)).float()

    def with_ghosts(self, field: Tensor) -> Tensor:
        """Return a field, whose first dim is x, with the planes above it."""
        sent = []
        for rank in range(self.ranks.size):
            mine = [
                plane - self.first
                for plane in self._planes_above(rank)
                if self.first <= plane < self.last
            ]
            sent.append(field[mine] if mine else field[:0])
        received = [iter(part) for part in self.exchange(sent)]
        above = []
        for plane in self._planes_above(self.ranks.rank):
            holder = next(
                r for r in range(self.ranks.size) if self.edges[r] <= plane < self.edges[r + 1]
            )
            above.append(next(received[holder]))
        return torch.cat([field, torch.stack(above)]) if above else field

    def forward(self, density: Tensor) -> Tensor:
        """Return the modes of the density: x is whole, and y has the own columns."""
        modes: Tensor
        if self.ranks.size == 1:
            modes = torch.fft.rfftn(density)
            return modes
        modes = (
            torch.fft.fft(torch.fft.rfft(density, dim=2), dim=1)
            if len(density)
            else self._nothing()
        )
        modes = self._turn(list(torch.split(modes, self._sizes(), dim=1)), dim=0)
        modes = torch.fft.fft(modes, dim=0) if modes.numel() else modes
        return modes

    def slopes(self, modes: Tensor) -> list[Tensor]:
        """Return the slopes of -phi along x, y and z on the own planes, with modes of phi."""
        cells = self.shape.cells
        if self.ranks.size == 1:
            return [
                torch.fft.irfftn(modes * self._slope(axis), s=(cells, cells, cells))
                for axis in range(3)
            ]
        turned = self._turned_back(modes)
        parts = [self._turned_back(modes * self._slope(0))]
        parts += [turned * self._slope(axis) for axis in (1, 2)]
        if not turned.numel():
            return [torch.zeros((0, cells, cells), device=self.device)] * 3
        return [torch.fft.irfft(torch.fft.ifft(part, dim=1), n=cells, dim=2) for part in parts]

    def _turned_back(self, modes: Tensor) -> Tensor:
        """Return modes after the inverse transform over x, with the own planes and a whole y."""
        modes = torch.fft.ifft(modes, dim=0) if modes.numel() else modes
        return self._turn(list(torch.split(modes, self._sizes(), dim=0)), dim=1)

    def _sizes(self) -> list[int]:
        """Return the number of planes of each rank."""
        return [end - begin for begin, end in zip(self.edges[:-1], self.edges[1:], strict=True)]

    def _nothing(self) -> Tensor:
        """Return the modes of an empty slab."""
        cells = self.shape.cells
        return torch.zeros((0, cells, cells // 2 + 1), dtype=torch.complex64, device=self.device)

    def _turn(self, parts: list[Tensor], dim: int) -> Tensor:
        """Exchange blocks, and join those received along a dim."""
        own, tail = self.last - self.first, self.shape.cells // 2 + 1
        blocks = []
        for size, block in zip(
            self._sizes(), self.exchange([part.reshape(-1) for part in parts]), strict=True
        ):
            blocks.append(block.reshape((size, own, tail) if dim == 0 else (own, size, tail)))
        return torch.cat(blocks, dim=dim)

    def green(self) -> Tensor:
        """Return ``mesh.green`` for the own columns, on the device."""
        return _green_on(self.device, self.shape, self.first, self.last)

    def _slope(self, axis: int) -> Tensor:
        """Return -i k along a whole axis, shaped to multiply modes."""
        cells = self.shape.cells
        k = frequencies(cells, self.shape.box)[axis == 2].copy()
        if cells % 2 == 0:
            k[cells // 2] = 0
        shape = [1, 1, 1]
        shape[axis] = len(k)
        return torch.from_numpy((-1j * k).astype(np.complex64)).to(self.device).reshape(shape)


def _deposit(points: Tensor, shape: MeshShape, first: int, planes: int) -> Tensor:
    """Return the mass on planes from ``first`` on, in integers of 1 / UNIT particles.

    The sum of integers does not depend on their order.
    """
    cells, order = shape.cells, shape.cloud.order
    mass = torch.zeros((planes, cells, cells), dtype=torch.int64, device=points.device)
    if points.is_cuda:
        from argosy.nbody.gpu.kernels import deposit_on_device

        deposit_on_device(points, mass, order, UNIT, first)
        return mass
    flat = mass.reshape(-1)
    for place, weight in _rows(points, shape, first):
        flat.index_add_(0, place.flatten(), torch.round(weight * UNIT).to(torch.int64).flatten())
    return mass


def _interpolate(points: Tensor, fields: Tensor, shape: MeshShape, first: int) -> Tensor:
    """Return the fields at every point, over its cloud."""
    if points.is_cuda:
        from argosy.nbody.gpu.kernels import interpolate_on_device

        return interpolate_on_device(points, fields, shape.cloud.order, first)
    force = torch.zeros_like(points)
    flat = fields.reshape(3, -1)
    for place, weight in _rows(points, shape, first):
        for axis in range(3):
            force[:, axis] += (flat[axis][place] * weight).sum(dim=1)
    return force


@lru_cache(maxsize=1)
def _green_on(device: torch.device, shape: MeshShape, first: int, last: int) -> Tensor:
    """Copy ``mesh.green`` to a device once."""
    return torch.tensor(
        green(shape.cells, shape.box, shape.scale, shape.cloud, first, last), device=device
    )


def _rows(points: Tensor, shape: MeshShape, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield cells and weights of every particle's cloud, one row of cells along z at a time."""
    cells, order = shape.cells, shape.cloud.order
    base, weights = _cloud(points, order)
    steps = torch.arange(order, device=base.device)
    planes = torch.remainder(base[:, :1], cells) - first + steps
    index = [planes, *(torch.remainder(base[:, d, None] + steps, cells) for d in (1, 2))]
    for a in range(order):
        for b in range(order):
            place = ((index[0][:, a] * cells + index[1][:, b]) * cells)[:, None] + index[2]
            yield place, (weights[0][:, a] * weights[1][:, b])[:, None] * weights[2]


def _cloud(x: Tensor, order: int) -> tuple[Tensor, list[Tensor]]:
    """Return the first cell and the weights per dim, as in ``cloud``."""
    base = torch.floor(x + 0.5) if order == 3 else torch.floor(x)
    f = x - base
    g = 1 - f
    if order == 2:
        parts = [g, f]
    elif order == 3:
        parts = [0.5 * (0.5 - f) ** 2, 0.75 - f * f, 0.5 * (0.5 + f) ** 2]
    else:
        inner = [(4 - 6 * s * s + 3 * s * s * s) / 6 for s in (f, g)]
        parts = [g * g * g / 6, *inner, f * f * f / 6]
    weights = torch.stack(parts, dim=-1)
    return base.to(torch.int64) - int(order > 2), [weights[:, d] for d in range(x.shape[1])]
