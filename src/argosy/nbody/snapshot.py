"""Snapshots in GADGET's HDF5 format, which yt, pynbody and others read.

One file, dark matter as ``PartType1``: ``Coordinates`` in kpc/h, ``Velocities`` u = v_peculiar / sqrt(a) in km/s,
``ParticleIDs``; the header says box, expansion factor and cosmology. With the momenta of ``particles``, u = p / a^1.5.
A file appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from argosy.errors import InputError, Problem
from argosy.nbody.cosmology import Cosmology
from argosy.nbody.particles import Box, Particles, check_finite, wrapped

_CM_PER_MPC, _CM_PER_KPC, _GRAMS, _CM_PER_KM = 3.085678e24, 3.085678e21, 1.989e43, 1e5
_KPC = 1000.0
"""Per Mpc: files are in kpc/h, which readers take for granted; inside it is Mpc/h."""


def write_snapshot(path: Path, box: Box, *, overwrite: bool = False) -> None:
    """Write all of it, or nothing."""
    if path.exists() and not overwrite:
        raise InputError([Problem(file=str(path), expected="no file of this name", found="one that exists")])
    with writing(path) as file:
        _write_header(file, box)
        group = file.create_group("PartType1")
        group["Coordinates"] = box.particles.positions * _KPC
        group["Velocities"] = box.particles.momenta / box.expansion**1.5
        group["ParticleIDs"] = box.particles.ids.astype(np.uint64)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Any]:
    """An HDF5 file that takes its name when it is complete and on the disk; a kill before that leaves no trace."""
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
        raise InputError([Problem(file=str(path), expected="a writable file", found=str(error))]) from None


def _write_header(file: Any, box: Box) -> None:
    count, cosmology = len(box.particles), box.cosmology
    counts = np.array([0, count, 0, 0, 0, 0])
    masses = np.zeros(6)
    masses[1] = cosmology.particle_mass(box.size, count)
    header = {
        "NumPart_ThisFile": counts.astype(np.uint32),
        "NumPart_Total": counts.astype(np.uint32),
        "NumPart_Total_HighWord": np.zeros(6, np.uint32),
        "MassTable": masses,
        "Time": box.expansion,
        "Redshift": box.redshift,
        "BoxSize": box.size * _KPC,
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
    units = {"UnitLength_in_cm": _CM_PER_KPC, "UnitMass_in_g": _GRAMS, "UnitVelocity_in_cm_per_s": _CM_PER_KM}
    parameters = {**units, "Omega0": cosmology.matter, "OmegaLambda": cosmology.vacuum, "BoxSize": box.size * _KPC}
    parameters |= {"HubbleParam": cosmology.hubble, "Sigma8": cosmology.sigma8, "PrimordialIndex": cosmology.index}
    for name, values in (("Header", header | units), ("Parameters", parameters), ("Units", units)):
        file.create_group(name).attrs.update(values)


def read_snapshot(path: Path, *, rank: int = 0, processes: int = 1) -> Box:
    """The dark matter of a one-file GADGET HDF5 snapshot, in whatever length unit of Mpc/h or kpc/h it was written.

    Of several processes each reads its own part.
    """
    with reading(path) as file:
        header = file["Header"].attrs
        if int(header["NumFilesPerSnapshot"]) != 1:
            expected = "a snapshot in one file"
            raise InputError([Problem(file=str(path), expected=expected, found=str(header["NumFilesPerSnapshot"]))])
        unit = (
            float(dict(file["Parameters"].attrs).get("UnitLength_in_cm", _CM_PER_MPC)) if "Parameters" in file else 0.0
        )
        size, a = float(header["BoxSize"]), float(header["Time"])
        # Without a unit in the file, GADGET's habit decides: boxes in kpc/h are thousands of units wide.
        per_mpc = round(_CM_PER_MPC / unit, 9) if unit else (_KPC if size > 5000 else 1.0)
        group = file["PartType1"]
        count = len(group["ParticleIDs"])
        part = slice(count * rank // processes, count * (rank + 1) // processes)
        positions = np.asarray(group["Coordinates"][part], np.float64) / per_mpc
        momenta = np.asarray(group["Velocities"][part], np.float64) * a**1.5
        ids = np.asarray(group["ParticleIDs"][part], np.int64)
        extra = dict(file["Parameters"].attrs) if "Parameters" in file else {}
        cosmology = Cosmology(
            matter=float(header.get("Omega0", extra.get("Omega0", 0.308))),
            vacuum=float(header.get("OmegaLambda", extra.get("OmegaLambda", 0.692))),
            hubble=float(header.get("HubbleParam", extra.get("HubbleParam", 0.678))),
            baryons=float(header.get("OmegaBaryon", 0.0)),
            sigma8=float(extra.get("Sigma8", 0.83)),
            index=float(extra.get("PrimordialIndex", 0.96)),
        )
    particles = Particles(positions=positions, momenta=momenta, ids=ids)
    check_finite(particles, str(path))
    size /= per_mpc
    outside = (positions < 0) | (positions > size)
    if outside.any():
        first = int(np.argmax(outside.any(axis=1)))
        found = f"{positions[first].tolist()} for particle {ids[first]}"
        expected = f"coordinates within the box of {size:g} Mpc/h"
        raise InputError([Problem(file=str(path), path="PartType1/Coordinates", found=found, expected=expected)])
    inside = Particles(positions=wrapped(positions, size), momenta=momenta, ids=ids)
    return Box(size=size, expansion=a, cosmology=cosmology, particles=inside)


def num_particles(path: Path) -> int:
    """How many a snapshot has."""
    with reading(path) as file:
        return len(file["PartType1/ParticleIDs"])


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Any]:
    """An HDF5 file to read from; what is missing or broken in it is the user's input error."""
    try:
        with h5py.File(path, "r") as file:
            yield file
    except FileNotFoundError:
        raise InputError([Problem(file=str(path), expected="a file that exists")]) from None
    except KeyError as error:
        found = str(error.args[0]) if error.args else "an entry that is missing"
        raise InputError([Problem(file=str(path), expected="a complete GADGET HDF5 file", found=found)]) from None
    except OSError as error:
        raise InputError([Problem(file=str(path), expected="a complete GADGET HDF5 file", found=str(error))]) from None
