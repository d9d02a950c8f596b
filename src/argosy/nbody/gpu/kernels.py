"""Define Triton kernels of the force: pairs and nodes on target leaves, clouds on the mesh.

A program sums for ``TARGETS`` particles of one leaf over all sources of its tasks, ``SOURCES`` at a
time. Coordinates are integers of 2^-32 boxes, whose differences from the leaf's middle wrap to the
nearest image and become float32, in cut-offs. A target has ``SOURCES`` sums in float32, which are
added in float64. Equations are those of ``split`` and ``cloud``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

# The fastest block sizes of the pair kernel on an H200 (benchmarks/gpu_gravity.py).
TARGETS, SOURCES, WARPS = 64, 16, 2
# Particles of a program on the mesh and along the curve.
_POINTS = 128
# The number of integer coordinates per box and dimension: with 32 bits, a difference wraps to the
# nearest image.
_PARTS = 1 << 32


# ``triton.jit`` with a type.
_jit = cast("Callable[[Callable[..., Any]], Any]", triton.jit)


@_jit
def _away(x: tl.tensor, middle: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return the distance from the middle of the leaf, at the nearest image, in cut-offs.

    The difference of integers wraps as the box does.
    """
    return (x - middle).to(tl.float32) * scale


@_jit
def _pair_kernel(
    places: tl.tensor,
    middles: tl.tensor,
    leaf_start: tl.tensor,
    leaf_end: tl.tensor,
    starts: tl.tensor,
    sources: tl.tensor,
    node_start: tl.tensor,
    node_end: tl.tensor,
    poly: tl.tensor,
    force: tl.tensor,
    scale: tl.tensor,
    h: tl.tensor,
    num_targets: tl.constexpr,
    num_sources: tl.constexpr,
) -> tl.tensor:
    leaf = tl.program_id(0)
    low, high = tl.load(leaf_start + leaf), tl.load(leaf_end + leaf)
    first = low + tl.program_id(1) * num_targets
    if first < high:
        mx = tl.load(middles + 3 * leaf)
        my = tl.load(middles + 3 * leaf + 1)
        mz = tl.load(middles + 3 * leaf + 2)
        row = first + tl.arange(0, num_targets)
        held = row < high
        target = tl.where(held, row, low)
        tx = _away(tl.load(places + 3 * target), mx, scale)[:, None]
        ty = _away(tl.load(places + 3 * target + 1), my, scale)[:, None]
        tz = _away(tl.load(places + 3 * target + 2), mz, scale)[:, None]
        ax = tl.zeros([num_targets, num_sources], tl.float32)
        ay = tl.zeros([num_targets, num_sources], tl.float32)
        az = tl.zeros([num_targets, num_sources], tl.float32)
        c0, c1, c2, c3 = tl.load(poly), tl.load(poly + 1), tl.load(poly + 2), tl.load(poly + 3)
        c4, c5, c6, c7 = tl.load(poly + 4), tl.load(poly + 5), tl.load(poly + 6), tl.load(poly + 7)
        c8, c9, c10 = tl.load(poly + 8), tl.load(poly + 9), tl.load(poly + 10)
        low_x, high_x, low_y, high_y = tl.min(tx), tl.max(tx), tl.min(ty), tl.max(ty)
        low_z, high_z = tl.min(tz), tl.max(tz)
        per_h = 1.0 / h
        cube = per_h * per_h * per_h
        far = tl.load(starts + 3 * leaf + 1)
        near = tl.load(starts + 3 * leaf + 2)
        end = tl.load(starts + 3 * leaf + 3)
        for task in range(far, end):
            source = tl.load(sources + task)
            begin, stop = tl.load(node_start + source), tl.load(node_end + source)
            for at in range(begin, stop, num_sources):
                column = at + tl.arange(0, num_sources)
                there = column < stop
                column = tl.where(there, column, begin)
                sx = _away(tl.load(places + 3 * column), mx, scale)
                sy = _away(tl.load(places + 3 * column + 1), my, scale)
                sz = _away(tl.load(places + 3 * column + 2), mz, scale)
                sx = tl.where(there, sx, 4.0)  # beyond the cut-off of every target
                # Blocks of sources that are beyond the cut-off of all targets are skipped.
                gx = tl.maximum(tl.maximum(low_x - sx, sx - high_x), 0.0)
                gy = tl.maximum(tl.maximum(low_y - sy, sy - high_y), 0.0)
                gz = tl.maximum(tl.maximum(low_z - sz, sz - high_z), 0.0)
                if tl.min(gx * gx + gy * gy + gz * gz) < 1.0:
                    dx, dy, dz = sx[None, :] - tx, sy[None, :] - ty, sz[None, :] - tz
                    r2 = dx * dx + dy * dy + dz * dz
                    inverse = tl.rsqrt(r2 + 1e-20)
                    w = inverse * inverse * inverse
                    if task >= near:
                        u = r2 * inverse * per_h
                        outer = tl.maximum(u, 0.25)
                        inside = 10.666666666 + u * u * (32.0 * u - 38.4)
                        shell = 21.333333333 - 48.0 * u + 38.4 * u * u - 10.666666666 * u * u * u
                        shell -= 0.066666666667 / (outer * outer * outer)
                        w = tl.where(u < 1.0, cube * tl.where(u < 0.5, inside, shell), w)
                    v = r2 + r2 - 1.0
                    p = c10 * v + c9
                    p = p * v + c8
                    p = p * v + c7
                    p = p * v + c6
                    p = p * v + c5
                    p = p * v + c4
                    p = p * v + c3
                    p = p * v + c2
                    p = p * v + c1
                    p = p * v + c0
                    w = tl.where(r2 < 1.0, w - p, 0.0)
                    ax += w * dx
                    ay += w * dy
                    az += w * dz
        tl.store(force + 3 * row, tl.sum(ax.to(tl.float64), axis=1), mask=held)
        tl.store(force + 3 * row + 1, tl.sum(ay.to(tl.float64), axis=1), mask=held)
        tl.store(force + 3 * row + 2, tl.sum(az.to(tl.float64), axis=1), mask=held)


@_jit
def _polynomial(
    poly: tl.tensor, row: tl.constexpr, degree: tl.constexpr, v: tl.tensor
) -> tl.tensor:
    value = tl.load(poly + row * 11 + degree) + v * 0.0
    for step in tl.static_range(degree):
        value = value * v + tl.load(poly + row * 11 + degree - 1 - step)
    return value


@_jit
def _node_kernel(
    places: tl.tensor,
    middles: tl.tensor,
    leaf_start: tl.tensor,
    leaf_end: tl.tensor,
    starts: tl.tensor,
    sources: tl.tensor,
    centres: tl.tensor,
    nodes: tl.tensor,
    poly: tl.tensor,
    force: tl.tensor,
    scale: tl.tensor,
    num_targets: tl.constexpr,
    num_sources: tl.constexpr,
) -> tl.tensor:
    leaf = tl.program_id(0)
    low, high = tl.load(leaf_start + leaf), tl.load(leaf_end + leaf)
    first = low + tl.program_id(1) * num_targets
    begin, end = tl.load(starts + 3 * leaf), tl.load(starts + 3 * leaf + 1)
    if (first < high) & (begin < end):
        mx = tl.load(middles + 3 * leaf)
        my = tl.load(middles + 3 * leaf + 1)
        mz = tl.load(middles + 3 * leaf + 2)
        row = first + tl.arange(0, num_targets)
        held = row < high
        target = tl.where(held, row, low)
        tx = _away(tl.load(places + 3 * target), mx, scale)[:, None]
        ty = _away(tl.load(places + 3 * target + 1), my, scale)[:, None]
        tz = _away(tl.load(places + 3 * target + 2), mz, scale)[:, None]
        ax = tl.load(force + 3 * target)
        ay = tl.load(force + 3 * target + 1)
        az = tl.load(force + 3 * target + 2)
        for at in range(begin, end, num_sources):
            column = at + tl.arange(0, num_sources)
            there = column < end
            number = tl.load(sources + tl.where(there, column, begin))
            centre, node = centres + 3 * number, nodes + 7 * number
            sx = tl.where(there, _away(tl.load(centre), mx, scale), 4.0)
            dx = sx[None, :] - tx
            dy = _away(tl.load(centre + 1), my, scale)[None, :] - ty
            dz = _away(tl.load(centre + 2), mz, scale)[None, :] - tz
            mass = tl.load(node)[None, :]
            xx = tl.load(node + 1)[None, :]
            yy = tl.load(node + 2)[None, :]
            zz, xy = tl.load(node + 3)[None, :], tl.load(node + 4)[None, :]
            xz, yz = tl.load(node + 5)[None, :], tl.load(node + 6)[None, :]
            r2 = dx * dx + dy * dy + dz * dz
            i1 = tl.rsqrt(r2 + 1e-20)
            i2 = i1 * i1
            i3 = i2 * i1
            v = r2 + r2 - 1.0
            w1 = i3 - _polynomial(poly, 0, 10, v)
            w2 = -3.0 * i3 * i2 - 2.0 * _polynomial(poly, 1, 9, v)
            w3 = 15.0 * i3 * i2 * i2 - 4.0 * _polynomial(poly, 2, 8, v)
            qx = xx * dx + xy * dy + xz * dz
            qy = xy * dx + yy * dy + yz * dz
            qz = xz * dx + yz * dy + zz * dz
            along = mass * w1 + 0.5 * ((xx + yy + zz) * w2 + (dx * qx + dy * qy + dz * qz) * w3)
            along = tl.where(r2 < 1.0, along, 0.0)
            w2 = tl.where(r2 < 1.0, w2, 0.0)
            ax += tl.sum(along * dx + w2 * qx, axis=1).to(tl.float64)
            ay += tl.sum(along * dy + w2 * qy, axis=1).to(tl.float64)
            az += tl.sum(along * dz + w2 * qz, axis=1).to(tl.float64)
        tl.store(force + 3 * row, ax, mask=held)
        tl.store(force + 3 * row + 1, ay, mask=held)
        tl.store(force + 3 * row + 2, az, mask=held)


def _whole(points: Tensor, box: float) -> Tensor:
    """Return coordinates in units of box / 2^32, as integers that wrap with the box."""
    counted = torch.round(points * (_PARTS / box)).to(torch.int64)
    return torch.remainder(counted + _PARTS // 2, _PARTS).sub_(_PARTS // 2).to(torch.int32)


def sum_tasks(
    positions: Tensor,
    middles: Tensor,
    leaf_runs: tuple[Tensor, Tensor],
    tasks: tuple[Tensor, Tensor],
    node_runs: tuple[Tensor, Tensor],
    nodes: Tensor,
    poly: Tensor,
    lengths: tuple[float, float, float],
) -> Tensor:
    """Return the force of sorted tasks on every particle, in units of the cut-off^-2.

    Rows of ``nodes`` are centre, mass, moments.
    """
    box, cutoff, softened = lengths
    force = torch.zeros_like(positions)
    most = int((leaf_runs[1] - leaf_runs[0]).max())
    grid = (len(middles), triton.cdiv(most, TARGETS))
    places, middle = _whole(positions, box), _whole(middles, box)
    scale = box / _PARTS / cutoff
    _pair_kernel[grid](
        places, middle, *leaf_runs, *tasks, *node_runs, poly, force, scale, softened / cutoff,
        num_targets=TARGETS, num_sources=SOURCES, num_warps=WARPS,
    )  # fmt: skip
    _node_kernel[grid](
        places, middle, *leaf_runs, *tasks,
        _whole(nodes[:, :3], box), nodes[:, 3:].float().contiguous(), poly, force, scale,
        num_targets=TARGETS, num_sources=16, num_warps=WARPS,
    )  # fmt: skip
    return force


@_jit
def _key_kernel(
    positions: tl.tensor,
    keys: tl.tensor,
    count: tl.tensor,
    bits: tl.constexpr,
    points: tl.constexpr,
) -> tl.tensor:
    row = tl.program_id(0) * points + tl.arange(0, points)
    held = row < count
    last = (1 << bits) - 1
    x = tl.minimum(
        (tl.load(positions + 3 * row, mask=held, other=0.0) * (1 << bits)).to(tl.int64), last
    )
    y = tl.minimum(
        (tl.load(positions + 3 * row + 1, mask=held, other=0.0) * (1 << bits)).to(tl.int64), last
    )
    z = tl.minimum(
        (tl.load(positions + 3 * row + 2, mask=held, other=0.0) * (1 << bits)).to(tl.int64), last
    )
    for step in tl.static_range(bits - 1):
        bit = 1 << (bits - 1 - step)
        below = bit - 1
        x = tl.where((x & bit) != 0, x ^ below, x)
        swap = tl.where((y & bit) != 0, 0, (x ^ y) & below)
        x = tl.where((y & bit) != 0, x ^ below, x ^ swap)
        y = y ^ swap
        swap = tl.where((z & bit) != 0, 0, (x ^ z) & below)
        x = tl.where((z & bit) != 0, x ^ below, x ^ swap)
        z = z ^ swap
    y = y ^ x
    z = z ^ y
    turn = tl.zeros_like(z)
    for step in tl.static_range(bits - 1):
        bit = 1 << (bits - 1 - step)
        turn = tl.where((z & bit) != 0, turn ^ (bit - 1), turn)
    x, y, z = x ^ turn, y ^ turn, z ^ turn
    key = tl.zeros_like(z)
    for step in tl.static_range(bits):
        level = bits - 1 - step
        key = (
            (key << 3) | (((x >> level) & 1) << 2) | (((y >> level) & 1) << 1) | ((z >> level) & 1)
        )
    tl.store(keys + row, key, mask=held)


def keys_on_device(positions: Tensor, box: float, bits: int) -> Tensor:
    """Return the keys of ``hilbert.hilbert_keys``, computed on the device."""
    keys = torch.empty(len(positions), dtype=torch.int64, device=positions.device)
    parts = positions / box  # in float64 here, because a kernel would take the box as float32
    _key_kernel[(triton.cdiv(len(positions), _POINTS),)](
        parts, keys, len(positions), bits=bits, points=_POINTS
    )
    return keys


@_jit
def _weight(f: tl.tensor, order: tl.constexpr, part: tl.constexpr) -> tl.tensor:
    """Return the share of a particle that falls on the cell ``part`` of its cloud."""
    g = 1.0 - f
    if order == 2:
        weight = g if part == 0 else f
    elif order == 3:
        if part == 0:
            weight = 0.5 * (0.5 - f) * (0.5 - f)
        elif part == 1:
            weight = 0.75 - f * f
        else:
            weight = 0.5 * (0.5 + f) * (0.5 + f)
    elif part == 0:
        weight = g * g * g / 6.0
    elif part == 1:
        weight = (4.0 - 6.0 * f * f + 3.0 * f * f * f) / 6.0
    elif part == 2:
        weight = (4.0 - 6.0 * g * g + 3.0 * g * g * g) / 6.0
    else:
        weight = f * f * f / 6.0
    return weight


@_jit
def _base(x: tl.tensor, cells: tl.tensor, order: tl.constexpr) -> tl.tensor:
    """Return the first cell of a cloud, at least 0, and the particle's offset from its base
    cell."""
    base = tl.floor(x + 0.5) if order == 3 else tl.floor(x)
    return base.to(tl.int64) + cells - (1 if order > 2 else 0), x - base


@_jit
def _deposit_kernel(
    positions: tl.tensor,
    mass: tl.tensor,
    count: tl.tensor,
    cells: tl.tensor,
    first: tl.tensor,
    unit: tl.tensor,
    order: tl.constexpr,
    points: tl.constexpr,
) -> tl.tensor:
    row = tl.program_id(0) * points + tl.arange(0, points)
    held = row < count
    i, fx = _base(tl.load(positions + 3 * row, mask=held, other=0.0), cells, order)
    j, fy = _base(tl.load(positions + 3 * row + 1, mask=held, other=0.0), cells, order)
    k, fz = _base(tl.load(positions + 3 * row + 2, mask=held, other=0.0), cells, order)
    for a in tl.static_range(order):
        plane = (i % cells - first + a) * cells
        wx = _weight(fx, order, a) * unit
        for b in tl.static_range(order):
            line = (plane + (j + b) % cells) * cells
            wxy = wx * _weight(fy, order, b)
            for c in tl.static_range(order):
                amount = tl.floor(wxy * _weight(fz, order, c) + 0.5).to(tl.int64)
                tl.atomic_add(mass + line + (k + c) % cells, amount, mask=held, sem="relaxed")


@_jit
def _interpolate_kernel(
    positions: tl.tensor,
    fields: tl.tensor,
    force: tl.tensor,
    count: tl.tensor,
    cells: tl.tensor,
    first: tl.tensor,
    size: tl.tensor,
    order: tl.constexpr,
    points: tl.constexpr,
) -> tl.tensor:
    row = tl.program_id(0) * points + tl.arange(0, points)
    held = row < count
    i, fx = _base(tl.load(positions + 3 * row, mask=held, other=0.0), cells, order)
    j, fy = _base(tl.load(positions + 3 * row + 1, mask=held, other=0.0), cells, order)
    k, fz = _base(tl.load(positions + 3 * row + 2, mask=held, other=0.0), cells, order)
    ax = tl.zeros([points], tl.float64)
    ay = tl.zeros([points], tl.float64)
    az = tl.zeros([points], tl.float64)
    for a in tl.static_range(order):
        plane = (i % cells - first + a) * cells
        wx = _weight(fx, order, a)
        for b in tl.static_range(order):
            line = (plane + (j + b) % cells) * cells
            wxy = wx * _weight(fy, order, b)
            for c in tl.static_range(order):
                w = wxy * _weight(fz, order, c)
                cell = fields + line + (k + c) % cells
                ax += w * tl.load(cell, mask=held, other=0.0)
                ay += w * tl.load(cell + size, mask=held, other=0.0)
                az += w * tl.load(cell + 2 * size, mask=held, other=0.0)
    tl.store(force + 3 * row, ax, mask=held)
    tl.store(force + 3 * row + 1, ay, mask=held)
    tl.store(force + 3 * row + 2, az, mask=held)


def deposit_on_device(points: Tensor, mass: Tensor, order: int, unit: int, first: int) -> None:
    """Add clouds to planes of the mesh from ``first`` on, in integers of 1 / ``unit`` particles.

    Points are in cells. They are scaled by the caller, because Triton takes numbers as float32:
    scaled in a kernel, some points would be in another cell than their owner expects.
    """
    grid = (triton.cdiv(len(points), _POINTS),)
    if len(points):
        _deposit_kernel[grid](
            points,
            mass,
            len(points),
            mass.shape[1],
            first,
            float(unit),
            order=order,
            points=_POINTS,
        )


def interpolate_on_device(points: Tensor, fields: Tensor, order: int, first: int) -> Tensor:
    """Return three fields, on planes from ``first`` on, at every point, over its cloud; points in
    cells."""
    force, size = torch.empty_like(points), fields[0].numel()
    grid = (triton.cdiv(len(points), _POINTS),)
    if len(points):
        _interpolate_kernel[grid](
            points,
            fields,
            force,
            len(points),
            fields.shape[2],
            first,
            size,
            order=order,
            points=_POINTS,
        )
    return force
