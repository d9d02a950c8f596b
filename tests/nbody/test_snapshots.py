"""What is written can be read, by us and by others; what is broken is told and never overwrites
anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from argosy.errors import InputError
from argosy.nbody.analysis.picture import Slice, density_picture, png
from argosy.nbody.files.restart import last_restart, read_restart, write_restart
from argosy.nbody.files.snapshot import read_snapshot, write_snapshot
from argosy.nbody.initial.conditions import initial_conditions
from argosy.nbody.particles import Box, Particles


def small_box() -> Box:
    return initial_conditions(box=30.0, per_side=6, redshift=10, seed=1)


def test_a_snapshot_is_read_back(tmp_path: Path) -> None:
    box = small_box()
    write_snapshot(tmp_path / "new" / "box.hdf5", box)
    again = read_snapshot(tmp_path / "new" / "box.hdf5")
    assert (again.size, again.expansion, again.cosmology) == (
        box.size,
        box.expansion,
        box.cosmology,
    )
    np.testing.assert_allclose(again.particles.positions, box.particles.positions, rtol=1e-14)
    assert np.array_equal(again.particles.ids, box.particles.ids)
    np.testing.assert_allclose(again.particles.momenta, box.particles.momenta, rtol=1e-14)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["box.hdf5"]


def test_a_snapshot_is_gadgets(tmp_path: Path) -> None:
    """Names, shapes and units as GADGET's readers expect them."""
    box = small_box()
    write_snapshot(tmp_path / "box.hdf5", box)
    with h5py.File(tmp_path / "box.hdf5") as file:
        header = file["Header"].attrs
        assert header["NumPart_ThisFile"].tolist() == [0, 216, 0, 0, 0, 0]
        assert header["NumPart_Total_HighWord"].tolist() == [0] * 6
        assert header["Redshift"] == pytest.approx(10)
        assert (header["BoxSize"], header["UnitLength_in_cm"]) == (
            30e3,
            pytest.approx(3.0857e21, rel=1e-4),
        )  # kpc/h
        np.testing.assert_allclose(file["PartType1/Coordinates"][:], 1e3 * box.particles.positions)
        assert header["MassTable"][1] * 216 == pytest.approx(27.754 * 0.308 * 30.0**3, rel=1e-3)
        assert file["PartType1/Coordinates"].shape == file["PartType1/Velocities"].shape == (216, 3)
        peculiar = file["PartType1/Velocities"][:] * np.sqrt(box.expansion)
        np.testing.assert_allclose(peculiar, box.particles.momenta / box.expansion)


def test_an_existing_snapshot_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "box.hdf5"
    path.write_text("precious")
    with pytest.raises(InputError, match=r"box.hdf5 because a file of this name exists"):
        write_snapshot(path, small_box())
    assert path.read_text() == "precious"


def test_a_truncated_snapshot_is_told(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "box.hdf5", small_box())
    whole = (tmp_path / "box.hdf5").read_bytes()
    (tmp_path / "half.hdf5").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        InputError, match=r"half.hdf5: found .*truncated.*, expected a complete GADGET HDF5 file"
    ):
        read_snapshot(tmp_path / "half.hdf5")
    (tmp_path / "text.hdf5").write_text("hello")
    with pytest.raises(
        InputError, match=r"text.hdf5: found .*, expected a complete GADGET HDF5 file"
    ):
        read_snapshot(tmp_path / "text.hdf5")
    with pytest.raises(InputError, match=r"none.hdf5: there is no such file"):
        read_snapshot(tmp_path / "none.hdf5")


def test_a_snapshot_without_particles_is_told(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "box.hdf5", small_box())
    with h5py.File(tmp_path / "box.hdf5", "a") as file:
        del file["PartType1/Velocities"]
    with pytest.raises(
        InputError, match=r"box.hdf5: found .*Velocities.*, expected a complete GADGET HDF5 file"
    ):
        read_snapshot(tmp_path / "box.hdf5")


@pytest.mark.parametrize(
    ("dataset", "value", "message"),
    [
        (
            "Coordinates",
            np.nan,
            r"positions: found \[.*nan.*\] for particle 4, expected finite numbers",
        ),
        (
            "Velocities",
            np.inf,
            r"velocities: found \[.*inf.*\] for particle 4, expected finite numbers",
        ),
        (
            "Coordinates",
            31e3,
            r"Coordinates: found \[.*31.0.*\] for particle 4, expected coordinates within the box of 30",
        ),
    ],
)
def test_a_snapshot_with_impossible_particles_is_told(
    tmp_path: Path, dataset: str, value: float, message: str
) -> None:
    write_snapshot(tmp_path / "box.hdf5", small_box())
    with h5py.File(tmp_path / "box.hdf5", "a") as file:
        file[f"PartType1/{dataset}"][3, 1] = value
    with pytest.raises(InputError, match=message):
        read_snapshot(tmp_path / "box.hdf5")


def some_particles(count: int, seed: int) -> Particles:
    random = np.random.default_rng(seed)
    return Particles(
        positions=random.uniform(0, 1, (count, 3)),
        momenta=random.normal(size=(count, 3)),
        ids=np.arange(count),
    )


def test_a_restart_is_read_back_also_by_fewer_processes(tmp_path: Path) -> None:
    parts = [some_particles(5 + rank, rank) for rank in range(3)]
    for rank in (2, 1, 0):
        write_restart(
            tmp_path, parts[rank], step=7, rank=rank, processes=3, wait_for_all=lambda: None
        )
    assert last_restart(tmp_path) == (7, 3)
    for rank in range(3):
        assert np.array_equal(read_restart(tmp_path, rank, 3).positions, parts[rank].positions)
    together = np.concatenate([read_restart(tmp_path, rank, 2).ids for rank in range(2)])
    assert sorted(together) == sorted(np.concatenate([part.ids for part in parts]))
    assert len(read_restart(tmp_path, 4, 5)) == 0


WRITER = """
import sys
from pathlib import Path
import numpy as np
from argosy.nbody.particles import Particles
from argosy.nbody.files.restart import write_restart
step = 0
while True:
    step += 1
    values = np.full((20000, 3), float(step))
    state = Particles(positions=values, momenta=values, ids=np.full(20000, step))
    write_restart(Path(sys.argv[1]), state, step=step, rank=0, processes=1, wait_for_all=lambda: None)
    if step == 3:
        print("writing", flush=True)
"""


def test_a_restart_survives_a_kill_at_any_moment(tmp_path: Path) -> None:
    """Kill a process that does nothing but write, at times that vary; what it leaves is one whole
    state."""
    for turn in range(4):
        folder = tmp_path / str(turn)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, env=os.environ
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        try:
            writer.wait(timeout=0.0137 * (turn + 1))
        except subprocess.TimeoutExpired:
            writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        state = last_restart(folder)
        assert state is not None and state[0] >= 3
        kept = read_restart(folder, 0, 1)
        assert (
            (kept.positions == state[0]).all()
            and (kept.momenta == state[0]).all()
            and (kept.ids == state[0]).all()
        )


def test_a_picture_is_a_png_with_the_mass_where_it_is() -> None:
    random = np.random.default_rng(1)
    positions = np.concatenate(
        [random.normal((2.5, 7.5, 1.0), 0.1, (400, 3)), random.uniform(0, 10, (400, 3))]
    )
    image = density_picture(
        np.mod(positions, 10.0), 10.0, pixels=64, part=Slice(axis=2, begin=0.0, depth=0.2)
    )
    brightest = np.unravel_index(np.argmax(image.sum(axis=2)), (64, 64))
    assert np.abs(np.array(brightest) - (15.5, 15.5)).max() <= 2  # x to the right, y upwards
    file = png(image)
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    length = int.from_bytes(file[33:37], "big")
    rows = np.frombuffer(zlib.decompress(file[41 : 41 + length]), np.uint8).reshape(64, 1 + 64 * 3)
    assert np.array_equal(rows[:, 1:].reshape(64, 64, 3), image)


def test_a_picture_of_next_to_nothing_is_one_all_the_same() -> None:
    alone = np.full((1, 3), 5.0)
    shown, empty = (
        density_picture(alone, 10.0, pixels=16, part=Slice(begin=begin)) for begin in (0.4, 0.6)
    )
    assert shown.max() > empty.max()
    assert len(np.unique(empty.reshape(-1, 3), axis=0)) == 1


YT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import yt
yt.set_log_level(50)
data = yt.load(sys.argv[1])
all_data = data.all_data()
field = lambda name, unit: all_data["PartType1", name].to(unit).tolist()
print(json.dumps({
    "redshift": float(data.current_redshift),
    "hubble": float(data.hubble_constant),
    "matter": float(data.omega_matter),
    "ids": field("particle_index", "dimensionless"),
    "positions": field("particle_position", "Mpccm/h"),
    "velocities": field("particle_velocity", "km/s"),
    "mass": float(all_data["PartType1", "particle_mass"].sum().to("Msun")),
}))
"""


def test_yt_reads_what_was_written(tmp_path: Path) -> None:
    """An independent reader finds the same particles, in its own units."""
    box = initial_conditions(box=50.0, per_side=8, redshift=24, seed=2)
    write_snapshot(tmp_path / "ic.hdf5", box)
    done = subprocess.run(
        [sys.executable, "-c", YT, str(tmp_path / "ic.hdf5")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    order, ours = np.argsort(found["ids"]), np.argsort(box.particles.ids)
    assert found["redshift"] == pytest.approx(24)
    assert (found["hubble"], found["matter"]) == pytest.approx(
        (box.cosmology.hubble, box.cosmology.matter)
    )
    np.testing.assert_allclose(
        np.array(found["positions"])[order], box.particles.positions[ours], rtol=1e-6
    )
    peculiar = box.particles.momenta / box.expansion  # p = a^2 dx/dt, and yt tells a dx/dt
    np.testing.assert_allclose(
        np.array(found["velocities"])[order], peculiar[ours], rtol=1e-5, atol=1e-4
    )
    solar = box.cosmology.particle_mass(box.size, 512) * 1e10 * 512 / box.cosmology.hubble
    assert found["mass"] == pytest.approx(solar, rel=1e-3)
