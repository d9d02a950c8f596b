"""Divide the Hilbert curve among processes, and build the tree that they share.

A rank owns the particles whose keys lie in its run of the curve; runs may end anywhere. The curve's
*cells* are the largest nodes of the one tree over all particles that have at most ``cell_size`` of
them. They follow from counts alone, so every rank finds the same cells; each is built completely on
one rank, its home. With the boxes and moments of all cells, every rank has the tree above them. It
walks its own cells against that tree, finds which cells it will open, and requests their particles
from their homes: its local essential tree. Nothing in it depends on where the runs end, so neither
do the forces, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from argosy.nbody.compiled import compiled_exactly
from argosy.nbody.force.hilbert import KEY_BITS, Keys
from argosy.nbody.force.tasks import NODE, Flags, empty_buffer, list_tasks
from argosy.nbody.force.tree import (
    MEASURED,
    Integers,
    Tree,
    empty_tree,
    fill_leaves,
    grow,
    merge_upwards,
)
from argosy.nbody.particles import Floats, Names, Particles
from argosy.nbody.ranks import Ranks, gather, gather_equal, joined, send_rows, total

# The largest key.
END_OF_CURVE = np.int64((1 << KEY_BITS) - 1)


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The runs of the curve that are cells, in order; they are the same on every rank."""

    low: Keys
    high: Keys
    """The last key, inclusive."""


@dataclass(frozen=True, kw_only=True)
class EssentialTree:
    """The tree and the particles that a rank needs to compute the forces on its own particles."""

    tree: Tree
    positions: Floats
    """Own particles and those of other ranks, in the order of the curve."""
    targets: Integers
    """Nodes of the cells in which the rank owns active particles."""
    wanted: Flags
    """Leaves in which the rank owns active particles."""
    own: Integers
    """The positions of its active particles in ``positions``, in their original order."""
    received: int
    """The number of particles that came from other ranks."""


def to_owners(
    particles: Particles,
    carried: Floats,
    keys_of: Callable[[Floats], Keys],
    starts: Keys,
    ranks: Ranks,
) -> tuple[Particles, Floats, Keys]:
    """Send every particle, with its row of ``carried``, to the rank whose run contains it.

    The run of rank r begins at ``starts[r]``. Returns the particles that are now here, sorted along
    the curve, with their rows and keys.
    """
    keys = keys_of(particles.positions)
    owner = np.searchsorted(starts[1:], keys, side="right")
    columns = particles.positions, particles.momenta, particles.ids, carried, keys
    received = send_rows(ranks, columns, [owner == rank for rank in range(ranks.size)])
    positions, momenta, ids, carried, keys = joined(received)
    order = sorted_order(keys, ids)
    here = Particles(positions=positions, momenta=momenta, ids=ids)
    return here.taken(order), carried[order], keys[order]


def sorted_order(keys: Keys, ids: Names) -> Names:
    """Return the order by key, then by id.

    The parts that ranks send are already in order, and a stable sort merges them in one pass.
    """
    order: Names = np.argsort(keys, kind="stable")
    ordered = keys[order]
    tied = np.flatnonzero(ordered[1:] == ordered[:-1])
    if (ids[order[tied]] > ids[order[tied + 1]]).any():
        return np.lexsort((ids, keys))
    return order


def common_cells(keys: Keys, most_particles: int, ranks: Ranks) -> Cells:
    """Return the cells of all ranks' sorted keys.

    The first round of counting resolves nine bits of the key, every other one three.
    """
    found_cells: list[tuple[Keys, Keys]] = []
    low, bits, width = np.zeros(1, np.int64), KEY_BITS, 1 << 9
    while len(low):
        bits -= width.bit_length() - 1
        step = np.int64(1) << bits
        edges = low[:, None] + step * np.arange(width + 1)
        edges[:, -1] -= 1  # the end of the curve itself does not fit into a signed 64-bit integer
        places = np.searchsorted(keys, edges)
        places[:, -1] = np.searchsorted(keys, edges[:, -1], side="right")
        counts = total(ranks, np.diff(places, axis=1))
        while width > 1:  # halves, quarters, eighths, ...
            width //= 2
            low = np.concatenate([low, low + width * step])
            counts = np.concatenate([counts[:, :width], counts[:, width:]])
            whole = counts.sum(axis=1)
            small = (whole > 0) & (whole <= most_particles)
            if width == 1 and bits == 0:
                small = whole > 0
            found_cells.append((low[small], low[small] + (width * step - 1)))
            low, counts = low[whole > most_particles], counts[whole > most_particles]
        if bits == 0:
            break
        width = 1 << 3
    lows, highs = (np.concatenate(parts) for parts in zip(*found_cells, strict=True))
    order = np.argsort(lows)
    return Cells(low=lows[order], high=highs[order])


def essential_tree(
    particles: Particles,
    keys: Keys,
    active: Flags,
    box: float,
    *,
    ranks: Ranks,
    cell_size: int,
    leaf_size: int,
    cutoff: float,
    softened: float,
    tolerance: float,
) -> EssentialTree:
    """Build the part of the common tree that this rank's active particles need.

    The particles must be sorted along the curve.
    """
    cells = common_cells(keys, cell_size, ranks)
    cell = np.searchsorted(cells.high, keys)
    active_cells = _distinct(cell[active])
    home = _homes(_distinct(cell), len(cells.low), ranks)
    kept = _Rows.of(particles, keys).completed(cells, home, ranks)
    top = _top_tree(cells, kept, home, leaf_size, ranks)
    opened = _opened(top, top.leaves[active_cells], box, cutoff, softened, tolerance)
    away = opened[home[opened] != ranks.rank]
    sizes = top.mass[top.leaves].astype(np.int64)
    present = kept.fetched(cells, away, home, sizes, ranks)
    tree = _assemble(top, cells, present.keys, leaf_size)
    fill_leaves(tree, present.positions)
    merge_upwards(tree)
    own = present.places_of(keys[active], particles.ids[active])
    holds = np.zeros(len(present.ids) + 1, np.int64)
    np.add.at(holds, own + 1, 1)
    before = np.cumsum(holds)
    first, last = tree.start[tree.leaves], tree.end[tree.leaves]
    return EssentialTree(
        tree=tree,
        positions=present.positions,
        targets=top.leaves[active_cells],
        wanted=before[last] > before[first],
        own=own,
        received=len(present.ids) - len(particles),
    )


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Particles without momenta, which are sorted by key and then id."""

    keys: Keys
    ids: Names
    positions: Floats

    @classmethod
    def of(cls, particles: Particles, keys: Keys) -> _Rows:
        """Build rows from particles and their keys."""
        return cls(keys=keys, ids=particles.ids, positions=particles.positions)

    def completed(self, cells: Cells, home: Names, ranks: Ranks) -> _Rows:
        """Return all particles of every cell whose home is this rank."""
        target = home[np.searchsorted(cells.high, self.keys)]
        return self._sent([target == rank for rank in range(ranks.size)], ranks)

    def fetched(
        self, cells: Cells, wanted: Names, home: Names, sizes: Names, ranks: Ranks
    ) -> _Rows:
        """Return these rows and the particles of the wanted cells, which are fetched from their
        homes while other ranks fetch theirs.

        ``sizes`` are the particles of each cell.
        """
        requests = ranks.exchange([wanted[home[wanted] == rank] for rank in range(ranks.size)])
        chosen: list[Flags | slice] = []
        for requested in requests:
            begin = np.searchsorted(self.keys, cells.low[requested])
            end = np.searchsorted(self.keys, cells.high[requested], side="right")
            mask = np.zeros(len(self.keys) + 1, np.int64)
            np.add.at(mask, begin, 1)
            np.add.at(mask, end, -1)
            chosen.append(np.cumsum(mask)[:-1] > 0)
        chosen[ranks.rank] = slice(None)
        counts = np.bincount(home[wanted], weights=sizes[wanted], minlength=ranks.size)
        return self._sent(chosen, ranks, counts.astype(np.int64).tolist())

    def places_of(self, keys: Keys, ids: Names) -> Integers:
        """Return the positions of particles with these sorted keys; each must be here."""
        at = np.searchsorted(self.keys, keys)
        wrong = np.flatnonzero(self.ids[at] != ids)  # several particles have one key
        if len(wrong):
            place = np.argsort(self.ids)
            at[wrong] = place[np.searchsorted(self.ids, ids[wrong], sorter=place)]
        return at.astype(np.int32)

    def _sent(
        self,
        chosen: Sequence[Flags | slice],
        ranks: Ranks,
        counts: Sequence[int] | None = None,
    ) -> _Rows:
        """Send the chosen rows to each rank; return those kept and received, sorted."""
        received = send_rows(ranks, (self.keys, self.ids, self.positions), chosen, counts)
        own = received.pop(ranks.rank)
        if not any(len(part[0]) for part in received):
            return _Rows(keys=own[0], ids=own[1], positions=own[2])
        keys, ids, positions = joined(received)
        order = sorted_order(keys, ids)
        rows = keys[order], ids[order], positions[order]
        keys, ids, positions = _merged(own[0], own[1], own[2], *rows)
        return _Rows(keys=keys, ids=ids, positions=positions)


@compiled_exactly
def _merged(
    keys: Keys,
    ids: Names,
    positions: Floats,
    other_keys: Keys,
    other_ids: Names,
    other_positions: Floats,
) -> tuple[Keys, Names, Floats]:
    """Merge two sets of rows, each sorted by key and then id."""
    first, second = len(keys), len(other_keys)
    all_keys, all_ids = np.empty(first + second, np.int64), np.empty(first + second, np.int64)
    all_positions = np.empty((first + second, 3))
    i = j = 0
    for at in range(first + second):
        take = j == second
        if i < first and j < second:
            take = keys[i] < other_keys[j] or (keys[i] == other_keys[j] and ids[i] < other_ids[j])
        if take:
            all_keys[at], all_ids[at] = keys[i], ids[i]
            for d in range(3):
                all_positions[at, d] = positions[i, d]
            i += 1
        else:
            all_keys[at], all_ids[at] = other_keys[j], other_ids[j]
            for d in range(3):
                all_positions[at, d] = other_positions[j, d]
            j += 1
    return all_keys, all_ids, all_positions


def _distinct(ordered: Names) -> Names:
    """Return the values of a sorted array, each once."""
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def _homes(mine: Names, num_cells: int, ranks: Ranks) -> Names:
    """Return, per cell, the first rank that owns particles of it."""
    owns = np.zeros(num_cells, bool)
    owns[mine] = True
    owners = np.stack(gather_equal(ranks, np.packbits(owns)))
    home: Names = np.unpackbits(owners, axis=1, count=num_cells).argmax(axis=0)
    return home


def _top_tree(cells: Cells, kept: _Rows, home: Names, leaf_size: int, ranks: Ranks) -> Tree:
    """Build the common tree down to its cells, whose boxes and moments their homes have
    computed."""
    structure = np.empty((6, max(2 * len(kept.keys), 1)), np.int32)
    held = np.flatnonzero(home == ranks.rank)
    begins = np.searchsorted(kept.keys, cells.low[held])
    ends = np.searchsorted(kept.keys, cells.high[held], side="right")
    count = grow(kept.keys, begins, ends, KEY_BITS - 1, leaf_size, 6, structure, 0)
    grown = structure[:, :count]
    roots = np.flatnonzero(grown[4] < 0)
    forest = empty_tree(grown, np.flatnonzero(grown[2] < 0).astype(np.int32))
    fill_leaves(forest, kept.positions)
    merge_upwards(forest)
    columns = [getattr(forest, name)[roots] for name in MEASURED]
    known = np.concatenate(
        [column.reshape(len(roots), math.prod(column.shape[1:])) for column in columns], axis=1
    )
    # A particle that drifted within a step can make any rank the home of any cell: ranks are not in
    # curve order.
    parts = gather(ranks, known, np.bincount(home, minlength=ranks.size).tolist())
    known = np.concatenate(parts)[np.argsort(np.argsort(home, kind="stable"))]
    top = np.empty((6, 2 * len(cells.low)), np.int32)
    first, last = np.zeros(1, np.int64), np.full(1, len(cells.low))
    num_nodes = grow(cells.low, first, last, KEY_BITS - 1, 1, 0, top, 0)
    top = top[:, :num_nodes]
    tree = empty_tree(top, np.flatnonzero(top[2] < 0).astype(np.int32))
    at = 0
    for name in MEASURED:
        values = getattr(tree, name)
        width = values[0].size
        values[tree.leaves] = known[:, at : at + width].reshape(len(known), *values.shape[1:])
        at += width
    tree.start[:], tree.end[:] = 0, 0
    merge_upwards(tree)
    return tree


def _opened(
    top: Tree, targets: Integers, box: float, cutoff: float, softened: float, tolerance: float
) -> Names:
    """Return the cells that a walk from these targets does not accept as a whole."""
    wanted, opened, at = np.ones(len(top.leaves), bool), np.zeros(top.num_nodes, bool), 0
    buffer = empty_buffer(1 << 16)
    while at < len(targets):
        done, count = list_tasks(top, targets, wanted, at, box, cutoff, softened, tolerance, buffer)
        if done == at:
            buffer = empty_buffer(2 * len(buffer.leaf))
        opened[buffer.source[:count][buffer.kind[:count] != NODE]] = True
        at = done
    return np.flatnonzero(opened[top.leaves])


def _assemble(top: Tree, cells: Cells, keys: Keys, leaf_size: int) -> Tree:
    """Build the top tree together with the nodes below cells whose particles are here."""
    structure = np.empty((6, top.num_nodes + 2 * len(keys)), np.int32)
    structure[:4, : top.num_nodes] = top.start, top.end, top.left, top.right
    begins = np.searchsorted(keys, cells.low)
    ends = np.searchsorted(keys, cells.high, side="right")
    held = np.flatnonzero(ends > begins)
    runs = begins[held], ends[held]
    count = grow(keys, *runs, KEY_BITS - 1, leaf_size, 6, structure, top.num_nodes)
    roots = top.num_nodes + np.flatnonzero(structure[4, top.num_nodes : count] < 0)
    structure[:4, top.leaves[held]] = structure[:4, roots]  # a cell's node replaces its root
    structure = structure[:, :count]
    tree = empty_tree(structure, _leaves_in_order(structure))
    for name in MEASURED:
        getattr(tree, name)[: top.num_nodes] = getattr(top, name)
    return tree


@compiled_exactly
def _leaves_in_order(structure: Integers) -> Integers:
    """Return the leaves that can be reached from the root, along the curve."""
    waiting = np.zeros(8 * KEY_BITS, np.int32)
    leaves = np.empty(structure.shape[1], np.int32)
    depth, count = 1, 0
    while depth:
        depth -= 1
        node = waiting[depth]
        if structure[2, node] < 0:
            leaves[count] = node
            count += 1
        else:
            waiting[depth], waiting[depth + 1] = structure[3, node], structure[2, node]
            depth += 2
    return leaves[:count].copy()
