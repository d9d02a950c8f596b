"""Read a linear power spectrum from a table of CAMB or CLASS: k (h/Mpc) and P (Mpc/h)^3, today.

Lines that begin with # are comments; further columns are ignored. Between rows log P is linear in
log k. Nothing is extrapolated beyond the table's ends: a box with longer or shorter waves is
rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from argosy.errors import bad_input, invalid, refused
from argosy.nbody.force.tree import Floats

# The smallest number of rows of a table.
_FEWEST = 16


@dataclass(frozen=True, kw_only=True)
class SpectrumTable:
    """A spectrum that is tabulated at rising wave numbers."""

    k: Floats
    power: Floats

    def at(self, k: Floats) -> Floats:
        """Return P at wave numbers within the table; zero at k = 0."""
        positive = k[k > 0]
        low, high = float(positive.min(initial=np.inf)), float(positive.max(initial=0.0))
        if low < self.k[0] * (1 - 1e-9) or high > self.k[-1] * (1 + 1e-9):
            actual = f"{self.k[0]:g} to {self.k[-1]:g} h/Mpc"
            raise bad_input(
                f"a table from {low:g} to {high:g} h/Mpc, the waves of the box", actual, "spectrum"
            )
        safe = np.where(k > 0, k, self.k[0])
        power: Floats = np.exp(np.interp(np.log(safe), np.log(self.k), np.log(self.power)))
        return np.where(k > 0, power, 0.0)

    @property
    def sigma8(self) -> float:
        """Return the amplitude in spheres of 8 Mpc/h, over the table's own range."""
        log_k = np.linspace(np.log(self.k[0]), np.log(self.k[-1]), 8192)
        k = np.exp(log_k)
        window = 3 * (np.sin(8 * k) - 8 * k * np.cos(8 * k)) / (8 * k) ** 3
        density = k**3 * np.interp(log_k, np.log(self.k), self.power) * window**2 / (2 * np.pi**2)
        return float(np.sqrt(np.dot(density[1:] + density[:-1], np.diff(log_k)) / 2))

    def scaled_to(self, sigma8: float) -> SpectrumTable:
        """Return the spectrum scaled to another amplitude."""
        return SpectrumTable(k=self.k, power=self.power * (sigma8 / self.sigma8) ** 2)


def read_spectrum(path: Path) -> SpectrumTable:
    """Read a table; raise ``InputError`` for a file that holds no spectrum."""
    try:
        rows = np.loadtxt(path, comments="#", ndmin=2)
    except FileNotFoundError:
        raise refused("there is no such file", file=str(path)) from None
    except (ValueError, OSError, UnicodeError) as error:
        raise invalid(
            file=str(path), expected="columns of numbers", found=str(error)[:80]
        ) from None
    if rows.shape[0] < _FEWEST or rows.shape[1] < 2:
        actual = f"{rows.shape[0]} x {rows.shape[1]} numbers"
        expected = f"at least {_FEWEST} rows of k and P"
        raise invalid(file=str(path), expected=expected, found=actual)
    k, power = np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])
    if not (
        np.isfinite(rows[:, :2]).all()
        and (k > 0).all()
        and (power > 0).all()
        and (np.diff(k) > 0).all()
    ):
        actual = "a row that is not"
        raise invalid(file=str(path), expected="rising k and P, all above 0", found=actual)
    return SpectrumTable(k=k, power=power)
