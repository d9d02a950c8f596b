"""Compute the force on every particle of a periodic box, with mesh and tree in parallel.

    sort along the Hilbert curve -> tree
    -> [ mesh || list tasks -> compute them, two buffers in turn ] -> sum

The mesh runs in a thread of its own. One thread walks the tree and fills a buffer of tasks, while
the others compute the previous buffer. One thread computes the whole sum of a leaf, over its tasks
in the order of the walk, so the force does not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.errors import bad_input, invalid
from argosy.nbody.force.hilbert import Positions, hilbert_keys
from argosy.nbody.force.mesh import MeshShape, mesh_force, mesh_potential
from argosy.nbody.force.pairs import compute_leaves, places_of, sort_tasks
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.force.split import ForceSplit
from argosy.nbody.force.tasks import Flags, TaskBuffer, empty_buffer, list_tasks, target_cells
from argosy.nbody.force.tree import Floats, Integers, Tree, build_tree

# The initial number of tasks of a buffer.
_BUFFER = 1 << 16
# The cost of an interaction with a node, in pairs.
NODE_PAIRS = 3.0
# Pieces of a buffer per thread.
_CHUNKS = 4


@dataclass(frozen=True, kw_only=True)
class Forces:
    """The result that a force computation gives, per particle in the original order."""

    total: Floats
    """The sum over all other masses of m (x_j - x_i) / r^3, periodic, softened; times G it is the
    acceleration."""
    work: Floats
    """Pairs and node interactions computed for the particle."""


def compute_forces(
    positions: Positions, box: float, mass: float, settings: GravitySettings
) -> Forces:
    """Return the force on particles of one mass at ``positions``, all in [0, box)."""
    check_positions(positions, box)
    split = settings.split(box)
    keys = hilbert_keys(positions, box)
    order = np.argsort(keys, kind="stable")
    along = positions[order]
    with ThreadPoolExecutor(settings.threads + 1) as pool:
        smooth = pool.submit(_smooth_force, along, box, settings)
        tree = build_tree(keys[order], along, leaf_size=settings.leaf_size)
        cells = target_cells(tree, settings.cell_size)
        short_range = tree_force(tree, cells, along, box, split, settings, pool)
        force = short_range.force + smooth.result()
    total, work = np.empty_like(force), np.empty(len(force))
    total[order] = mass * force
    work[order] = spread_work(tree, short_range.work)
    return Forces(total=total, work=work)


def smooth_force(
    positions: Positions, box: float, mass: float, settings: GravitySettings
) -> Floats:
    """Return only the mesh's part of the force."""
    return mass * _smooth_force(positions, box, settings)


def short_force(
    positions: Positions, box: float, mass: float, settings: GravitySettings, active: Flags
) -> Floats:
    """Return only the tree's part of the force on the ``active`` particles; other rows are
    undefined."""
    order, along, tree = _sorted_tree(positions, box, settings)
    wanted = np.logical_or.reduceat(active[order], tree.start[tree.leaves])
    cells = target_cells(tree, settings.cell_size)
    cells = cells[np.logical_or.reduceat(wanted, tree.first_leaf[cells])]
    with ThreadPoolExecutor(settings.threads + 1) as pool:
        force = tree_force(
            tree, cells, along, box, settings.split(box), settings, pool, wanted
        ).force
    total = np.empty_like(force)
    total[order] = mass * force
    return total


def compute_potential(
    positions: Positions, box: float, mass: float, settings: GravitySettings
) -> Floats:
    """Return the potential at every particle: -sum of m / r over all others, up to a constant.

    The mean density does not contribute.
    """
    order, along, tree = _sorted_tree(positions, box, settings)
    cells, split = target_cells(tree, settings.cell_size), settings.split(box)
    with ThreadPoolExecutor(settings.threads + 1) as pool:
        short_range = tree_force(
            tree, cells, along, box, split, settings, pool, with_potential=True
        )
    total = np.empty(len(positions))
    total[order] = short_range.potential
    return mass * (
        total + mesh_potential(positions, mesh_shape(box, settings), workers=settings.threads)
    )


def _sorted_tree(
    positions: Positions, box: float, settings: GravitySettings
) -> tuple[NDArray[np.intp], Positions, Tree]:
    """Return the order of the particles along the Hilbert curve, the positions in it, and their
    tree."""
    keys = hilbert_keys(positions, box)
    order = np.argsort(keys, kind="stable")
    along = positions[order]
    return order, along, build_tree(keys[order], along, leaf_size=settings.leaf_size)


def _smooth_force(positions: Positions, box: float, settings: GravitySettings) -> Floats:
    """Return the mesh's part of the force of unit masses."""
    return mesh_force(positions, mesh_shape(box, settings), workers=settings.threads)


def mesh_shape(box: float, settings: GravitySettings) -> MeshShape:
    """Return the mesh of these settings."""
    return MeshShape(
        box=box, cells=settings.mesh_cells, scale=settings.split(box).scale, cloud=settings.cloud
    )


def spread_work(tree: Tree, leaf_work: Floats) -> Floats:
    """Return the interactions of each leaf, divided evenly among its particles, in curve order."""
    counts = (tree.end - tree.start)[tree.leaves]
    return np.repeat(leaf_work.sum(axis=1) / np.maximum(counts, 1), counts)


@dataclass(frozen=True, kw_only=True)
class TreeForce:
    """The short-range force, and the time that it took."""

    force: Floats
    """The force per particle, along the curve."""
    work: Floats
    """Node interactions and pairs per leaf."""
    walk_seconds: float
    """CPU seconds of listing and sorting tasks, in one thread."""
    pair_seconds: float
    """CPU seconds of computing tasks, summed over all threads; on a GPU its seconds."""
    potential: Floats
    """The potential per particle, including its own; empty if it was not requested."""

    @property
    def pair_equivalents(self) -> float:
        """Return the work in pairs."""
        nodes, pairs = self.work.sum(axis=0)
        return float(pairs + NODE_PAIRS * nodes)


def tree_force(
    tree: Tree,
    cells: Integers,
    positions: Positions,
    box: float,
    split: ForceSplit,
    settings: GravitySettings,
    pool: ThreadPoolExecutor,
    wanted: Flags | None = None,
    *,
    with_potential: bool = False,
) -> TreeForce:
    """Return the short-range force on the particles of ``cells``, or only of the ``wanted``
    leaves."""
    wanted = np.ones(len(tree.leaves), bool) if wanted is None else wanted
    force = np.zeros((len(positions), 3))
    work = np.zeros((len(tree.leaves), 2))
    potential = np.zeros(len(positions) if with_potential else 0)
    lengths = split.lengths(box)
    places = places_of(positions, box)
    parts = settings.threads * _CHUNKS
    walking = computing = 0.0
    running: list[Future[float]] = []
    packages = list_packages(tree, cells, wanted, lengths, settings.tolerance)
    while True:
        begin = time.thread_time()
        package = next(packages, None)
        walking += time.thread_time() - begin
        if package is None:
            break
        sums = (lengths, split.coefficients, force, work, potential)
        for first, last in _even_parts(package, parts):
            tasks = (package.first, first, last, package.starts, package.order)
            running.append(pool.submit(_timed, compute_leaves, tree, places, *tasks, *sums))
        # Two buffers: this one is computed while the walk fills the next.
        ready = max(len(running) - parts, 0)
        computing += sum(done.result() for done in running[:ready])
        running = running[ready:]
    computing += sum(done.result() for done in running)
    return TreeForce(
        force=force, work=work, walk_seconds=walking, pair_seconds=computing, potential=potential
    )


def _timed(function: Callable[..., None], *arguments: object) -> float:
    """Call a function and return its CPU seconds."""
    begin = time.thread_time()
    function(*arguments)
    return time.thread_time() - begin


@dataclass(frozen=True)
class Package:
    """The sorted tasks of leaves ``first`` to ``last`` - 1, which are computed together."""

    first: int
    last: int
    starts: Integers
    order: Integers


def list_packages(
    tree: Tree, cells: Integers, wanted: Flags, lengths: Floats, tolerance: float
) -> Iterator[Package]:
    """Yield the tasks of all cells, as many at a time as a buffer holds."""
    box, cutoff, softened = (float(length) for length in lengths)
    buffer: TaskBuffer = empty_buffer(_BUFFER)
    at = 0
    while at < len(cells):
        next_cell, count = list_tasks(
            tree, cells, wanted, at, box, cutoff, softened, tolerance, buffer
        )
        if next_cell == at:
            buffer = empty_buffer(2 * len(buffer.leaf))
            continue
        first, last = int(tree.first_leaf[cells[at]]), int(tree.last_leaf[cells[next_cell - 1]])
        starts, order = np.empty(3 * (last - first) + 1, np.int32), np.empty(count, np.int32)
        sort_tasks(buffer, count, first, starts, order)
        yield Package(first, last, starts, order)
        at = next_cell


def _even_parts(package: Package, parts: int) -> Iterator[tuple[int, int]]:
    """Yield runs of leaves with about the same number of tasks."""
    ends = package.starts[3::3]
    cuts = np.searchsorted(ends, np.linspace(0, ends[-1], parts + 1)[1:-1])
    edges = np.unique(np.concatenate(([0], cuts, [package.last - package.first])))
    for begin, end in itertools.pairwise(edges):
        yield package.first + int(begin), package.first + int(end)


def check_positions(positions: Positions, box: float) -> None:
    """Raise ``InputError`` if a particle is not finite or not in the box."""
    if positions.ndim != 2 or positions.shape[1] != 3 or len(positions) == 0:
        raise bad_input(
            "rows of three coordinates, at least one", f"shape {positions.shape}", "positions"
        )
    inside = (positions >= 0) & (positions < box)
    if not inside.all():
        particle, axis = np.argwhere(~inside)[0]
        actual = f"{positions[particle, axis]:g} for particle {particle}, axis {axis}"
        expected = f"coordinates of at least 0 and less than {box:g}"
        raise invalid("positions", actual, expected)
