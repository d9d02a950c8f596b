"""Sum over listed tasks on a device: Triton kernels on a GPU, plain torch elsewhere.

Both use the same equations. Plain torch arranges the sources of a leaf in rows of ``_ROW`` and sums
over a row for every target of the leaf: float32 within a row, float64 over rows. Tests on machines
without a GPU compare it with the numba code.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from argosy.nbody.force.split import ForceSplit
from argosy.nbody.gpu.tree import DeviceTasks, DeviceTree

# The number of sources that are summed at a time for one leaf.
_ROW = 128
# The largest number of pairs that are summed in one operation.
_MOST_PAIRS = 1 << 23
# The coordinate of a padding source, in cut-offs: it is too far away to act.
_FAR_AWAY = 4.0


def sum_on_device(
    tree: DeviceTree, positions: Tensor, tasks: DeviceTasks, box: float, split: ForceSplit
) -> Tensor:
    """Return the short-range force on every particle that has tasks."""
    lengths = (box, split.cutoff, split.spline)
    poly = torch.tensor(split.coefficients.copy(), device=positions.device)
    nodes = torch.cat([tree.centre, tree.mass[:, None], tree.moments / split.cutoff**2], dim=1)
    if positions.is_cuda:
        from argosy.nbody.gpu.kernels import sum_tasks

        leaf_runs = tree.start[tree.leaves], tree.end[tree.leaves]
        middles = tree.middle[tree.leaves].contiguous()
        runs = tree.start, tree.end
        force = sum_tasks(
            positions,
            middles,
            leaf_runs,
            (tasks.starts, tasks.sources),
            runs,
            nodes.contiguous(),
            poly,
            lengths,
        )
    else:
        force = _Rows(tree, positions, nodes, poly, lengths).force_of(tasks)
    return force / split.cutoff**2


def count_pairs(tree: DeviceTree, tasks: DeviceTasks) -> Tensor:
    """Return the node interactions and the pairs of each leaf."""
    size = tree.end - tree.start
    sizes = torch.cat([size.new_zeros(1), torch.cumsum(size[tasks.sources], 0)])
    begin = tasks.starts[:-1].reshape(-1, 3)
    end = tasks.starts[3::3]
    targets = size[tree.leaves]
    return torch.stack(
        [targets * (begin[:, 1] - begin[:, 0]), targets * (sizes[end] - sizes[begin[:, 1]])], dim=1
    )


class _Rows:
    """A sum over sources, leaf by leaf, that uses plain torch."""

    def __init__(
        self,
        tree: DeviceTree,
        positions: Tensor,
        nodes: Tensor,
        poly: Tensor,
        lengths: tuple[float, float, float],
    ) -> None:
        self.tree, self.positions, self.nodes, self.poly = tree, positions, nodes, poly
        self.box, self.cutoff, softened = lengths
        self.h = torch.tensor(softened / self.cutoff, dtype=torch.float32, device=positions.device)
        self.size = tree.end - tree.start
        self.middle = tree.middle[tree.leaves]
        self.width = int(self.size[tree.leaves].max())
        self.force = torch.zeros_like(positions)

    def force_of(self, tasks: DeviceTasks) -> Tensor:
        """Return the force of all tasks on every particle."""
        leaves = torch.arange(len(self.tree.leaves), device=self.positions.device)
        begin, far, end = tasks.starts[:-1:3], tasks.starts[1::3], tasks.starts[3::3]
        owner = torch.repeat_interleave(leaves, far - begin)
        self._in_rows(
            owner, tasks.sources[_expand(begin, far - begin)], _sum_nodes, self._gathered_nodes
        )
        chosen = tasks.sources[_expand(far, end - far)]
        owner = torch.repeat_interleave(
            torch.repeat_interleave(leaves, end - far), self.size[chosen]
        )
        self._in_rows(
            owner,
            _expand(self.tree.start[chosen], self.size[chosen]),
            _sum_pairs,
            self._gathered_points,
        )
        return self.force

    def _gathered_points(self, index: Tensor, middle: Tensor) -> Tensor:
        """Return particles relative to the middle of their target leaf."""
        return self._relative(self.positions[index], middle)

    def _gathered_nodes(self, index: Tensor, middle: Tensor) -> Tensor:
        """Return nodes relative to the middle of their target leaf, with mass and moments."""
        rows = self.nodes[index]
        return torch.cat([self._relative(rows[..., :3], middle), rows[..., 3:].float()], dim=-1)

    def _relative(self, points: Tensor, middle: Tensor) -> Tensor:
        """Return points relative to the middle of the target leaf, at the nearest image, in
        cut-offs."""
        away = points - middle
        away -= self.box * torch.round(away / self.box)
        return (away / self.cutoff).float()

    def _in_rows(
        self,
        owner: Tensor,
        sources: Tensor,
        add_up: Callable[..., Tensor],
        gathered: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Place every leaf's sources in rows, sum them, and add the rows to their leaf's
        particles."""
        if not len(owner):
            return
        leaf, counts = torch.unique_consecutive(owner, return_counts=True)
        rows = (counts + _ROW - 1) // _ROW
        first_row = torch.cumsum(rows, 0) - rows
        table = torch.full((int(rows.sum()) * _ROW,), -1, dtype=torch.int64, device=owner.device)
        table[_expand(first_row * _ROW, counts)] = sources
        table = table.reshape(-1, _ROW)
        row_leaf = torch.repeat_interleave(leaf, rows)
        step = max(_MOST_PAIRS // (self.width * _ROW), 1)
        for begin in range(0, len(table), step):
            self._sum_rows(
                table[begin : begin + step], row_leaf[begin : begin + step], add_up, gathered
            )

    def _sum_rows(
        self,
        table: Tensor,
        leaf: Tensor,
        add_up: Callable[..., Tensor],
        gathered: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Sum over the sources of some rows."""
        middle = self.middle[leaf][:, None, :]
        sources = gathered(table.clamp(min=0), middle)
        sources[..., :3] = torch.where((table < 0)[..., None], _FAR_AWAY, sources[..., :3])
        node = self.tree.leaves[leaf]
        lane = torch.arange(self.width, device=table.device)
        held = lane < self.size[node][:, None]
        index = torch.where(held, self.tree.start[node][:, None] + lane, 0)
        targets = self._relative(self.positions[index], middle)
        sums = add_up(targets, sources, self.poly, self.h)
        self.force.index_add_(0, index[held], sums[held].double())


def _expand(starts: Tensor, counts: Tensor) -> Tensor:
    """Return start, start + 1, ... for each count, one after the other."""
    before = torch.cumsum(counts, 0) - counts
    return torch.arange(int(counts.sum()), device=starts.device) + torch.repeat_interleave(
        starts - before, counts
    )


def _polynomial(row: Tensor, v: Tensor) -> Tensor:
    """Evaluate a polynomial of degree 10."""
    value = row[10] * v + row[9]
    for k in range(8, -1, -1):
        value = value * v + row[k]
    return value


def _sum_pairs(targets: Tensor, sources: Tensor, poly: Tensor, h: Tensor) -> Tensor:
    """Return the forces (3) and (4) of ``split``: rows of targets x rows of sources, summed over
    sources."""
    dx = sources[:, None, :, 0] - targets[:, :, None, 0]
    dy = sources[:, None, :, 1] - targets[:, :, None, 1]
    dz = sources[:, None, :, 2] - targets[:, :, None, 2]
    r2 = dx * dx + dy * dy + dz * dz
    inverse = torch.rsqrt(r2 + 1e-20)
    u = r2 * inverse / h
    inside = 32 / 3 + u * u * (32.0 * u - 38.4)
    outer = torch.clamp(u, min=0.25)
    shell = (
        64 / 3 - 48.0 * u + 38.4 * u * u - 32 / 3 * u * u * u - 1 / (15.0 * outer * outer * outer)
    )
    spline = torch.where(u < 0.5, inside, shell) / (h * h * h)
    w = torch.where(u < 1.0, spline, inverse * inverse * inverse) - _polynomial(
        poly[0], r2 + r2 - 1.0
    )
    w = torch.where(r2 < 1.0, w, 0.0)
    return torch.stack([(w * dx).sum(2), (w * dy).sum(2), (w * dz).sum(2)], dim=-1)


def _sum_nodes(targets: Tensor, nodes: Tensor, poly: Tensor, _h: Tensor) -> Tensor:
    """Return the forces (5) of ``split``, summed over nodes."""
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
    qx = xx * dx + xy * dy + xz * dz
    qy = xy * dx + yy * dy + yz * dz
    qz = xz * dx + yz * dy + zz * dz
    along = mass * w1 + 0.5 * ((xx + yy + zz) * w2 + (dx * qx + dy * qy + dz * qz) * w3)
    along = torch.where(r2 < 1.0, along, 0.0)
    w2 = torch.where(r2 < 1.0, w2, 0.0)
    parts = [(along * d + w2 * q).sum(2) for d, q in ((dx, qx), (dy, qy), (dz, qz))]
    return torch.stack(parts, dim=-1)
