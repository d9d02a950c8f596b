"""Initial conditions from tables as CAMB and CLASS write them, and from A_s."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from argosy.cli import main
from argosy.errors import InputError
from argosy.nbody.cosmology import Cosmology
from argosy.nbody.files.snapshot import read_snapshot
from argosy.nbody.initial.conditions import initial_conditions
from argosy.nbody.initial.spectrum import linear_power, sigma8_of
from argosy.nbody.initial.spectrum_table import SpectrumTable, read_spectrum


def table_file(path: Path, low: float = 1e-4, high: float = 50.0) -> Path:
    k = np.geomspace(low, high, 600)
    rows = np.stack([k, linear_power(Cosmology(), k), k], axis=1)
    np.savetxt(path, rows, header="k (h/Mpc)  P (Mpc/h)^3  something else")
    return path


def test_a_table_of_the_fit_gives_the_particles_of_the_fit(tmp_path: Path) -> None:
    table = read_spectrum(table_file(tmp_path / "pk.dat"))
    assert table.sigma8 == pytest.approx(Cosmology().sigma8, rel=1e-3)
    given = {"box": 100.0, "per_side": 8, "redshift": 49.0, "seed": 1}
    ours, theirs = initial_conditions(**given, table=table), initial_conditions(**given)
    np.testing.assert_allclose(ours.particles.positions, theirs.particles.positions, atol=1e-4)
    doubled = table.scaled_to(2 * table.sigma8)
    assert doubled.sigma8 == pytest.approx(2 * table.sigma8)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello", "expected columns of numbers"),
        ("1 2\n3 4\n", "found 2 x 2 numbers, expected at least 16 rows of k and P"),
        ("\n".join(f"{20 - i} 1" for i in range(18)), "expected rising k and P, all above 0"),
        ("\n".join(f"{i + 1} nan" for i in range(18)), "expected rising k and P, all above 0"),
    ],
)
def test_what_is_no_spectrum_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "pk.dat").write_text(text)
    with pytest.raises(InputError) as caught:
        read_spectrum(tmp_path / "pk.dat")
    assert says in str(caught.value)


def test_a_box_with_waves_beyond_the_table_is_refused(tmp_path: Path) -> None:
    table = read_spectrum(table_file(tmp_path / "pk.dat", high=0.5))
    with pytest.raises(
        InputError, match=r"spectrum: found .0.0001 to 0.5 h/Mpc., expected a table from 0.06"
    ):
        initial_conditions(box=100.0, per_side=64, redshift=49, seed=1, table=table)
    assert isinstance(table, SpectrumTable)


def test_planck_parameters_give_plancks_sigma8() -> None:
    """Planck 2018: A_s = 2.1e-9 and sigma8 = 0.811; the fit of the transfer function is good to
    some per cent."""
    planck = Cosmology(matter=0.3153, vacuum=0.6847, hubble=0.6736, baryons=0.0493, index=0.9649)
    assert sigma8_of(planck, 2.1e-9) == pytest.approx(0.811, rel=0.04)
    assert sigma8_of(planck, 8.4e-9) == pytest.approx(2 * sigma8_of(planck, 2.1e-9), rel=1e-9)
    with pytest.raises(InputError, match=r"A_s: found 2.1, expected a number from 1e-12 to 1e-06"):
        sigma8_of(replace(planck, sigma8=None), 2.1)


def test_the_command_takes_a_table_or_an_amplitude(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ic(name: str, *options: str) -> int:
        with pytest.raises(SystemExit) as stop:
            main(["nbody", "ic", "--per-side", "8", "-q", "-o", str(tmp_path / name), *options])
        return int(stop.value.code or 0)

    pk = str(table_file(tmp_path / "pk.dat"))
    assert ic("table.hdf5", "--spectrum", pk, "--sigma8", "0.7") == 0
    assert read_snapshot(tmp_path / "table.hdf5").cosmology.sigma8 == pytest.approx(0.7)
    assert ic("amplitude.hdf5", "--as", "2e-9") == 0
    assert read_snapshot(tmp_path / "amplitude.hdf5").cosmology.sigma8 == pytest.approx(
        0.8, rel=0.1
    )
    assert ic("no.hdf5", "--as", "2e-9", "--spectrum", pk) == 2
    assert "--as cannot be combined with --spectrum" in capsys.readouterr().err
