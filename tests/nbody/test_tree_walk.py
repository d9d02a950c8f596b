"""The curve, the tree and the walk: every particle once, every pair within the cut-off once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbody.boxes import clustered

from argosy.nbody.force.hilbert import BITS, hilbert_keys
from argosy.nbody.force.split import DEGREE, SPLINE, ForceSplit, smooth_factor
from argosy.nbody.force.tasks import NODE, empty_buffer, list_tasks, target_cells
from argosy.nbody.force.tree import Tree, build_tree


def grown(count: int, seed: int, leaf_size: int) -> tuple[Tree, np.ndarray]:
    positions = clustered(count, 1.0, seed)
    keys = hilbert_keys(positions, 1.0)
    order = np.argsort(keys)
    return build_tree(keys[order], positions[order], leaf_size=leaf_size), positions[order]


def test_the_curve_steps_from_cell_to_neighbouring_cell() -> None:
    side = 16
    cells = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    keys = hilbert_keys((cells + 0.5) / side, 1.0) >> 3 * (BITS - 4)
    assert sorted(keys) == list(range(side**3))
    path = cells[np.argsort(keys)]
    assert (np.abs(np.diff(path, axis=0)).sum(axis=1) == 1).all()


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 400), st.integers(0, 99), st.integers(1, 40))
def test_a_tree_holds_every_particle_once_and_knows_its_moments(
    count: int, seed: int, leaf_size: int
) -> None:
    tree, positions = grown(count, seed, leaf_size)
    leaves = [(tree.start[leaf], tree.end[leaf]) for leaf in tree.leaves]
    assert [start for start, _ in leaves] == [0, *(end for _, end in leaves[:-1])]
    assert leaves[-1][1] == count
    assert max(end - start for start, end in leaves) <= leaf_size
    for node in range(tree.num_nodes):
        mine = positions[tree.start[node] : tree.end[node]]
        low, high = mine.min(axis=0), mine.max(axis=0)
        np.testing.assert_allclose(tree.middle[node], (low + high) / 2, atol=1e-12)
        np.testing.assert_allclose(tree.half[node], (high - low) / 2, atol=1e-12)
        np.testing.assert_allclose(tree.centre[node], mine.mean(axis=0), atol=1e-12)
        away = mine - mine.mean(axis=0)
        moments = (away.T @ away)[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]
        np.testing.assert_allclose(tree.moments[node], moments, atol=1e-12 * count)
        first, last = tree.first_leaf[node], tree.last_leaf[node]
        assert (leaves[first][0], leaves[last - 1][1]) == (tree.start[node], tree.end[node])


@pytest.mark.parametrize("tolerance", [0.0, 0.01])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_walk_lists_every_pair_within_the_cutoff_once(tolerance: float, seed: int) -> None:
    count, cutoff = 600, 0.2
    tree, positions = grown(count, seed, leaf_size=8)
    buffer = empty_buffer(1 << 20)
    cells = target_cells(tree, 64)
    assert sum(tree.end[cells] - tree.start[cells]) == count
    done, num_tasks = list_tasks(
        tree, cells, np.ones(len(tree.leaves), bool), 0, 1.0, cutoff, 0.001, tolerance, buffer
    )
    assert done == len(cells)
    times = np.zeros((count, count), int)
    for leaf, source, kind in zip(*(part[:num_tasks] for part in buffer), strict=True):
        target = tree.leaves[leaf]
        assert kind == NODE or tree.left[source] < 0
        times[tree.start[target] : tree.end[target], tree.start[source] : tree.end[source]] += 1
    away = positions[None] - positions[:, None]
    away -= np.rint(away)
    within = (away**2).sum(axis=2) < cutoff**2
    assert times.max() == 1
    assert (times[within] == 1).all()
    assert (num_tasks > 0) and (tolerance > 0) == bool((buffer.kind[:num_tasks] == NODE).any())


def test_a_buffer_that_is_full_ends_with_a_whole_cell() -> None:
    tree, _ = grown(600, 3, leaf_size=8)
    cells, whole = target_cells(tree, 64), empty_buffer(1 << 20)
    _, num_tasks = list_tasks(
        tree, cells, np.ones(len(tree.leaves), bool), 0, 1.0, 0.2, 0.001, 0.01, whole
    )
    part, collected, at = empty_buffer(num_tasks // 3), [], 0
    while at < len(cells):
        before = at
        at, count = list_tasks(
            tree, cells, np.ones(len(tree.leaves), bool), at, 1.0, 0.2, 0.001, 0.01, part
        )
        assert at > before
        collected += list(zip(part.leaf[:count], part.source[:count], strict=True))
    assert collected == list(zip(whole.leaf[:num_tasks], whole.source[:num_tasks], strict=True))


@pytest.mark.parametrize("cutoff", [4.5, 5.5, 6.0])
def test_the_polynomial_is_the_smooth_part(cutoff: float) -> None:
    split = ForceSplit(scale=1.0, cutoff=cutoff, softening=0.05)
    rows = split.coefficients.astype(np.float64)
    assert rows.shape == (4, DEGREE + 1)
    for r in np.linspace(0.01, cutoff, 97):
        z = 2 * (r / cutoff) ** 2 - 1
        u = r / 2
        exact = math.erf(u) - 2 * u / math.sqrt(math.pi) * math.exp(-u * u)
        assert abs(np.polyval(rows[0][::-1], z) * (r / cutoff) ** 3 - exact) <= 2e-5
        step = 1e-4
        slope = [np.polyval(rows[0][::-1], z + sign * 2 * step) for sign in (-1, 1)]
        assert np.polyval(rows[1][::-1], z) == pytest.approx(
            (slope[1] - slope[0]) / (2 * step), rel=1e-3, abs=1e-2
        )


def test_the_smooth_factor_is_continuous_where_its_series_ends() -> None:
    assert smooth_factor(0.3 - 1e-9) == pytest.approx(smooth_factor(0.3), rel=1e-8)
    assert smooth_factor(0.0) == pytest.approx(4 / (3 * math.sqrt(math.pi)))
    assert SPLINE == 2.8
