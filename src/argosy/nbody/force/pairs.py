"""Compute the short-range force of listed tasks: gather the sources of a leaf, then sum in float32.

Coordinates are integers of 2^-32 boxes: their difference from the middle of the target leaf wraps
to the nearest image, and becomes float32 in units of the cut-off, with an error of 6e-8 of a
cut-off. Sources beyond the cut-off of the leaf's box are omitted while they are gathered: nearly
half of those in leaves that reach into it. Sources come in blocks that stay in the first-level
cache; a block is summed in float32, over many lanes, and blocks are added in float64. Equations are
those of ``split``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from argosy.nbody.compiled import compiled, inlined
from argosy.nbody.force.hilbert import Positions
from argosy.nbody.force.split import Coefficients
from argosy.nbody.force.tasks import FAR, NODE, TaskBuffer
from argosy.nbody.force.tree import Floats, Integers, Tree

# The number of sources that are summed at a time.
BLOCK = 1024

# Floats of the widest vector; blocks are filled up to a multiple of it.
LANES = 16
# The number of integer coordinates per box and dimension.
_PARTS = 1 << 32

# Coordinates in cut-offs, and as integers of 2^-32 boxes.
Singles = NDArray[np.float32]
Places = NDArray[np.int32]


@inlined
def _polynomial(coefficients: Singles, degree: int, v: np.float32) -> np.float32:
    """Evaluate a polynomial by Horner's rule; the loop is unrolled if the degree is a constant."""
    value: np.float32 = coefficients[degree]
    for power in range(degree - 1, -1, -1):
        value = value * v + coefficients[power]
    return value


@inlined
def sum_far(
    targets: Singles, sources: Singles, count: int, poly: Coefficients, total: Floats
) -> None:
    """Add the force (3) of every source on every target, outside the softening."""
    unity, zero = np.float32(1), np.float32(0)
    x, y, z = sources[0], sources[1], sources[2]
    for t in range(targets.shape[1]):
        tx, ty, tz = targets[0, t], targets[1, t], targets[2, t]
        ax = ay = az = zero
        for j in range(count):
            dx, dy, dz = x[j] - tx, y[j] - ty, z[j] - tz
            r2 = dx * dx + dy * dy + dz * dz
            inverse = unity / math.sqrt(r2)
            v = r2 + r2 - unity
            p = _polynomial(poly[0], 10, v)
            w = inverse * inverse * inverse - p
            w = w if r2 < unity else zero
            ax += w * dx
            ay += w * dy
            az += w * dz
        total[t, 0] += ax
        total[t, 1] += ay
        total[t, 2] += az


@inlined
def _sum_near(
    targets: Singles, sources: Singles, count: int, poly: Coefficients, h: np.float32, total: Floats
) -> None:
    """Add the force (3) of every source on every target, with (4) instead of 1/r^3 closer than
    h."""
    unity, zero, least = np.float32(1), np.float32(0), np.float32(1e-20)
    s0, s1, s2, s3 = np.float32(64 / 3), np.float32(48), np.float32(38.4), np.float32(32 / 3)
    s4, s5, s6 = np.float32(1 / 15), np.float32(32), np.float32(0.25)
    half = np.float32(0.5)
    per_h = unity / h
    h3 = per_h * per_h * per_h
    x, y, z = sources[0], sources[1], sources[2]
    for t in range(targets.shape[1]):
        tx, ty, tz = targets[0, t], targets[1, t], targets[2, t]
        ax = ay = az = zero
        for j in range(count):
            dx, dy, dz = x[j] - tx, y[j] - ty, z[j] - tz
            r2 = dx * dx + dy * dy + dz * dz
            inverse = unity / math.sqrt(r2 + least)
            v = r2 + r2 - unity
            p = _polynomial(poly[0], 10, v)
            u = r2 * inverse * per_h
            uu = u * u
            far = max(u, s6)
            inside = s3 + uu * (s5 * u - s2)
            shell = s0 - s1 * u + s2 * uu - s3 * uu * u - s4 / (far * far * far)
            spline = h3 * (inside if u < half else shell)
            w = (spline if u < unity else inverse * inverse * inverse) - p
            w = w if r2 < unity else zero
            ax += w * dx
            ay += w * dy
            az += w * dz
        total[t, 0] += ax
        total[t, 1] += ay
        total[t, 2] += az


@inlined
def _sum_nodes(
    targets: Singles, nodes: Singles, count: int, poly: Coefficients, total: Floats
) -> None:
    """Add the force (5) of every node on every target; rows of ``nodes``: centre, mass, second
    moments."""
    unity, zero, two, half = np.float32(1), np.float32(0), np.float32(2), np.float32(0.5)
    three, four, fifteen = np.float32(3), np.float32(4), np.float32(15)
    x, y, z, m = nodes[0], nodes[1], nodes[2], nodes[3]
    qxx, qyy, qzz, qxy, qxz, qyz = nodes[4], nodes[5], nodes[6], nodes[7], nodes[8], nodes[9]
    for t in range(targets.shape[1]):
        tx, ty, tz = targets[0, t], targets[1, t], targets[2, t]
        ax = ay = az = zero
        for j in range(count):
            dx, dy, dz = x[j] - tx, y[j] - ty, z[j] - tz
            r2 = dx * dx + dy * dy + dz * dz
            inverse = unity / math.sqrt(r2)
            i2 = inverse * inverse
            i3 = i2 * inverse
            v = r2 + r2 - unity
            p0 = _polynomial(poly[0], 10, v)
            p1 = _polynomial(poly[1], 9, v)
            p2 = _polynomial(poly[2], 8, v)
            w1 = i3 - p0
            w2 = -three * i3 * i2 - two * p1
            w3 = fifteen * i3 * i2 * i2 - four * p2
            qx = qxx[j] * dx + qxy[j] * dy + qxz[j] * dz
            qy = qxy[j] * dx + qyy[j] * dy + qyz[j] * dz
            qz = qxz[j] * dx + qyz[j] * dy + qzz[j] * dz
            along = m[j] * w1 + half * (
                (qxx[j] + qyy[j] + qzz[j]) * w2 + (dx * qx + dy * qy + dz * qz) * w3
            )
            along = along if r2 < unity else zero
            w2 = w2 if r2 < unity else zero
            ax += along * dx + w2 * qx
            ay += along * dy + w2 * qy
            az += along * dz + w2 * qz
        total[t, 0] += ax
        total[t, 1] += ay
        total[t, 2] += az


@inlined
def _add_potentials(
    kind: int,
    targets: Singles,
    sources: Singles,
    count: int,
    poly: Coefficients,
    h: np.float32,
    total: Floats,
) -> None:
    """Add the potential (6) of every source on every target, or (7) of nodes, in units of the
    cut-off."""
    unity, half, zero, least = np.float32(1), np.float32(0.5), np.float32(0), np.float32(1e-20)
    s0, s1, s2, s3 = np.float32(16 / 3), np.float32(48 / 5), np.float32(32 / 5), np.float32(14 / 5)
    t0, t1, t2, t3 = np.float32(1 / 15), np.float32(32 / 3), np.float32(16), np.float32(32 / 15)
    t4, three, two, quarter = np.float32(16 / 5), np.float32(3), np.float32(2), np.float32(0.25)
    x, y, z, m = sources[0], sources[1], sources[2], sources[3]
    qxx = sources[4]
    qyy = sources[5]
    qzz = sources[6]
    qxy = sources[7]
    qxz = sources[8]
    qyz = sources[9]
    for t in range(targets.shape[1]):
        tx, ty, tz = targets[0, t], targets[1, t], targets[2, t]
        summed = zero
        for j in range(count):
            dx, dy, dz = x[j] - tx, y[j] - ty, z[j] - tz
            r2 = dx * dx + dy * dy + dz * dz
            inverse = unity / math.sqrt(r2 + least)
            v = r2 + r2 - unity
            smooth = _polynomial(poly[3], 10, v)
            if kind == NODE:
                i3 = inverse * inverse * inverse
                w1 = i3 - _polynomial(poly[0], 10, v)
                w2 = -three * i3 * inverse * inverse - two * _polynomial(poly[1], 9, v)
                stretch = qxx[j] * dx * dx + qyy[j] * dy * dy + qzz[j] * dz * dz
                stretch += two * (qxy[j] * dx * dy + qxz[j] * dx * dz + qyz[j] * dy * dz)
                value = m[j] * (smooth - inverse) + half * (
                    (qxx[j] + qyy[j] + qzz[j]) * w1 + stretch * w2
                )
            else:
                u = r2 * inverse / h
                uu = u * u
                inside = uu * (s0 + uu * (s2 * u - s1)) - s3
                shell = t0 / max(u, quarter) + uu * (t1 + u * (u * (s1 - t3 * u) - t2)) - t4
                spline = (inside if u < half else shell) / h
                value = smooth + (spline if u < unity else -inverse)
            summed += value if r2 < unity else zero
        total[t] += summed


@compiled
def sort_tasks(
    tasks: TaskBuffer, count: int, first: int, starts: Integers, order: Integers
) -> None:
    """Order tasks by target leaf, then by kind.

    Those of leaf l and kind k begin at ``starts[3 (l - first) + k]``.
    """
    starts[:] = 0
    for i in range(count):
        starts[3 * (tasks.leaf[i] - first) + tasks.kind[i] + 1] += 1
    for slot in range(1, starts.shape[0]):
        starts[slot] += starts[slot - 1]
    place = starts.copy()
    for i in range(count):
        slot = 3 * (tasks.leaf[i] - first) + tasks.kind[i]
        order[place[slot]] = tasks.source[i]
        place[slot] += 1


def places_of(positions: Positions, box: float) -> Places:
    """Return coordinates as rows of integers of 2^-32 boxes, whose differences wrap to the nearest
    image."""
    parts = np.rint(positions.T * (_PARTS / box)).astype(np.int64)
    return np.ascontiguousarray(parts.astype(np.int32))


@inlined
def _place(value: float, box: float) -> np.int32:
    return np.int32(np.int64(np.rint(value * (_PARTS / box))))


@inlined
def _gather_all(
    places: Places, start: int, end: int, middle: Places, scale: np.float32, into: Singles
) -> None:
    """Gather particles relative to the middle of the target leaf, in cut-offs."""
    for d in range(3):
        for i in range(start, end):
            into[d, i - start] = np.float32(np.int32(places[d, i] - middle[d])) * scale


@inlined
def _gather_near(
    places: Places,
    start: int,
    end: int,
    middle: Places,
    half: Singles,
    scale: np.float32,
    into: Singles,
    at: int,
) -> int:
    """Gather the particles within the cut-off of the target's box from ``at`` on; return their
    end."""
    unity, zero = np.float32(1), np.float32(0)
    mx, my, mz = middle[0], middle[1], middle[2]
    hx, hy, hz = half[0], half[1], half[2]
    for i in range(start, end):
        x = np.float32(np.int32(places[0, i] - mx)) * scale
        y = np.float32(np.int32(places[1, i] - my)) * scale
        z = np.float32(np.int32(places[2, i] - mz)) * scale
        into[0, at], into[1, at], into[2, at] = x, y, z
        x, y, z = max(abs(x) - hx, zero), max(abs(y) - hy, zero), max(abs(z) - hz, zero)
        # No branch, which would be mispredicted half of the time.
        at += int(x * x + y * y + z * z < unity)
    return at


@inlined
def _fill_up(sources: Singles, count: int) -> int:
    """Fill the last vector with sources that are too far away to act; return the new count."""
    whole = (count + LANES - 1) // LANES * LANES
    for i in range(count, whole):
        sources[0, i], sources[1, i], sources[2, i] = np.float32(4), np.float32(4), np.float32(4)
        for k in range(3, 10):
            sources[k, i] = np.float32(0)
    return whole


@inlined
def _gather_node(
    tree: Tree, node: int, middle: Floats, box: float, cutoff: float, into: Singles, at: int
) -> None:
    for d in range(3):
        away = tree.centre[node, d] - middle[d]
        away -= box * np.rint(away / box)
        into[d, at] = np.float32(away / cutoff)
    into[3, at] = np.float32(tree.mass[node])
    for k in range(6):
        into[4 + k, at] = np.float32(tree.moments[node, k] / (cutoff * cutoff))


# One loop nest, because a kernel that is divided differently may round differently.
@compiled
def compute_leaves(  # noqa: C901
    tree: Tree,
    places: Places,
    first: int,
    begin: int,
    end: int,
    starts: Integers,
    order: Integers,
    lengths: Floats,
    poly: Coefficients,
    force: Floats,
    work: Floats,
    potential: Floats,
) -> None:
    """Add the forces of the sorted tasks of leaves ``begin`` to ``end`` - 1 to ``force``.

    ``lengths`` are the box, the cut-off and h; ``first`` is the first leaf of the buffer. ``work``
    of a leaf becomes the pairs and the node interactions computed for it. ``potential`` has a value
    per particle, or none if it is not wanted.
    """
    box, cutoff = lengths[0], lengths[1]
    h = np.float32(lengths[2] / cutoff)
    scale = np.float32(box / _PARTS / cutoff)
    sources = np.empty((10, BLOCK), np.float32)
    middle, half = np.empty(3, np.int32), np.empty(3, np.float32)
    for leaf in range(begin, end):
        node = tree.leaves[leaf]
        low, high = tree.start[node], tree.end[node]
        for d in range(3):
            middle[d] = _place(tree.middle[node, d], box)
            half[d] = np.float32(tree.half[node, d] / cutoff + 1e-6)
        targets = np.empty((3, high - low), np.float32)
        _gather_all(places, low, high, middle, scale, targets)
        total, phi = np.zeros((high - low, 3)), np.zeros(high - low)
        for kind in range(3):
            slot = 3 * (leaf - first) + kind
            held = 0
            for i in range(starts[slot], starts[slot + 1]):
                source = order[i]
                more = 1 if kind == NODE else tree.end[source] - tree.start[source]
                done = 0
                while done < more:
                    part = min(more - done, BLOCK - held)
                    if kind == NODE:
                        _gather_node(tree, source, tree.middle[node], box, cutoff, sources, held)
                        held += 1
                    else:
                        at = tree.start[source] + done
                        held = _gather_near(
                            places, at, at + part, middle, half, scale, sources, held
                        )
                    done += part
                    if held == BLOCK:
                        _sum(kind, targets, sources, held, poly, h, total)
                        if potential.size:
                            _add_potentials(kind, targets, sources, held, poly, h, phi)
                        work[leaf, min(kind, 1)] += held * (high - low)
                        held = 0
            if held:
                whole = _fill_up(sources, held)
                _sum(kind, targets, sources, whole, poly, h, total)
                if potential.size:
                    _add_potentials(kind, targets, sources, whole, poly, h, phi)
                work[leaf, min(kind, 1)] += held * (high - low)
        for t in range(high - low):
            for d in range(3):
                force[low + t, d] += total[t, d] / (cutoff * cutoff)
            if potential.size:
                potential[low + t] += phi[t] / cutoff


@inlined
def _sum(
    kind: int,
    targets: Singles,
    sources: Singles,
    count: int,
    poly: Coefficients,
    h: np.float32,
    total: Floats,
) -> None:
    if kind == NODE:
        _sum_nodes(targets, sources, count, poly, total)
    elif kind == FAR:
        sum_far(targets, sources, count, poly, total)
    else:
        _sum_near(targets, sources, count, poly, h, total)
