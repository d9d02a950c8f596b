"""Split the force between two particles into a smooth part for the mesh and a short one for the
tree.

With u = r / (2 r_s), the force of a unit mass at distance r is r times

    (1)  1/r^3 = s(r) + l(r),   l(r) = [erf(u) - 2 u exp(-u^2) / sqrt(pi)] / r^3,

where l is the force of a mesh whose potential is multiplied by exp(-k^2 r_s^2), and s is negligible
beyond the cut-off r_c. l is even and analytic in r, so in units of r_c it is a polynomial of y = (r
/ r_c)^2,

    (2)  r_c^3 l(r) = P(y),   0 <= y <= 1,

fitted in z = 2 y - 1, in which float32 loses no digits. The short-range factor of a pair needs a
square root, no erfc:

    (3)  r_c^3 s(r) = y^(-3/2) - P(y), and 0 for y >= 1.

Closer than h = 2.8 softening lengths, 1/r^3 in (3) is replaced by the force inside a cubic spline,
with u = r / h,

    (4)  h^-3 (32/3 + u^2 (32 u - 38.4)),                                        u < 1/2,
         h^-3 (64/3 - 48 u + 38.4 u^2 - 32/3 u^3 - 1 / (15 u^3)),               u < 1.

The force of a node with mass M and second moments Q about its centre of mass, at the vector x from
the target, is

    (5)  M s_1 x + tr(Q) s_2 x / 2 + s_3 (x.Qx) x / 2 + s_2 Q x,
         s_1 = s,  s_2 = s_1' / r,  s_3 = s_2' / r,

and by (2) the last two are -3 y^(-5/2) - 2 P'(y) and 15 y^(-7/2) - 4 P''(y), in units of r_c^-5 and
r_c^-7.

The potentials of a pair and of a node, whose slopes are these forces, are

    (6)  r_c phi(r) = V(y) - y^(-1/2),  V the polynomial of r_c erf(u) / r,
         with the spline's in place of -1/r, u < 1:
         h^-1 (16/3 u^2 - 48/5 u^4 + 32/5 u^5 - 14/5),                               u < 1/2,
         h^-1 (1 / (15 u) + 32/3 u^2 - 16 u^3 + 48/5 u^4 - 32/15 u^5 - 16/5),        u < 1;
    (7)  M phi + tr(Q) s_1 / 2 + s_2 (x.Qx) / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# The distance at which the softened force becomes Newton's, in softening lengths.
SPLINE = 2.8
# The degree of the polynomial (2).
DEGREE = 10

# Coefficients of polynomials, one row each.
Coefficients = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class ForceSplit:
    """The scales that divide the force between mesh and tree; lengths are in the box's units."""

    scale: float
    """The split scale r_s."""
    cutoff: float
    """The cut-off r_c."""
    softening: float
    """The Plummer-equivalent softening; the force is Newton's beyond 2.8 times that."""

    @property
    def coefficients(self) -> Coefficients:
        """Return the coefficients of P, P', P'' and V in powers of z, padded to one length."""
        return _fit(self.cutoff / self.scale, DEGREE)

    @property
    def spline(self) -> float:
        """Return the distance h below which a force is softened.

        It is never 0, so that particles at one place do not attract each other.
        """
        return max(SPLINE * self.softening, 1e-6 * self.cutoff)

    def lengths(self, box: float) -> NDArray[np.float64]:
        """Return the lengths that a walk compares with: the box, the cut-off and h."""
        return np.array([box, self.cutoff, self.spline])


def smooth_factor(u: float) -> float:
    """Return l of (1) in units of (2 r_s)^-3, by its series if the closed form cancels."""
    if u < 0.3:
        terms = ((-u * u) ** n * (n + 1) / (math.factorial(n + 1) * (2 * n + 3)) for n in range(9))
        return 4 / math.sqrt(math.pi) * math.fsum(terms)
    return (math.erf(u) - 2 * u * math.exp(-u * u) / math.sqrt(math.pi)) / u**3


def _smooth_potential(u: float) -> float:
    """Return erf(u) / u, which is V of (6) in units of (2 r_s)^-1."""
    return math.erf(u) / u if u > 1e-6 else 2 / math.sqrt(math.pi)


@lru_cache(maxsize=16)
def _fit(cutoff_in_scales: float, degree: int) -> Coefficients:
    """Fit the polynomials P and V, and the derivatives of P."""
    z = np.cos(np.pi * (np.arange(400) + 0.5) / 400)
    y = (z + 1) / 2
    half = cutoff_in_scales / 2
    values = np.array([half**3 * smooth_factor(half * math.sqrt(value)) for value in y])
    # The error is weighted relative to 1/r^3, and to the softened force at the centre.
    weights = np.maximum(y, 1e-2) ** 1.5
    series = np.polynomial.Chebyshev.fit(z, values, degree, w=weights, domain=[-1, 1])
    rows = np.zeros((4, degree + 1), np.float32)
    for order in range(3):
        power = (
            np.asarray(series.deriv(order).convert(kind=np.polynomial.Polynomial).coef, float)
            * 2.0**order
        )
        rows[order, : len(power)] = power
    potential = [half * _smooth_potential(half * math.sqrt(value)) for value in y]
    series = np.polynomial.Chebyshev.fit(z, potential, degree, domain=[-1, 1])
    rows[3] = series.convert(kind=np.polynomial.Polynomial).coef
    rows.setflags(write=False)
    return rows
