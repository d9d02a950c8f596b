"""Read and check the header of a snapshot; wrong physics is rejected, and nothing is defaulted.

A run moves dark matter of one mass in a periodic box. A file with any of the following would run
and give wrong results:

    (1)  particles of other types or in other files, several masses, repeated ids, a time that
         contradicts the redshift, a group that contradicts the header;
    (2)  a total mass that is not Omega0 of the critical density times the volume, to 1 %: then a
         unit, the cosmology, or a part of the matter is wrong;
    (3)  no cosmology, or no unit of length if the masses do not determine it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from argosy.errors import InputError, invalid
from argosy.nbody.cosmology import Cosmology
from argosy.nbody.particles import Names

# Units of GADGET in cm and g; GRAMS is 1e10 solar masses.
CM_PER_MPC, CM_PER_KPC, GRAMS, CM_PER_KM = 3.085678e24, 3.085678e21, 1.989e43, 1e5
# kpc per Mpc: files are in kpc/h, which readers assume; inside the program lengths are in Mpc/h.
KPC = 1000.0
# Expansion factors beyond this are taken for input errors.
_LATEST = 1e3
# Largest BoxSize in any unit, and largest unit of length in cm. Floats hold their cubes.
_LARGEST, _LONGEST_UNIT = 1e30, 1e33
# The accepted relative difference between the matter in a file and that of its cosmology; units and
# constants differ by 0.1 %.
_SAME_MASS = 1e-2
# The accepted relative difference between time and redshift.
_SAME_TIME = 1e-3
# Values that several groups of a file may state, and the accepted relative difference.
_STATED_TWICE = (
    "BoxSize",
    "Omega0",
    "OmegaLambda",
    "OmegaBaryon",
    "HubbleParam",
    "UnitLength_in_cm",
    "UnitMass_in_g",
    "UnitVelocity_in_cm_per_s",
)
_SAME_PARAMETER = 1e-6
# The names that the values of a cosmology have in a file.
_PARAMETERS = {
    "matter": "Omega0",
    "vacuum": "OmegaLambda",
    "hubble": "HubbleParam",
    "baryons": "OmegaBaryon",
    "sigma8": "Sigma8",
    "index": "PrimordialIndex",
}
_OTHERS = ("gas", "", "disk", "bulge", "stars", "black holes")
"""Names of GADGET's particle types beside the dark matter, which is type 1."""


@dataclass(frozen=True, kw_only=True)
class SnapshotHeader:
    """The header values that a run needs besides the particles."""

    size: float
    """The side of the box in Mpc/h."""
    expansion: float
    per_mpc: float
    """The file's units of length per Mpc/h."""
    cosmology: Cosmology


def read_header(path: Path, file: Any, count: int) -> SnapshotHeader:
    """Read the header of a file with ``count`` particles of type 1.

    Raises ``InputError`` for (1), (2) and (3).
    """
    header = dict(file["Header"].attrs)
    known = dict(header)
    for group in ("Units", "Parameters"):
        _check_same(path, known, group, _attributes(file, group))
        known |= _attributes(file, group)
    files = number(path, header, "NumFilesPerSnapshot")
    if files != 1:
        raise invalid(file=str(path), expected="a snapshot in one file", found=f"{files:g}")
    _check_types(path, file, header, count)
    size, a = number(path, header, "BoxSize"), number(path, header, "Time")
    if not (1 / _LARGEST <= size <= _LARGEST and 0 < a <= _LATEST):
        actual, expected = (
            f"BoxSize {size:g}, Time {a:g}",
            f"a size from {1 / _LARGEST:g} to {_LARGEST:g}, "
            f"an expansion factor from 0 to {_LATEST:g}",
        )
        raise invalid("Header", actual, expected, file=str(path))
    if "Redshift" in header and abs((1 + number(path, header, "Redshift")) * a - 1) > _SAME_TIME:
        actual = f"Redshift {number(path, header, 'Redshift'):g}, Time {a:g}"
        expected = "Time as the expansion factor 1 / (1 + Redshift)"
        raise invalid("Header", actual, expected, file=str(path))
    cosmology = _cosmology(path, known)
    per_mpc = _length_unit(
        path, known, size, _total_mass(path, file, header, known, count), cosmology
    )
    return SnapshotHeader(size=size / per_mpc, expansion=a, per_mpc=per_mpc, cosmology=cosmology)


def check_ids(path: Path, ids: Names) -> None:
    """Raise ``InputError`` if two particles have the same id, because a run could not distinguish
    them."""
    ordered = np.sort(ids)
    repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(repeated):
        actual = f"{ordered[repeated[0]]} more than once"
        raise invalid("PartType1/ParticleIDs", actual, "unique ids", file=str(path))


def number(path: Path, attributes: Mapping[str, Any], name: str) -> float:
    """Return a finite number of a header; raise ``InputError`` if it is none."""
    value = np.asarray(attributes[name])
    if value.size != 1 or value.dtype.kind not in "iuf" or not np.isfinite(value).all():
        raise invalid(name, str(value)[:40], "a finite number", file=str(path))
    return float(value.reshape(())[()])


def _attributes(file: Any, group: str) -> dict[str, Any]:
    """Return the attributes of a group; empty if it is missing."""
    return dict(file[group].attrs) if group in file else {}


def _check_same(
    path: Path, known: Mapping[str, Any], group: str, attributes: Mapping[str, Any]
) -> None:
    """Raise ``InputError`` if a group contradicts what was read before it (1)."""
    for name in _STATED_TWICE:
        if name in known and name in attributes:
            first, second = number(path, known, name), number(path, attributes, name)
            if not abs(first - second) <= _SAME_PARAMETER * abs(first):
                actual, expected = f"{second:g}", f"{first:g}, as in the header"
                raise invalid(f"{group}/{name}", actual, expected, file=str(path))


def _check_types(path: Path, file: Any, header: Mapping[str, Any], count: int) -> None:
    """Raise ``InputError`` for particles of other types (1)."""
    stated = np.asarray(header.get("NumPart_ThisFile", ()))
    for kind, name in enumerate(_OTHERS):
        group = f"PartType{kind}"
        listed = (
            int(stated[kind])
            if stated.ndim == 1 and kind < len(stated) and stated.dtype.kind in "iu"
            else 0
        )
        if name and (listed or group in file):
            actual = f"{listed or 'some'} particles of type {kind} ({name})"
            raise invalid(group, actual, "dark matter alone, type 1", file=str(path))
        if not name and stated.size and listed != count:
            actual, expected = f"{count} rows", f"{listed}, as NumPart_ThisFile says"
            raise invalid(group, actual, expected, file=str(path))
    total = np.asarray(header.get("NumPart_Total", ()))
    counts = total.ndim == 1 and len(total) > 1 and total.dtype.kind in "iu"
    # A 32-bit total counts modulo 2^32; the rest is in NumPart_Total_HighWord.
    if counts and int(total[1]) % 2**32 != count % 2**32:
        expected = f"{count} of type 1, as in the file, since it is the only one"
        raise invalid("Header/NumPart_Total", str(total[1]), expected, file=str(path))


def _cosmology(path: Path, known: Mapping[str, Any]) -> Cosmology:
    """Return the cosmology; raise ``InputError`` if densities or h are missing (3).

    The linear spectrum is known only if all of its parameters are.
    """
    needed = ("Omega0", "OmegaLambda", "HubbleParam")
    missing = [name for name in needed if name not in known]
    if missing:
        expected = f"{', '.join(needed)} in the header"
        raise invalid("Header", f"no {', '.join(missing)}", expected, file=str(path))
    spectrum = all(name in known for name in _PARAMETERS.values())
    values = {
        field: number(path, known, name)
        for field, name in _PARAMETERS.items()
        if spectrum or name in needed
    }
    try:
        if spectrum:
            return Cosmology(**values)
        return Cosmology(**values, baryons=0.0, sigma8=None)
    except InputError as error:
        raise InputError(
            replace(problem, path=_PARAMETERS.get(problem.path or ""), file=str(path))
            for problem in error.problems
        ) from None


def _total_mass(
    path: Path, file: Any, header: Mapping[str, Any], known: Mapping[str, Any], count: int
) -> float:
    """Return the total mass in 1e10 Msun/h; raise ``InputError`` for several masses (1)."""
    table = np.asarray(header.get("MassTable", ()), np.float64).reshape(-1)
    mass = float(table[1]) if len(table) > 1 else 0.0
    if mass == 0.0:
        if "PartType1/Masses" not in file:
            expected = "a mass in MassTable or in PartType1/Masses"
            raise invalid("Header/MassTable", "none", expected, file=str(path))
        masses = np.asarray(file["PartType1/Masses"][()], np.float64)
        mass = float(masses.mean())
        if masses.shape != (count,) or not np.abs(masses - mass).max() <= 1e-4 * mass:
            actual = f"masses from {masses.min():g} to {masses.max():g}"
            expected = f"{count} particles of one mass"
            raise invalid("PartType1/Masses", actual, expected, file=str(path))
    unit = number(path, known, "UnitMass_in_g") if "UnitMass_in_g" in known else GRAMS
    return mass * count * unit / GRAMS


def _length_unit(
    path: Path, known: Mapping[str, Any], size: float, mass: float, cosmology: Cosmology
) -> float:
    """Return the units of length per Mpc/h: that of the file, or the one for which (2) holds."""

    def density(per_mpc: float) -> float:
        """Return the matter found over the matter expected."""
        return mass / cosmology.particle_mass(size / per_mpc, 1)

    if "UnitLength_in_cm" in known:
        unit = number(path, known, "UnitLength_in_cm")
        if not 1 <= unit <= _LONGEST_UNIT:
            actual, expected = f"{unit:g}", f"from 1 to {_LONGEST_UNIT:g}"
            raise invalid("UnitLength_in_cm", actual, expected, file=str(path))
        choices = [round(CM_PER_MPC / unit, 9)]
    else:
        choices = [1.0, KPC]
    fitting = [per_mpc for per_mpc in choices if abs(density(per_mpc) - 1) <= _SAME_MASS]
    if fitting:
        return fitting[0]
    if len(choices) > 1:
        actual = "no UnitLength_in_cm, and masses that fit neither Mpc/h nor kpc/h"
        raise invalid("Header", actual, "a unit of length", file=str(path))
    actual = (
        f"{density(choices[0]):.4g} times the matter of Omega0 {cosmology.matter:g} in this box"
    )
    expected = "all of it, within 1 %: check MassTable, Omega0, BoxSize and their units"
    raise invalid("Header/MassTable", actual, expected, file=str(path))
