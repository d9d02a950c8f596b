"""A file whose physics a run would get wrong is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from argosy.errors import InputError
from argosy.nbody.cosmology import Cosmology
from argosy.nbody.files.snapshot import read_snapshot, write_snapshot
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.initial.conditions import initial_conditions
from argosy.nbody.initial.spectrum import linear_power
from argosy.nbody.motion.evolve import BlockSteps, LocalGravity, evolve_in_blocks


def changed(tmp_path: Path, change: Callable[[Any], None]) -> Path:
    path = tmp_path / "box.hdf5"
    write_snapshot(path, initial_conditions(box=30.0, per_side=6, redshift=10, seed=1))
    with h5py.File(path, "a") as file:
        change(file)
    return path


def headers(**values: Any) -> Callable[[Any], None]:
    """Set a value in every group that holds it; None deletes it."""

    def change(file: Any) -> None:
        for name, value in values.items():
            for group in ("Header", "Parameters", "Units"):
                if name in file[group].attrs:
                    del file[group].attrs[name]
                    if value is not None:
                        file[group].attrs[name] = value

    return change


def with_masses(masses: np.ndarray) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        file["Header"].attrs["MassTable"] = np.zeros(6)
        file["PartType1/Masses"] = masses

    return change


def with_gas(file: Any) -> None:
    file["PartType0/Coordinates"] = np.zeros((4, 3))


def with_listed_stars(file: Any) -> None:
    file["Header"].attrs["NumPart_ThisFile"] = np.array([0, 216, 0, 0, 7, 0], np.uint32)


def with_repeated_ids(file: Any) -> None:
    file["PartType1/ParticleIDs"][10] = 5


def heavier(file: Any) -> None:
    file["Header"].attrs["MassTable"] = 2 * file["Header"].attrs["MassTable"]


def in_mpc_said_to_be_kpc(file: Any) -> None:
    file["PartType1/Coordinates"][...] = file["PartType1/Coordinates"][()] / 1e3
    headers(BoxSize=30.0)(file)


def without_unit_and_mass(file: Any) -> None:
    headers(UnitLength_in_cm=None)(file)
    heavier(file)


def with_another_cosmology_in_the_header(file: Any) -> None:
    file["Header"].attrs["Omega0"] = 0.5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            with_another_cosmology_in_the_header,
            r"Parameters/Omega0: found 0.308, expected 0.5, as in the header",
        ),
        (
            with_masses(np.linspace(1, 2, 216)),
            r"Masses: found masses from 1 to 2, expected 216 particles of one mass",
        ),
        (
            with_masses(np.ones(5)),
            r"Masses: found masses from 1 to 1, expected 216 particles of one mass",
        ),
        (
            with_gas,
            r"PartType0: found some particles of type 0 \(gas\), expected dark matter alone",
        ),
        (
            with_listed_stars,
            r"PartType4: found 7 particles of type 4 \(stars\), expected dark matter alone",
        ),
        (
            headers(NumPart_ThisFile=np.array([0, 200, 0, 0, 0, 0])),
            r"found 216 rows, expected 200, as NumPart_ThisFile",
        ),
        (
            heavier,
            r"MassTable: found 2 times the matter of Omega0 0.308 in this box, expected all of it",
        ),
        (headers(Omega0=0.25), r"MassTable: found 1.232 times the matter of Omega0 0.25"),
        (
            headers(MassTable=np.zeros(6)),
            r"MassTable: found none, expected a mass in MassTable or in PartType1/Masses",
        ),
        (
            headers(Omega0=None),
            r"Header: found no Omega0, expected Omega0, OmegaLambda, HubbleParam in the header",
        ),
        (
            headers(OmegaLambda=None, HubbleParam=None),
            r"Header: found no OmegaLambda, HubbleParam, expected",
        ),
        (with_repeated_ids, r"ParticleIDs: found 5 more than once, expected unique ids"),
        (in_mpc_said_to_be_kpc, r"MassTable: found 1e\+09 times the matter"),
        (
            without_unit_and_mass,
            r"found no UnitLength_in_cm, and masses that fit neither Mpc/h nor kpc/h",
        ),
        (
            headers(UnitLength_in_cm=-1.0),
            r"UnitLength_in_cm: found -1, expected from 1 to 1e\+33",
        ),
        (
            headers(UnitLength_in_cm=1e40),
            r"UnitLength_in_cm: found 1e\+40, expected from 1 to 1e\+33",
        ),
        (headers(BoxSize=1e-200), r"Header: found BoxSize 1e-200, .*expected a size from 1e-30"),
        (headers(BoxSize=1e200), r"Header: found BoxSize 1e\+200, .*expected a size from 1e-30"),
        (
            headers(Redshift=0.0),
            r"Header: found Redshift 0, Time 0.0909.*, expected Time as the expansion factor",
        ),
        (headers(Time=0.0), r"Header: found BoxSize 30000, Time 0, expected a size from"),
        (
            headers(NumPart_Total=np.array([0, 432, 0, 0, 0, 0])),
            r"NumPart_Total: found 432, expected 216 of type 1, as in the file",
        ),
        (
            headers(OmegaLambda=50.0),
            r"box.hdf5: OmegaLambda: found 50.0, expected a number from -10 to 10",
        ),
        (
            headers(OmegaLambda=3.0),
            r"box.hdf5: OmegaLambda: found 3.0, expected a universe that has expanded from a beginning",
        ),
        (headers(OmegaLambda=np.nan), r"OmegaLambda: found nan, expected a finite number"),
    ],
)
def test_wrong_physics_is_refused(tmp_path: Path, change: Callable[[Any], None], says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_snapshot(changed(tmp_path, change))


def test_the_masses_reveal_a_unit_that_is_missing(tmp_path: Path) -> None:
    assert read_snapshot(changed(tmp_path, headers(UnitLength_in_cm=None))).size == 30.0


def test_every_process_finds_an_id_that_is_repeated_elsewhere(tmp_path: Path) -> None:
    path = changed(tmp_path, with_repeated_ids)
    for rank in range(3):
        with pytest.raises(InputError, match="5 more than once"):
            read_snapshot(path, rank=rank, processes=3)


def test_a_file_without_a_spectrum_can_be_evolved_but_has_no_linear_theory(tmp_path: Path) -> None:
    box = read_snapshot(changed(tmp_path, headers(Sigma8=None)))
    assert box.cosmology.sigma8 is None
    with pytest.raises(InputError, match=r"the cosmology has no sigma8"):
        linear_power(box.cosmology, np.ones(1))
    write_snapshot(tmp_path / "again.hdf5", box)
    assert read_snapshot(tmp_path / "again.hdf5").cosmology == box.cosmology


def test_an_expansion_that_ends_is_told() -> None:
    closed = Cosmology(matter=3.0, vacuum=-1.0)
    with pytest.raises(
        InputError, match=r"expansion: found 20.0, expected an expansion factor that this universe"
    ):
        closed.hubble_rate(20.0)


def test_block_steps_without_softening_are_refused() -> None:
    box = initial_conditions(box=30.0, per_side=4, redshift=10, seed=1)
    engine = LocalGravity(
        size=30.0, strength=1.0, settings=GravitySettings(mesh_cells=32, softening=0.0)
    )
    with pytest.raises(
        InputError, match=r"softening: found 0.0, expected a length above 0 with block steps"
    ):
        evolve_in_blocks(box, (0.1, 0.2), engine, BlockSteps())
