"""Compute the expansion of the box, the growth of structure, and the factors of kicks and drifts.

Lengths are comoving Mpc/h, velocities km/s, masses 1e10 Msun/h; then the Hubble rate today is 100.
With canonical momenta p = a^2 dx/dt and the comoving sum F of ``gravity`` times G,

    (1)  H(a) = 100 sqrt(Om / a^3 + Ok / a^2 + OL),   Ok = 1 - Om - OL
    (2)  dx = p x drift,   drift(a, b) = [D(b) - D(a)] / P(at)
         for p at the expansion ``at``
    (3)  dp = F x kick,    kick(a, b) = [P(b) - P(a)] / (1.5 x 100^2 Om D(at))
         for F at ``at``
    (4)  growing mode: D(a) ~ H(a) integral_0^a da / (a H)^3, normalised to D(1) = 1; f = dlnD /
         dlna, P = a^2 H f D

If p and F follow the growing mode, (2) and (3) are exact for steps of any length (Feng and others,
2016); for short steps they are the integrals of da / (a^3 H) and of da / (a^2 H).

    (5)  G m = 3 x 100^2 Om / (8 pi) x box^3 / N for N particles: G itself is not needed to move
         them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from argosy.errors import bad_input

# G in Mpc/h (km/s)^2 / (1e10 Msun/h); CODATA 2010, as GADGET-4 has it.
GRAVITY = 43.0187

# Densities, Hubble rates and amplitudes outside this range are taken for input errors.
_SMALLEST, _LARGEST = 1e-3, 10.0
# The speed of light in km/s.
LIGHT = 299792.458
# Indices of the primordial spectrum beyond this are taken for input errors.
_STEEPEST = 10.0
# Gauss-Legendre quadrature on [-1, 1].
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


@dataclass(frozen=True, kw_only=True)
class Cosmology:
    """The densities that the universe has today, in units of the critical density."""

    matter: float = 0.308
    vacuum: float = 0.692
    hubble: float = 0.678
    """The Hubble rate today in units of 100 km/s/Mpc (h)."""
    baryons: float = 0.0482
    sigma8: float | None = 0.83
    """The amplitude of the linear spectrum; None if it is not known. Only initial conditions and
    linear theory need it."""
    index: float = 0.96
    """The index of the primordial spectrum."""

    def __post_init__(self) -> None:
        for name in ("matter", "hubble", "sigma8"):
            value = getattr(self, name)
            if value is not None and not _SMALLEST <= value <= _LARGEST:
                raise bad_input(f"a number from {_SMALLEST:g} to {_LARGEST:g}", value, name)
        if not abs(self.vacuum) <= _LARGEST:
            raise bad_input(f"a number from {-_LARGEST:g} to {_LARGEST:g}", self.vacuum, "vacuum")
        if any(self._hubble_square(a) <= 0 for a in np.geomspace(1e-6, 1.0, 400).tolist()):
            raise bad_input(
                "a universe that has expanded from a beginning until today", self.vacuum, "vacuum"
            )
        if not abs(self.index) <= _STEEPEST:
            raise bad_input(f"a number from {-_STEEPEST:g} to {_STEEPEST:g}", self.index, "index")
        if not 0 <= self.baryons < self.matter:
            raise bad_input("at least 0 and less than the matter density", self.baryons, "baryons")

    def hubble_rate(self, a: float) -> float:
        """Return the Hubble rate H(a) in km/s per Mpc/h (1)."""
        square = self._hubble_square(a)
        if square <= 0:
            raise bad_input("an expansion factor that this universe reaches", a, "expansion")
        return 100.0 * math.sqrt(square)

    def _hubble_square(self, a: float) -> float:
        """Return the square of (1) in units of today's rate."""
        curvature = 1 - self.matter - self.vacuum
        return self.matter / a**3 + curvature / a**2 + self.vacuum

    def matter_at(self, a: float) -> float:
        """Return the matter density at that time, in units of the critical density."""
        return self.matter / a**3 * (100.0 / self.hubble_rate(a)) ** 2

    def drift(self, a: float, b: float, at: float) -> float:
        """Return the factor of a drift (2)."""
        return (self.growth(b) - self.growth(a)) / self.growing_momentum(at)

    def kick(self, a: float, b: float, at: float) -> float:
        """Return the factor of a kick (3)."""
        change = self.growing_momentum(b) - self.growing_momentum(a)
        return change / (1.5 * 100.0**2 * self.matter * self.growth(at))

    def growing_momentum(self, a: float) -> float:
        """Return P of (4): p of a particle whose displacement grows as D, over that displacement
        today."""
        return a * a * self.hubble_rate(a) * self.growth_rate(a) * self.growth(a)

    def seconds_of_expansion(self, a: float, b: float) -> float:
        """Return the cosmic time between two expansion factors, in Mpc/h / (km/s)."""
        return self._integral(a, b, 1)

    def conformal_time(self, a: float) -> float:
        """Return the integral of da / (a^2 H), in Mpc/h / (km/s)."""
        return self._integral(a, 1.0, 2)

    def growth(self, a: float) -> float:
        """Return the growing mode D of (4)."""
        return self._unnormalised_growth(a) / self._unnormalised_growth(1.0)

    def growth_rate(self, a: float) -> float:
        """Return the growth rate f of (4)."""
        # dlnD / dlna of (4) in closed form: dlnH / dlna + a / (a H)^3 over the integral.
        square = (self.hubble_rate(a) / 100.0) ** 2
        curvature = 1 - self.matter - self.vacuum
        slope = -(3 * self.matter / a**3 + 2 * curvature / a**2) / (2 * square)
        integral = self._unnormalised_growth(a) / self.hubble_rate(a)
        return slope + a / (a * self.hubble_rate(a)) ** 3 / integral

    def particle_gravity(self, box: float, count: int) -> float:
        """Return G m of a particle (5)."""
        return 3 * 100.0**2 * self.matter / (8 * math.pi) * box**3 / count

    def particle_mass(self, box: float, count: int) -> float:
        """Return the mass of a particle in 1e10 Msun/h."""
        return self.particle_gravity(box, count) / GRAVITY

    def _integral(self, a: float, b: float, power: int) -> float:
        """Return the integral of da / (a^power H), computed over ln a, in which the integrand is
        smooth."""
        low, high = math.log(a), math.log(b)
        points = np.exp((high + low) / 2 + (high - low) / 2 * _NODES)
        values = [point ** (1 - power) / self.hubble_rate(point) for point in points]
        return float((high - low) / 2 * np.dot(_WEIGHTS, values))

    def _unnormalised_growth(self, a: float) -> float:
        """Return the growing mode before it is normalised.

        The integral uses t with a = t^2, which removes the square root at its beginning.
        """
        points = math.sqrt(a) / 2 * (1 + _NODES)
        values = [2 * t / (t * t * self.hubble_rate(t * t)) ** 3 for t in points]
        return self.hubble_rate(a) * math.sqrt(a) / 2 * float(np.dot(_WEIGHTS, values))
