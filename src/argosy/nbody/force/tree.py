"""Build a binary tree over particles in the order of the Hilbert curve.

A node is a run of the curve that shares the leading bits of its keys; it is split where the next
bit that differs changes, which halves a box along one axis. Runs and not boxes define it, so any
part of the curve can be built alone, and gives the same nodes. Boxes are tight around the
particles; second moments are about the centre of mass, in the order xx, yy, zz, xy, xz, yz, per
particle of unit mass:

    (1)  Q of a node = sum over its halves of Q + n d d^T, with d from the node's centre of mass to
         the half's.

A third moment per mass is at most the reach b, from the centre of mass to the farthest corner,
times the second one:

    (2)  skew = b tr(Q) / M, which bounds what (5) of ``split`` omits.

A node's children have larger numbers than it has, so one pass from the last node to the first
computes everything.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from argosy.nbody.compiled import compiled, inlined
from argosy.nbody.force.hilbert import KEY_BITS, Keys, Positions

# Arrays of node numbers and of coordinates.
Integers = NDArray[np.int32]
Floats = NDArray[np.float64]

# The child of a leaf.
NOTHING = -1


class Tree(NamedTuple):
    """A tree as arrays over nodes that kernels can read; node 0 is the root."""

    start: Integers
    end: Integers
    """The particles of a node are start, ..., end - 1 in curve order; none if another process holds
    them."""
    left: Integers
    right: Integers
    """The children of a node; NOTHING for a leaf."""
    first_leaf: Integers
    last_leaf: Integers
    """The leaves of a node are ``leaves[first_leaf : last_leaf]``."""
    leaves: Integers
    """The nodes that are leaves, along the curve."""
    middle: Floats
    """The middle of the tight box."""
    half: Floats
    """Half the extents of the tight box."""
    mass: Floats
    """The mass in particles."""
    centre: Floats
    """The centre of mass."""
    moments: Floats
    """The second moments (1)."""
    reach: Floats
    """The distance from the centre of mass to the farthest corner of the box; no particle is
    farther away."""
    skew: Floats
    """The bound on third moments (2)."""

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return len(self.start)


MEASURED = ("middle", "half", "mass", "centre", "moments", "reach", "skew")
"""The fields of a tree that follow from the positions of particles, not from their place along the
curve."""


def build_tree(
    keys: Keys, positions: Positions, *, leaf_size: int = 32, least_bits: int = 6
) -> Tree:
    """Build the tree over sorted keys and their particles.

    A leaf has at most ``leaf_size`` particles and shares ``least_bits`` bits of the key: six keep
    it within a quarter of the box in every dimension, so that a target and a source within the
    cut-off have one nearest image.
    """
    structure = np.empty((6, 2 * len(keys)), np.int32)
    first, last = np.zeros(1, np.int64), np.full(1, len(keys))
    num_nodes = grow(keys, first, last, KEY_BITS - 1, leaf_size, least_bits, structure, 0)
    structure = structure[:, :num_nodes]
    leaves = np.flatnonzero(structure[2] == NOTHING).astype(np.int32)
    tree = empty_tree(structure, leaves)
    fill_leaves(tree, positions)
    merge_upwards(tree)
    return tree


def empty_tree(structure: Integers, leaves: Integers) -> Tree:
    """Return a tree whose boxes and moments are still to be computed."""
    num_nodes = structure.shape[1]
    links = np.zeros((2, num_nodes), np.int32)
    links[0, leaves] = np.arange(len(leaves))
    links[1, leaves] = np.arange(1, len(leaves) + 1)
    start, end, left, right = np.ascontiguousarray(structure[:4])
    return Tree(
        start=start,
        end=end,
        left=left,
        right=right,
        first_leaf=links[0],
        last_leaf=links[1],
        leaves=leaves,
        middle=np.zeros((num_nodes, 3)),
        half=np.zeros((num_nodes, 3)),
        mass=np.zeros(num_nodes),
        centre=np.zeros((num_nodes, 3)),
        moments=np.zeros((num_nodes, 6)),
        reach=np.zeros(num_nodes),
        skew=np.zeros(num_nodes),
    )


@inlined
def _grow(
    keys: Keys,
    first: int,
    last: int,
    top_bit: int,
    leaf_size: int,
    least_bits: int,
    nodes: Integers,
    count: int,
) -> int:
    """Append the nodes over one run of sorted keys; return the new number of nodes."""
    waiting = np.empty((4 * KEY_BITS, 4), np.int64)  # start, end, bit, parent
    waiting[0] = first, last, top_bit, -1
    depth = 1
    while depth:
        depth -= 1
        start, end, bit, parent = waiting[depth]
        node = count
        count += 1
        nodes[0, node], nodes[1, node], nodes[2, node], nodes[3, node] = start, end, -1, -1
        if parent >= 0:
            if nodes[2, parent] < 0:
                nodes[2, parent] = node
            else:
                nodes[3, parent] = node
        differs = keys[start] ^ keys[end - 1]
        while bit >= 0 and not (differs >> bit) & 1:
            bit -= 1
        nodes[4, node], nodes[5, node] = parent, bit
        if bit < 0 or (end - start <= leaf_size and bit < KEY_BITS - least_bits):
            continue
        low, high = start, end
        while low < high:
            between = (low + high) // 2
            if (keys[between] >> bit) & 1:
                high = between
            else:
                low = between + 1
        waiting[depth] = low, end, bit - 1, node
        waiting[depth + 1] = start, low, bit - 1, node
        depth += 2
    return count


@compiled
def grow(
    keys: Keys,
    firsts: Keys,
    lasts: Keys,
    top_bit: int,
    leaf_size: int,
    least_bits: int,
    nodes: Integers,
    count: int,
) -> int:
    """Append the nodes over runs of sorted keys to (start, end, left, right, parent, bit).

    The runs are ``keys[firsts[i]:lasts[i]]``, none of them empty; the nodes of one follow those of
    the run before, its root first. Returns the new number of nodes.
    """
    for run in range(firsts.shape[0]):
        count = _grow(keys, firsts[run], lasts[run], top_bit, leaf_size, least_bits, nodes, count)
    return count


@inlined
def _measure(tree: Tree, node: int) -> None:
    """Compute reach and skew (2) from box, centre and moments."""
    square = 0.0
    for d in range(3):
        away = tree.half[node, d] + abs(tree.centre[node, d] - tree.middle[node, d])
        square += away * away
    trace = tree.moments[node, 0] + tree.moments[node, 1] + tree.moments[node, 2]
    tree.reach[node] = np.sqrt(square)
    tree.skew[node] = tree.reach[node] * trace / tree.mass[node]


@compiled
def fill_leaves(tree: Tree, positions: Positions) -> None:
    """Compute the boxes and moments of the leaves that hold particles."""
    for leaf in tree.leaves:
        start, end = tree.start[leaf], tree.end[leaf]
        count = end - start
        if count == 0:
            continue
        for d in range(3):
            low = high = total = positions[start, d]
            for i in range(start + 1, end):
                value = positions[i, d]
                low, high = min(low, value), max(high, value)
                total += value
            tree.middle[leaf, d], tree.half[leaf, d] = (low + high) / 2, (high - low) / 2
            tree.centre[leaf, d] = total / count
        tree.mass[leaf] = count
        tree.moments[leaf] = 0.0
        for i in range(start, end):
            x = positions[i, 0] - tree.centre[leaf, 0]
            y = positions[i, 1] - tree.centre[leaf, 1]
            z = positions[i, 2] - tree.centre[leaf, 2]
            tree.moments[leaf, 0] += x * x
            tree.moments[leaf, 1] += y * y
            tree.moments[leaf, 2] += z * z
            tree.moments[leaf, 3] += x * y
            tree.moments[leaf, 4] += x * z
            tree.moments[leaf, 5] += y * z
        _measure(tree, leaf)


@compiled
def merge_upwards(tree: Tree) -> None:
    """Compute the boxes, moments (1) and leaf ranges of inner nodes from their children's."""
    for node in range(tree.start.shape[0] - 1, -1, -1):
        left, right = tree.left[node], tree.right[node]
        if left < 0:
            continue
        tree.first_leaf[node], tree.last_leaf[node] = tree.first_leaf[left], tree.last_leaf[right]
        left_mass, right_mass = tree.mass[left], tree.mass[right]
        mass = left_mass + right_mass
        tree.mass[node] = mass
        shift = np.empty(3)
        for d in range(3):
            low = min(
                tree.middle[left, d] - tree.half[left, d],
                tree.middle[right, d] - tree.half[right, d],
            )
            high = max(
                tree.middle[left, d] + tree.half[left, d],
                tree.middle[right, d] + tree.half[right, d],
            )
            tree.middle[node, d], tree.half[node, d] = (low + high) / 2, (high - low) / 2
            tree.centre[node, d] = (
                left_mass * tree.centre[left, d] + right_mass * tree.centre[right, d]
            ) / mass
            shift[d] = tree.centre[right, d] - tree.centre[left, d]
        between = left_mass * right_mass / mass  # n d d^T of both halves together
        for k in range(6):
            i = k if k < 3 else (0 if k < 5 else 1)
            j = k if k < 3 else (1 if k == 3 else 2)
            tree.moments[node, k] = (
                tree.moments[left, k] + tree.moments[right, k] + between * shift[i] * shift[j]
            )
        _measure(tree, node)
