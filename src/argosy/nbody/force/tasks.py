"""List which leaves and nodes act on which leaf, as tasks, by a dual tree traversal.

A pair of a target node and a source node is

    (1)  dropped, if the gap between their boxes is at least the cut-off;
    (2)  accepted, if the gap is at least the softening's radius h, so that no pair of them is
         softened, and with the distance d of the source's centre of mass from the target's box, its
         reach b and its skew

             b < 0.8 d   and   skew < tolerance x d^3:

         the source acts as one node on every leaf of the target, with a relative error of about
         skew / d^3 at most;
    (3)  a leaf-leaf task, if neither has children;
    (4)  else opened, the wider of the two first.

The walk starts from one target *cell* at a time, a node of some hundred particles, and writes whole
cells into a buffer; while one buffer is computed, the next is filled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from argosy.nbody.compiled import compiled, inlined
from argosy.nbody.force.tree import Integers, Tree

# One boolean per leaf or particle.
Flags = NDArray[np.bool_]

# The kinds of tasks: a node as a whole; a leaf beyond the softening; a leaf that may be within.
NODE, FAR, NEAR = 0, 1, 2


# Nodes with at most this number of particles are computed one by one: a node costs as much as three
# particles.
FEWEST = 4.0
# The square of 0.8 in (2).
NEAREST = 0.64


class TaskBuffer(NamedTuple):
    """The tasks of consecutive target leaves, which are in the order of the walk."""

    leaf: Integers
    """The target leaf, by its number along the curve."""
    source: Integers
    """The source node."""
    kind: Integers


def empty_buffer(capacity: int) -> TaskBuffer:
    """Return a buffer for ``capacity`` tasks."""
    return TaskBuffer(*(np.empty(capacity, np.int32) for _ in range(3)))


def target_cells(tree: Tree, most_particles: int) -> Integers:
    """Return the nodes at which walks begin, along the curve.

    They are the largest nodes with at most ``most_particles`` particles, or larger leaves.
    """
    count = tree.end - tree.start
    small = (count <= most_particles) | (tree.left < 0)
    inner = np.flatnonzero(tree.left >= 0)
    parent = np.full(tree.num_nodes, -1, np.int32)
    parent[tree.left[inner]] = inner
    parent[tree.right[inner]] = inner
    top = small & ((parent < 0) | ~small[parent])
    cells = np.flatnonzero(top).astype(np.int32)
    return cells[np.argsort(tree.start[cells], kind="stable")]


@inlined
def _distances(tree: Tree, target: int, source: int, box: float) -> tuple[float, float]:
    """Return the squared gap between the boxes, and the squared distance to the source's centre of
    mass.

    The latter is measured from the target's box.
    """
    gap = 0.0
    apart = 0.0
    for d in range(3):
        half = tree.half[target, d]
        away = abs(tree.middle[source, d] - tree.middle[target, d])
        away = max(min(away, box - away) - half - tree.half[source, d], 0.0)
        gap += away * away
        away = abs(tree.centre[source, d] - tree.middle[target, d])
        away = max(min(away, box - away) - half, 0.0)
        apart += away * away
    return gap, apart


@compiled
def list_tasks(
    tree: Tree,
    cells: Integers,
    wanted: Flags,
    first: int,
    box: float,
    cutoff: float,
    softened: float,
    tolerance: float,
    tasks: TaskBuffer,
) -> tuple[int, int]:
    """Fill the buffer with the tasks of whole cells from ``first`` on.

    Returns (the first cell that did not fit, number of tasks). Only ``wanted`` leaves of a cell get
    tasks.
    """
    waiting = np.empty((4096, 2), np.int32)
    capacity = tasks.leaf.shape[0]
    count = 0
    for cell in range(first, cells.shape[0]):
        before = count
        waiting[0, 0], waiting[0, 1] = cells[cell], 0
        depth = 1
        while depth:
            depth -= 1
            target, source = waiting[depth]
            gap, apart = _distances(tree, target, source, box)
            if gap >= cutoff * cutoff:  # (1)
                continue
            inner = tree.left[source] >= 0
            leaf_leaf = not inner and tree.left[target] < 0
            reach, skew = tree.reach[source], tree.skew[source]
            accepted = (
                tree.mass[source] > FEWEST
                and gap >= softened * softened
                and reach * reach < NEAREST * apart
            )
            accepted = accepted and skew * skew < tolerance * tolerance * apart * apart * apart
            if accepted or leaf_leaf:  # (2), (3)
                kind = NODE if accepted else (NEAR if gap < softened * softened else FAR)
                for leaf in range(tree.first_leaf[target], tree.last_leaf[target]):
                    if not wanted[leaf]:
                        continue
                    if count == capacity:
                        return cell, before
                    tasks.leaf[count], tasks.source[count], tasks.kind[count] = leaf, source, kind
                    count += 1
            elif inner and (reach >= tree.reach[target] or tree.left[target] < 0):  # (4)
                waiting[depth, 0], waiting[depth, 1] = target, tree.right[source]
                waiting[depth + 1, 0], waiting[depth + 1, 1] = target, tree.left[source]
                depth += 2
            else:
                waiting[depth, 0], waiting[depth, 1] = tree.right[target], source
                waiting[depth + 1, 0], waiting[depth + 1, 1] = tree.left[target], source
                depth += 2
    return cells.shape[0], count
