"""The mesh's part of the force on a device: (1) of ``mesh``, with Triton kernels for clouds where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from argosy.nbody.cloud import UNIT
from argosy.nbody.mesh import frequencies, green
from argosy.nbody.settings import Cloud, GravitySettings


def mesh_on_device(positions: Tensor, box: float, scale: float, settings: GravitySettings) -> Tensor:
    """The smooth force of unit masses at ``positions`` on each other."""
    cells, order = settings.mesh_cells, settings.cloud.order
    mass = _deposit(positions, box, cells, order)
    modes = torch.fft.rfftn(mass.reshape(cells, cells, cells) / float(UNIT))
    del mass
    modes *= _green_on(modes.device, cells, box, scale, settings.cloud)
    fields = torch.empty((3, cells, cells, cells), dtype=positions.dtype, device=positions.device)
    for axis in range(3):
        k = frequencies(cells, box)[axis == 2].copy()
        if cells % 2 == 0:
            k[cells // 2] = 0
        shape = [1, 1, 1]
        shape[axis] = len(k)
        slope = torch.from_numpy(-1j * k).to(modes.device).reshape(shape)
        fields[axis] = torch.fft.irfftn(modes * slope, s=(cells, cells, cells))
    return _interpolate(positions, fields, box, cells, order)


def _deposit(positions: Tensor, box: float, cells: int, order: int) -> Tensor:
    """Particles per cell in integers of 1 / UNIT, whose sum has no order."""
    if positions.is_cuda:
        from argosy.nbody.gpu_kernels import deposit_on_device

        return deposit_on_device(positions, box, cells, order, UNIT)
    mass = torch.zeros(cells**3, dtype=torch.int64, device=positions.device)
    for place, weight in _rows(positions, box, cells, order):
        mass.index_add_(0, place.flatten(), torch.round(weight * UNIT).to(torch.int64).flatten())
    return mass


def _interpolate(positions: Tensor, fields: Tensor, box: float, cells: int, order: int) -> Tensor:
    if positions.is_cuda:
        from argosy.nbody.gpu_kernels import interpolate_on_device

        return interpolate_on_device(positions, fields, box, cells, order)
    force = torch.zeros_like(positions)
    flat = fields.reshape(3, -1)
    for place, weight in _rows(positions, box, cells, order):
        for axis in range(3):
            force[:, axis] += (flat[axis][place] * weight).sum(dim=1)
    return force


@lru_cache(maxsize=1)
def _green_on(device: torch.device, cells: int, box: float, scale: float, cloud: Cloud) -> Tensor:
    return torch.tensor(green(cells, box, scale, cloud, 0, cells).astype(np.float64), device=device)


def _rows(positions: Tensor, box: float, cells: int, order: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cells and weights of every particle's cloud, one row of cells along z at a time."""
    base, weights = _cloud(positions * (cells / box), order)
    index = [torch.remainder(base[:, d, None] + torch.arange(order, device=base.device), cells) for d in range(3)]
    for a in range(order):
        for b in range(order):
            place = ((index[0][:, a] * cells + index[1][:, b]) * cells)[:, None] + index[2]
            yield place, (weights[0][:, a] * weights[1][:, b])[:, None] * weights[2]


def _cloud(x: Tensor, order: int) -> tuple[Tensor, list[Tensor]]:
    """The first cell and the weights per dim, as in ``cloud``."""
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
    return base.to(torch.int64) - int(order > 2), [weights[:, d] for d in range(3)]
