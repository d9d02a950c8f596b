"""Read and write snapshots in GADGET's HDF5 format, which yt, pynbody and others read.

A snapshot is one file with dark matter as ``PartType1``: ``Coordinates`` in kpc/h, ``Velocities`` u
= v_peculiar / sqrt(a) in km/s, ``ParticleIDs``; the header has the box, the expansion factor and
the cosmology. With the momenta of ``particles``, u = p / a^1.5. A file gets its name only when it
is complete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from argosy.document import check_readable
from argosy.errors import InputError, impossible, invalid, refused
from argosy.nbody.files.header import CM_PER_KM, CM_PER_KPC, GRAMS, KPC, check_ids, read_header
from argosy.nbody.particles import Box, Floats, Names, Particles, check_finite, wrapped

# The largest accepted number of bytes of an array per byte of its file; HDF5's compression reaches
# about 1000.
_MOST_PACKED = 2000


def write_snapshot(path: Path, box: Box, *, overwrite: bool = False) -> None:
    """Write a complete snapshot or nothing."""
    if path.exists() and not overwrite:
        raise impossible(f"write {path}", "a file of this name exists", "another name")
    with writing(path) as file:
        write_header(file, box, rows=len(box.particles), particles=len(box.particles))
        group = file.create_group("PartType1")
        group["Coordinates"] = box.particles.positions * KPC
        group["Velocities"] = box.particles.momenta / box.expansion**1.5
        group["ParticleIDs"] = box.particles.ids.astype(np.uint64)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Any]:
    """Yield an HDF5 file that gets its name when it is complete and on the disk.

    A kill before that leaves no file of this name.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with h5py.File(partial, "w") as file:
                yield file
            descriptor = os.open(partial, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise impossible(f"write {path}", error, "another file") from None


def write_header(file: Any, box: Box, *, rows: int, particles: int) -> None:
    """Write the header of a file with ``rows`` rows of a box of ``particles`` particles."""
    cosmology = box.cosmology
    counts = np.array([0, rows, 0, 0, 0, 0])
    masses = np.zeros(6)
    masses[1] = cosmology.particle_mass(box.size, particles)
    header = {
        "NumPart_ThisFile": counts.astype(np.uint32),
        "NumPart_Total": counts.astype(np.uint32),
        "NumPart_Total_HighWord": np.zeros(6, np.uint32),
        "MassTable": masses,
        "Time": box.expansion,
        "Redshift": box.redshift,
        "BoxSize": box.size * KPC,
        "NumFilesPerSnapshot": 1,
        "Omega0": cosmology.matter,
        "OmegaLambda": cosmology.vacuum,
        "OmegaBaryon": cosmology.baryons,
        "HubbleParam": cosmology.hubble,
        "Flag_Sfr": 0,
        "Flag_Cooling": 0,
        "Flag_StellarAge": 0,
        "Flag_Metals": 0,
        "Flag_Feedback": 0,
        "Flag_DoublePrecision": 1,
    }
    units = {
        "UnitLength_in_cm": CM_PER_KPC,
        "UnitMass_in_g": GRAMS,
        "UnitVelocity_in_cm_per_s": CM_PER_KM,
    }
    parameters = {
        **units,
        "Omega0": cosmology.matter,
        "OmegaLambda": cosmology.vacuum,
        "BoxSize": box.size * KPC,
    }
    parameters |= {"HubbleParam": cosmology.hubble, "OmegaBaryon": cosmology.baryons}
    if cosmology.sigma8 is not None:
        parameters |= {"Sigma8": cosmology.sigma8, "PrimordialIndex": cosmology.index}
    for name, values in (("Header", header | units), ("Parameters", parameters), ("Units", units)):
        file.create_group(name).attrs.update(values)


def read_snapshot(path: Path, *, rank: int = 0, processes: int = 1) -> Box:
    """Read the dark matter of a one-file GADGET HDF5 snapshot, in any unit of length.

    ``header`` lists what is rejected. If there are several processes, each reads its own part.
    """
    with reading(path) as file:
        count = num_rows(path, file, "PartType1/ParticleIDs")
        header = read_header(path, file, count)
        a, size = header.expansion, header.size
        part = slice(count * rank // processes, count * (rank + 1) // processes)
        positions = (
            read_array(path, file, "PartType1/Coordinates", rows=count, part=part) / header.per_mpc
        )
        momenta = read_array(path, file, "PartType1/Velocities", rows=count, part=part) * a**1.5
        every_id = read_names(path, file, "PartType1/ParticleIDs")
    check_ids(path, every_id)
    ids = every_id[part]
    particles = Particles(positions=positions, momenta=momenta, ids=ids)
    check_finite(particles, str(path))
    outside = (positions < 0) | (positions > size)
    if outside.any():
        first = int(np.argmax(outside.any(axis=1)))
        actual = f"{positions[first].tolist()} for particle {ids[first]}"
        expected = f"coordinates within the box of {size:g} Mpc/h"
        raise invalid("PartType1/Coordinates", actual, expected, file=str(path))
    inside = Particles(positions=wrapped(positions, size), momenta=momenta, ids=ids)
    return Box(size=size, expansion=a, cosmology=header.cosmology, particles=inside)


def num_particles(path: Path) -> int:
    """Return the number of particles of a snapshot."""
    with reading(path) as file:
        return num_rows(path, file, "PartType1/ParticleIDs")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Any]:
    """Yield an HDF5 file to read; raise ``InputError`` for anything that is missing or broken in
    it."""
    try:
        check_readable(path)
        with h5py.File(path, "r") as file:
            yield file
    except FileNotFoundError:
        raise refused("there is no such file", file=str(path)) from None
    except IsADirectoryError:
        raise invalid(file=str(path), expected="a file", found="a folder") from None
    except (
        KeyError,
        OSError,
        RuntimeError,
        TypeError,
        UnicodeError,
        ValueError,
    ) as error:  # the exceptions by which h5py reports a broken file
        actual = str(error.args[0]) if error.args else type(error).__name__
        raise invalid(
            file=str(path), expected="a complete GADGET HDF5 file", found=actual
        ) from None


def num_rows(path: Path, file: Any, name: str) -> int:
    """Return the rows of an array; raise ``InputError`` if it is larger than its file can hold.

    A small file may declare an array of a petabyte.
    """
    array = file[name]
    if (
        not isinstance(array, h5py.Dataset)
        or not array.shape
        or array.nbytes > _MOST_PACKED * path.stat().st_size
    ):
        raise _other(path, name, array, "an array of rows, no longer than this file can hold")
    return int(array.shape[0])


def read_array(path: Path, file: Any, name: str, *, rows: int, part: slice = slice(None)) -> Floats:
    """Read three numbers per row, of a part of the rows."""
    rows_found, array = num_rows(path, file, name), file[name]
    if rows_found != rows or array.shape != (rows, 3) or array.dtype.kind not in "iuf":
        raise _other(path, name, array, f"{rows} x 3 numbers")
    return np.asarray(array[part], np.float64)


def read_names(path: Path, file: Any, name: str) -> Names:
    """Read a whole number per row."""
    rows, array = num_rows(path, file, name), file[name]
    if array.shape != (rows,) or array.dtype.kind not in "iu":
        raise _other(path, name, array, "a whole number per row")
    return np.asarray(array[()]).astype(np.int64)


def _other(path: Path, name: str, array: Any, expected: str) -> InputError:
    """Return the error of an array with another shape or type."""
    actual = f"{array.shape} of {array.dtype}" if isinstance(array, h5py.Dataset) else "no array"
    return invalid(name, actual, expected, file=str(path))
