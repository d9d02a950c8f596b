"""The force on every particle of a periodic box: mesh beside tree, tasks listed while others are
computed.

    sort along the Hilbert curve -> tree -> [ mesh || list tasks -> compute them, two buffers in turn ] -> sum

The mesh runs in a thread of its own. One thread walks the tree and fills a buffer of tasks, while
the others compute the buffer before. Each leaf's sum is one thread's, over its tasks in the order
of the walk, so the force does not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from argosy.errors import InputError, Problem, bad_input
from argosy.nbody.force.hilbert import Positions, hilbert_keys
from argosy.nbody.force.mesh import MeshShape, mesh_force, mesh_potential
from argosy.nbody.force.pairs import compute_leaves, places_of, sort_tasks
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.force.split import ForceSplit
from argosy.nbody.force.tasks import Flags, TaskBuffer, empty_buffer, list_tasks, target_cells
from argosy.nbody.force.tree import Floats, Integers, Tree, build_tree

_BUFFER = 1 << 16
"""Tasks listed at a time, to begin with."""
NODE_PAIRS = 3.0
"""What the interaction with a node costs, in pairs."""
_CHUNKS = 4
"""Pieces of a buffer per thread."""


@dataclass(frozen=True, kw_only=True)
class Forces:
    """What a force computation gives, per particle in the order it was asked for."""

    total: Floats
    """Sum over all other masses of m (x_j - x_i) / r^3, periodic, softened: times G it is the
    acceleration."""
    work: Floats
    """Pairs and node interactions computed for the particle."""


def compute_forces(
    positions: Positions, box: float, mass: float, settings: GravitySettings
) -> Forces:
    """The force on particles of one mass at ``positions``, all in [0, box)."""
    check_positions(positions, box)
    split = settings.split(box)
    keys = hilbert_keys(positions, box)
    order = np.argsort(keys, kind="stable")
    along = positions[order]
    with ThreadPoolExecutor(settings.threads + 1) as pool:
        smooth = pool.submit(_smooth_force, along, box, settings)
        tree = build_tree(keys[order], along, leaf_size=settings.leaf_size)
        cells = target_cells(tree, settings.cell_size)
        found = tree_force(tree, cells, along, box, split, settings, pool)
        force = found.force + smooth.result()
    total, work = np.empty_like(force), np.empty(len(force))
    total[order] = mass * force
    work[order] = spread_work(tree, found.work)
    return Forces(total=total, work=work)


def smooth_force(
    positions: Positions, box: float, mass: float, settings: GravitySettings
) -> Floats:
    """The mesh's part alone."""
    return mass * _smooth_force(positions, box, settings)


def short_force(
    positions: Positions,
    box: float,
    mass: float,
    settings: GravitySettings,
    active: Flags,
) -> Floats:
    """The tree's part alone, on the ``active`` particles; on others it is anything."""
    keys = hilbert_keys(positions, box)
    order = np.argsort(keys, kind="stable")
    along = positions[order]
    tree = build_tree(keys[order], along, leaf_size=settings.leaf_size)
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
    """The potential at every particle: -sum of m / r over all others, up to a constant, without the
    mean density's."""
    keys = hilbert_keys(positions, box)
    order = np.argsort(keys, kind="stable")
    along = positions[order]
    tree = build_tree(keys[order], along, leaf_size=settings.leaf_size)
    cells, split = target_cells(tree, settings.cell_size), settings.split(box)
    with ThreadPoolExecutor(settings.threads + 1) as pool:
        found = tree_force(tree, cells, along, box, split, settings, pool, with_potential=True)
    total = np.empty(len(positions))
    total[order] = found.potential
    return mass * (
        total + mesh_potential(positions, mesh_shape(box, settings), workers=settings.threads)
    )


def _smooth_force(positions: Positions, box: float, settings: GravitySettings) -> Floats:
    return mesh_force(positions, mesh_shape(box, settings), workers=settings.threads)


def mesh_shape(box: float, settings: GravitySettings) -> MeshShape:
    return MeshShape(
        box=box, cells=settings.mesh_cells, scale=settings.split(box).scale, cloud=settings.cloud
    )


def spread_work(tree: Tree, leaf_work: Floats) -> Floats:
    """The interactions of each leaf, shared evenly by its particles, in curve order."""
    counts = (tree.end - tree.start)[tree.leaves]
    return np.repeat(leaf_work.sum(axis=1) / np.maximum(counts, 1), counts)


@dataclass(frozen=True, kw_only=True)
class TreeForce:
    """The short-range force, and what it took."""

    force: Floats
    """Per particle, along the curve."""
    work: Floats
    """Per leaf: node interactions, pairs."""
    walk_seconds: float
    """Listing and sorting tasks, in one thread."""
    pair_seconds: float
    """Computing them, over all threads together."""
    potential: Floats
    """Per particle, its own included; nothing if it was not asked for."""

    @property
    def pair_equivalents(self) -> float:
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
    """The short-range force on the particles of ``cells``; with ``wanted``, only on those of these
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
        begin = time.perf_counter()
        package = next(packages, None)
        walking += time.perf_counter() - begin
        if package is None:
            break
        for first, last in _even_parts(package, parts):
            arguments = (
                package.first,
                first,
                last,
                package.starts,
                package.order,
                lengths,
                split.coefficients,
            )
            running.append(
                pool.submit(
                    _timed, compute_leaves, tree, places, *arguments, force, work, potential
                )
            )
        # Two buffers: this one is computed while the walk fills the next.
        ready = max(len(running) - parts, 0)
        computing += sum(done.result() for done in running[:ready])
        running = running[ready:]
    computing += sum(done.result() for done in running)
    return TreeForce(
        force=force, work=work, walk_seconds=walking, pair_seconds=computing, potential=potential
    )


def _timed(function: Callable[..., None], *arguments: object) -> float:
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Package:
    """Sorted tasks of the leaves first, ..., last - 1."""

    first: int
    last: int
    starts: Integers
    order: Integers


def list_packages(
    tree: Tree, cells: Integers, wanted: Flags, lengths: Floats, tolerance: float
) -> Iterator[Package]:
    box, cutoff, softened = (float(length) for length in lengths)
    buffer: TaskBuffer = empty_buffer(_BUFFER)
    at = 0
    while at < len(cells):
        nearer, count = list_tasks(
            tree, cells, wanted, at, box, cutoff, softened, tolerance, buffer
        )
        if nearer == at:
            buffer = empty_buffer(2 * len(buffer.leaf))
            continue
        first, last = int(tree.first_leaf[cells[at]]), int(tree.last_leaf[cells[nearer - 1]])
        starts, order = np.empty(3 * (last - first) + 1, np.int32), np.empty(count, np.int32)
        sort_tasks(buffer, count, first, starts, order)
        yield Package(first, last, starts, order)
        at = nearer


def _even_parts(package: Package, parts: int) -> Iterator[tuple[int, int]]:
    """Runs of leaves with about the same number of tasks."""
    ends = package.starts[3::3]
    cuts = np.searchsorted(ends, np.linspace(0, ends[-1], parts + 1)[1:-1])
    edges = np.unique(np.concatenate(([0], cuts, [package.last - package.first])))
    for begin, end in itertools.pairwise(edges):
        yield package.first + int(begin), package.first + int(end)


def check_positions(positions: Positions, box: float) -> None:
    """Raise ``InputError`` where a particle is nowhere, or not in the box."""
    if positions.ndim != 2 or positions.shape[1] != 3 or len(positions) == 0:
        raise bad_input(
            "rows of three coordinates, at least one", f"shape {positions.shape}", where="positions"
        )
    inside = (positions >= 0) & (positions < box)
    if not inside.all():
        particle, axis = np.argwhere(~inside)[0]
        found = f"{positions[particle, axis]:g} for particle {particle}, axis {axis}"
        expected = f"coordinates of at least 0 and less than {box:g}"
        raise InputError([Problem(path="positions", found=found, expected=expected)])
