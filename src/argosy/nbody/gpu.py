"""The same force on a GPU, through torch: mesh and pairs there, the tree and its walk here.

While the device transforms the mesh, this process sorts, grows the tree and lists tasks with larger leaves than a CPU
likes. The sources of a leaf are then laid out in rows of ``_ROW``, and one fused kernel (``torch.compile``; plain
operations where that cannot be had) sums over a row for every target of the leaf. Equations are those of ``split`` and
``mesh``; float32 for pairs, float64 for the mesh and for the sum over rows. Works on any torch device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from argosy.errors import bad_input
from argosy.nbody.cloud import UNIT
from argosy.nbody.evolve import LocalGravity
from argosy.nbody.gravity import Package, TreeForce, check_positions, list_packages, short_force
from argosy.nbody.hilbert import hilbert_keys
from argosy.nbody.mesh import frequencies, green
from argosy.nbody.particles import Floats, Particles
from argosy.nbody.settings import Cloud, GravitySettings
from argosy.nbody.split import ForceSplit
from argosy.nbody.tasks import Flags, target_cells
from argosy.nbody.tree import Integers, Tree, build_tree

LEAF_SIZE = 128
"""Particles of a leaf on a GPU: fewer tasks to list, more pairs to sum."""
_ROW = 128
"""Sources summed at a time for one leaf."""
_FUSED_PAIRS, _PLAIN_PAIRS = 1 << 28, 1 << 23
"""Pairs per launch."""
_FAR_AWAY = 4.0
"""Where a source stands that is none, in cut-offs."""


@dataclass(frozen=True, kw_only=True)
class GpuForces:
    """A force, and where its time went."""

    total: Floats
    pairs: float
    """Summed, with those that only fill up rows."""
    seconds: dict[str, float]
    """tree: on the CPU; pairs: on the device; mesh: what was left of it when the tree was done; all."""


def gpu_forces(
    positions: Floats, box: float, mass: float, settings: GravitySettings, device: str = "cuda"
) -> GpuForces:
    """The force on particles of one mass, as ``gravity.compute_forces`` gives it."""
    check_positions(positions, box)
    split = settings.split(box)
    begin = time.perf_counter()
    keys = hilbert_keys(positions, box)
    order = np.argsort(keys, kind="stable")
    along = positions[order]
    where = torch.device(device)
    here = torch.from_numpy(along).to(where)
    smooth = _mesh(here, box, split.scale, settings)
    tree = build_tree(keys[order], along, leaf_size=settings.leaf_size)
    cells = target_cells(tree, max(settings.cell_size, settings.leaf_size))
    lengths = split.lengths(box)
    packages = list(list_packages(tree, cells, np.ones(len(tree.leaves), bool), lengths, settings.tolerance))
    grown = time.perf_counter()
    _wait(where)
    meshed = time.perf_counter()
    pairs = _Pairs(tree, here, lengths, split)
    for package in packages:
        pairs.add(package.first, package.starts, package.order)
    found = (pairs.force / split.cutoff**2 + smooth).cpu().numpy()
    end = time.perf_counter()
    total = np.empty_like(found)
    total[order] = mass * found
    seconds = {"tree": grown - begin, "mesh": meshed - grown, "pairs": end - meshed, "all": end - begin}
    return GpuForces(total=total, pairs=pairs.count, seconds=seconds)


@dataclass(frozen=True)
class GpuTree:
    """``gravity.tree_force`` with its pairs summed on a device."""

    device: str

    def __call__(
        self,
        tree: Tree,
        cells: Integers,
        positions: Floats,
        box: float,
        split: ForceSplit,
        settings: GravitySettings,
        _pool: object,
        wanted: Flags | None = None,
    ) -> TreeForce:
        wanted = np.ones(len(tree.leaves), bool) if wanted is None else wanted
        lengths, begin = split.lengths(box), time.perf_counter()
        packages = list(list_packages(tree, cells, wanted, lengths, settings.tolerance))
        work = np.zeros((len(tree.leaves), 2))
        for package in packages:
            work[package.first : package.last] += _package_work(tree, package)
        walked = time.perf_counter()
        if not packages:
            nothing = np.zeros((len(positions), 3))
            return TreeForce(force=nothing, work=work, walk_seconds=walked - begin, pair_seconds=0.0)
        pairs = _Pairs(tree, torch.from_numpy(positions).to(self.device), lengths, split)
        for package in packages:
            pairs.add(package.first, package.starts, package.order)
        force: Floats = (pairs.force / split.cutoff**2).cpu().numpy()
        seconds = time.perf_counter() - walked
        return TreeForce(force=force, work=work, walk_seconds=walked - begin, pair_seconds=seconds)


def _package_work(tree: Tree, package: Package) -> Floats:
    """Per leaf of a package: node interactions, pairs."""
    sizes = tree.end - tree.start
    targets = sizes[tree.leaves[package.first : package.last]]
    sources = np.concatenate(([0], np.cumsum(sizes[package.order], dtype=np.int64)))
    nodes = package.starts[1::3] - package.starts[:-1:3]
    pairs = sources[package.starts[3::3]] - sources[package.starts[1::3]]
    return np.stack([targets * nodes, targets * pairs], axis=1).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class GpuGravity(LocalGravity):
    """Forces within this process, on a device."""

    device: str

    def forces(self, particles: Particles) -> tuple[Particles, Floats]:
        found = gpu_forces(particles.positions, self.size, self.strength, self.settings, self.device)
        return particles, found.total

    def short(self, particles: Particles, active: Flags) -> Floats:
        sum_tree = GpuTree(self.device)
        return short_force(particles.positions, self.size, self.strength, self.settings, active, sum_tree)

    def smooth(self, particles: Particles) -> Floats:
        here = torch.from_numpy(particles.positions).to(self.device)
        force: Floats = _mesh(here, self.size, self.settings.split(self.size).scale, self.settings).cpu().numpy()
        return self.strength * force


def usable_device(name: str, place: int) -> str:
    """The torch device of this name, for the process with this place on its machine; ``InputError`` if it is not."""
    try:
        where = torch.device(name)
    except RuntimeError:
        raise bad_input("cpu, cuda, or cuda and a number", name, where="--device") from None
    if where.type == "cuda" and not torch.cuda.is_available():
        raise bad_input("a device that torch finds here (it finds no CUDA card)", name, where="--device")
    if where.type == "cuda" and where.index is None:
        return f"cuda:{place % torch.cuda.device_count()}"
    return name


def for_gpu(settings: GravitySettings) -> GravitySettings:
    """The same accuracy with leaves that suit a GPU."""
    return replace(settings, leaf_size=LEAF_SIZE, cell_size=8 * LEAF_SIZE)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mesh(positions: Tensor, box: float, scale: float, settings: GravitySettings) -> Tensor:
    """(1) of ``mesh`` on the device."""
    cells, order = settings.mesh_cells, settings.cloud.order
    base, weights = _cloud(positions * (cells / box), order)
    index = [torch.remainder(base[:, d, None] + torch.arange(order, device=base.device), cells) for d in range(3)]
    mass = torch.zeros(cells**3, dtype=torch.int64, device=positions.device)
    for place, weight in _rows(index, weights, cells):
        mass.index_add_(0, place.flatten(), torch.round(weight * UNIT).to(torch.int64).flatten())
    modes = torch.fft.rfftn(mass.reshape(cells, cells, cells) / float(UNIT))
    modes *= _green_on(modes.device, cells, box, scale, settings.cloud)
    force = torch.zeros_like(positions)
    for axis in range(3):
        k = frequencies(cells, box)[axis == 2].copy()
        if cells % 2 == 0:
            k[cells // 2] = 0
        shape = [1, 1, 1]
        shape[axis] = len(k)
        slope = torch.from_numpy(-1j * k).to(modes.device).reshape(shape)
        field = torch.fft.irfftn(modes * slope, s=(cells, cells, cells)).flatten()
        for place, weight in _rows(index, weights, cells):
            force[:, axis] += (field[place] * weight).sum(dim=1)
    return force


@lru_cache(maxsize=1)
def _green_on(device: torch.device, cells: int, box: float, scale: float, cloud: Cloud) -> Tensor:
    return torch.tensor(green(cells, box, scale, cloud, 0, cells), device=device)


def _rows(index: list[Tensor], weights: list[Tensor], cells: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cells and weights of every particle's cloud, one row of cells along z at a time."""
    for a in range(index[0].shape[1]):
        for b in range(index[1].shape[1]):
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


class _Pairs:
    """Sums over sources, leaf by leaf."""

    def __init__(self, tree: Tree, positions: Tensor, lengths: Floats, split: ForceSplit) -> None:
        self.device = positions.device
        self.box, self.cutoff, softened = (float(length) for length in lengths)
        self.h = torch.tensor(softened / self.cutoff, dtype=torch.float32, device=self.device)
        self.poly = torch.tensor(split.coefficients.copy(), device=self.device)
        leaves = torch.from_numpy(tree.leaves.astype(np.int64))
        self.node_start = torch.from_numpy(tree.start.astype(np.int64)).to(self.device)
        self.node_size = torch.from_numpy((tree.end - tree.start).astype(np.int64)).to(self.device)
        self.leaf_node = leaves.to(self.device)
        self.middle = torch.from_numpy(tree.middle).to(self.device)[self.leaf_node]
        self.positions = positions
        self.force = torch.zeros_like(positions)
        self.count = 0.0
        node = np.concatenate([tree.centre, tree.mass[:, None], tree.moments / self.cutoff**2], axis=1)
        self.nodes = torch.from_numpy(node).to(self.device)
        self.width = int((tree.end - tree.start)[tree.leaves].max())
        fused = self.device.type == "cuda"
        self.most = _FUSED_PAIRS if fused else _PLAIN_PAIRS
        self.sum_pairs = _fused(_sum_pairs) if fused else _sum_pairs
        self.sum_nodes = _fused(_sum_nodes) if fused else _sum_nodes

    def add(self, first: int, starts: Integers, order: Integers) -> None:
        """The tasks of the leaves from ``first`` on, sorted by leaf and kind."""
        begins = torch.from_numpy(starts.astype(np.int64)).to(self.device)
        sources = torch.from_numpy(order.astype(np.int64)).to(self.device)
        leaves = torch.arange((len(begins) - 1) // 3, device=self.device)
        self._add_nodes(first, leaves, begins, sources)
        low, high = begins[1:-1:3], begins[3::3]  # leaves, far and near
        tasks = _expand(low, high - low)
        owner = torch.repeat_interleave(leaves, high - low)
        particles = _expand(self.node_start[sources[tasks]], self.node_size[sources[tasks]])
        owner = torch.repeat_interleave(owner, self.node_size[sources[tasks]])

        def gathered(index: Tensor, middle: Tensor) -> Tensor:
            return self._relative(self.positions[index], middle)

        self._in_rows(first, owner, particles, self.sum_pairs, gathered)

    def _add_nodes(self, first: int, leaves: Tensor, begins: Tensor, sources: Tensor) -> None:
        low, high = begins[:-1:3], begins[1::3]
        owner = torch.repeat_interleave(leaves, high - low)
        chosen = sources[_expand(low, high - low)]

        def gathered(index: Tensor, middle: Tensor) -> Tensor:
            rows = self.nodes[index]
            return torch.cat([self._relative(rows[..., :3], middle), rows[..., 3:].float()], dim=-1)

        self._in_rows(first, owner, chosen, self.sum_nodes, gathered)

    def _relative(self, points: Tensor, middle: Tensor) -> Tensor:
        """From the middle of the target leaf, at the nearest image, in cut-offs."""
        away = points - middle
        away -= self.box * torch.round(away / self.box)
        return (away / self.cutoff).float()

    def _in_rows(
        self,
        first: int,
        owner: Tensor,
        sources: Tensor,
        add_up: Callable[..., Tensor],
        gathered: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Lay out every leaf's sources in rows, sum, and add rows to their leaf's particles."""
        if not len(owner):
            return
        leaf, counts = torch.unique_consecutive(owner, return_counts=True)
        rows = (counts + _ROW - 1) // _ROW
        first_row = torch.cumsum(rows, 0) - rows
        slot = _expand(first_row * _ROW, counts)
        table = torch.full((int(rows.sum()) * _ROW,), -1, dtype=torch.int64, device=self.device)
        table[slot] = sources
        table = table.reshape(-1, _ROW)
        row_leaf = torch.repeat_interleave(leaf, rows) + first
        step = max(self.most // (self.width * _ROW), 1)
        for begin in range(0, len(table), step):
            self._sum_rows(table[begin : begin + step], row_leaf[begin : begin + step], add_up, gathered)

    def _sum_rows(
        self, table: Tensor, leaf: Tensor, add_up: Callable[..., Tensor], gathered: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        middle = self.middle[leaf][:, None, :]
        sources = gathered(table.clamp(min=0), middle)
        sources[..., :3] = torch.where((table < 0)[..., None], _FAR_AWAY, sources[..., :3])
        node = self.leaf_node[leaf]
        lane = torch.arange(self.width, device=self.device)
        held = lane < self.node_size[node][:, None]
        index = torch.where(held, self.node_start[node][:, None] + lane, 0)
        targets = self._relative(self.positions[index], middle)
        sums = add_up(targets, sources, self.poly, self.h)
        self.count += float(table.numel() * self.width)
        self.force.index_add_(0, index[held], sums[held].double())


def _expand(starts: Tensor, counts: Tensor) -> Tensor:
    """start, start + 1, ..., for each count, one after the other."""
    before = torch.cumsum(counts, 0) - counts
    return torch.arange(int(counts.sum()), device=starts.device) + torch.repeat_interleave(starts - before, counts)


def _polynomial(row: Tensor, v: Tensor) -> Tensor:
    value = row[10] * v + row[9]
    for k in range(8, -1, -1):
        value = value * v + row[k]
    return value


def _sum_pairs(targets: Tensor, sources: Tensor, poly: Tensor, h: Tensor) -> Tensor:
    """(3) and (4) of ``split``: rows of targets x rows of sources, summed over the latter."""
    dx = sources[:, None, :, 0] - targets[:, :, None, 0]
    dy = sources[:, None, :, 1] - targets[:, :, None, 1]
    dz = sources[:, None, :, 2] - targets[:, :, None, 2]
    r2 = dx * dx + dy * dy + dz * dz
    inverse = torch.rsqrt(r2 + 1e-20)
    u = r2 * inverse / h
    inside = 32 / 3 + u * u * (32.0 * u - 38.4)
    outer = torch.clamp(u, min=0.25)
    shell = 64 / 3 - 48.0 * u + 38.4 * u * u - 32 / 3 * u * u * u - 1 / (15.0 * outer * outer * outer)
    spline = torch.where(u < 0.5, inside, shell) / (h * h * h)
    w = torch.where(u < 1.0, spline, inverse * inverse * inverse) - _polynomial(poly[0], r2 + r2 - 1.0)
    w = torch.where(r2 < 1.0, w, 0.0)
    return torch.stack([(w * dx).sum(2), (w * dy).sum(2), (w * dz).sum(2)], dim=-1)


def _sum_nodes(targets: Tensor, nodes: Tensor, poly: Tensor, _h: Tensor) -> Tensor:
    """(5) of ``split``."""
    dx = nodes[:, None, :, 0] - targets[:, :, None, 0]
    dy = nodes[:, None, :, 1] - targets[:, :, None, 1]
    dz = nodes[:, None, :, 2] - targets[:, :, None, 2]
    mass, xx, yy, zz, xy, xz, yz = (nodes[:, None, :, k] for k in range(3, 10))
    r2 = dx * dx + dy * dy + dz * dz
    i1 = torch.rsqrt(r2)
    i2 = i1 * i1
    i3 = i2 * i1
    v = r2 + r2 - 1.0
    w1 = i3 - _polynomial(poly[0], v)
    w2 = -3.0 * i3 * i2 - 2.0 * _polynomial(poly[1], v)
    w3 = 15.0 * i3 * i2 * i2 - 4.0 * _polynomial(poly[2], v)
    qx, qy, qz = xx * dx + xy * dy + xz * dz, xy * dx + yy * dy + yz * dz, xz * dx + yz * dy + zz * dz
    along = mass * w1 + 0.5 * ((xx + yy + zz) * w2 + (dx * qx + dy * qy + dz * qz) * w3)
    along = torch.where(r2 < 1.0, along, 0.0)
    w2 = torch.where(r2 < 1.0, w2, 0.0)
    parts = [(along * d + w2 * q).sum(2) for d, q in ((dx, qx), (dy, qy), (dz, qz))]
    return torch.stack(parts, dim=-1)


def _fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(function, dynamic=True)
    return compiled
