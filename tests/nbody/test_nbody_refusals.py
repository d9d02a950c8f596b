"""What gravity cannot work with is refused by name; a spectrum by its shape is what it should
be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from nbody.boxes import clustered

from argosy.errors import InputError
from argosy.nbody.analysis.halos import find_halos
from argosy.nbody.analysis.picture import Slice, density_picture
from argosy.nbody.analysis.power import power_spectrum
from argosy.nbody.cosmology import Cosmology
from argosy.nbody.files.restart import read_restart
from argosy.nbody.files.snapshot import read_snapshot, write_snapshot
from argosy.nbody.force import gravity
from argosy.nbody.force.gravity import check_positions, list_packages
from argosy.nbody.force.hilbert import hilbert_keys
from argosy.nbody.force.tasks import target_cells
from argosy.nbody.force.tree import build_tree
from argosy.nbody.initial.conditions import initial_conditions
from argosy.nbody.initial.spectrum import linear_power

SOME = np.full((8, 3), 0.5)
CASES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: Cosmology(baryons=0.5),
        "baryons: found 0.5, expected at least 0 and less than the matter density",
    ),
    (
        lambda: find_halos(SOME, 1.0, linking=2.0),
        "linking: found 2.0, expected a part of the mean separation",
    ),
    (lambda: power_spectrum(SOME, 1.0, 3), "cells: found 3, expected at least 4 mesh cells"),
    (lambda: density_picture(SOME, 1.0, pixels=4), "pixels: found 4, expected 16 to 8192 pixels"),
    (
        lambda: density_picture(SOME, 1.0, part=Slice(depth=0.0)),
        "depth: found 0.0, expected a part of the box between",
    ),
    (
        lambda: check_positions(SOME[0], 1.0),
        'positions: found "shape (3,)", expected rows of three coordinates',
    ),
    (
        lambda: check_positions(SOME[:0], 1.0),
        'positions: found "shape (0, 3)", expected rows of three coordinates',
    ),
    (lambda: read_restart(Path("nowhere"), 0, 1), "restart.json: expected a restart mark"),
]


@pytest.mark.parametrize(("call", "says"), CASES, ids=[says for _, says in CASES])
def test_what_cannot_be_worked_with_is_refused_by_name(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert says in str(caught.value)


def test_a_snapshot_that_cannot_be_written_or_is_in_parts_is_told(tmp_path: Path) -> None:
    box = initial_conditions(box=30.0, per_side=4, redshift=10, seed=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InputError,
        match=r"Cannot write .*box.hdf5 because .*(File exists|Not a directory)",
    ):
        write_snapshot(tmp_path / "file" / "box.hdf5", box)
    write_snapshot(tmp_path / "box.hdf5", box)
    with h5py.File(tmp_path / "box.hdf5", "a") as file:
        file["Header"].attrs["NumFilesPerSnapshot"] = 2
    with pytest.raises(InputError, match=r"box.hdf5: found 2, expected a snapshot in one file"):
        read_snapshot(tmp_path / "box.hdf5")


def test_a_spectrum_by_its_shape_has_its_variance_and_its_slopes() -> None:
    """As k^n at long waves, as k^(n - 4) at short ones, with the knee at the shape; sigma8 as asked
    for."""
    cosmology = Cosmology()
    k = np.geomspace(1e-4, 1e2, 20001)
    power = linear_power(cosmology, k, shape=0.21)
    window = 3 * (np.sin(8 * k) - 8 * k * np.cos(8 * k)) / (8 * k) ** 3
    variance = np.sum((k**3 * power * window**2)[:-1] * np.diff(np.log(k))) / (2 * np.pi**2)
    assert np.sqrt(variance) == pytest.approx(cosmology.sigma8, rel=1e-3)
    slopes = np.gradient(np.log(power), np.log(k))
    assert slopes[0] == pytest.approx(cosmology.index, abs=0.02)
    assert slopes[-1] == pytest.approx(cosmology.index - 4, abs=0.1)
    wider = linear_power(cosmology, 2 * k, shape=0.42)
    np.testing.assert_allclose(wider / wider[0], power / power[0], rtol=1e-9)


def test_a_walk_with_more_tasks_than_its_buffer_takes_a_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    positions = clustered(200, 1.0, 3)
    keys = hilbert_keys(positions, 1.0)
    order = np.argsort(keys)
    tree = build_tree(keys[order], positions[order], leaf_size=8)
    cells, wanted = target_cells(tree, 32), np.ones(len(tree.leaves), bool)
    lengths = np.array([1.0, 0.4, 0.01])

    def packages() -> list[tuple[int, int, list[int]]]:
        found = list_packages(tree, cells, wanted, lengths, 0.01)
        return [(leaf, at, [*np.diff(p.starts)]) for p in found for leaf, at in [(p.first, p.last)]]

    whole = packages()
    monkeypatch.setattr(gravity, "_BUFFER", 2)
    parts = packages()
    assert len(parts) > len(whole) == 1
    assert [count for _, _, counts in parts for count in counts] == whole[0][2]
    assert [parts[0][0], *(last for _, last, _ in parts)] == [
        *(first for first, _, _ in parts),
        whole[0][1],
    ]
