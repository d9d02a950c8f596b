"""Compute what the links between neighbouring stages need, if the places of both are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from argosy.solve.search.menu import Menu
from argosy.solve.search.row import Where
from argosy.space.price import FloatArray


class Joint(NamedTuple):
    """The seconds that the links of a boundary are busy, for each second stage."""

    crossing: FloatArray
    """For all micro-batches."""
    sent: FloatArray
    """For all micro-batches but the last."""
    back: FloatArray
    """For all gradients but the last."""
    taken: FloatArray
    """For all that a replica of the second stage receives before its first backward."""


@dataclass(frozen=True)
class Boundary:
    """A boundary between a fixed stage and any of several stages that may follow it."""

    menu: Menu
    in_site: NDArray[np.bool_]
    """[site, vector]: whether the vector has devices in the site."""
    row: int
    """The option of the first stage."""
    cut: int
    vectors: NDArray[np.intp]
    """For each second stage, the number of its vector."""
    begins: NDArray[np.bool_]
    """For each second stage, whether it is certainly in another node."""

    def joint(self, left: int) -> Joint:
        """Return the seconds of the links; the second stage is the ``left``-th from the end."""
        menu, shape = self.menu, self.menu.shape
        count, ahead = shape.num_micro_batches, shape.least_in_flight(left) - 1
        return Joint(
            count * self.between(menu.crossing),
            (count - 1) * self.between(menu.line),
            (count - 1) * self.between(menu.back),
            ahead * self.between(menu.arriving),
        )

    def between(self, tables: FloatArray) -> FloatArray:
        """Return the entries of tables [where, option, cut] for the transfer to every second stage;
        the least of them for one at several sites."""
        values = [float(table[self.row, self.cut]) for table in tables]
        seconds = np.where(self.begins, values[Where.OTHER_NODE], 0.0)
        if len(self.in_site) == 1:
            return seconds
        near = self.in_site[:, self.menu.vector_of[self.row]]
        is_far = ~self.in_site[near][:, self.vectors].any(axis=0)
        far = np.full(len(seconds), np.inf)
        for site in np.nonzero(~near)[0].tolist():
            there = self.in_site[site, self.vectors]
            far = np.where(there, np.minimum(far, values[Where.SITE + site]), far)
        return np.where(is_far, far, seconds)


def in_site(menu: Menu) -> NDArray[np.bool_]:
    """Return [site, vector]: whether the vector has devices in the site."""
    sites = [
        {pool.site for pool, count in zip(menu.prices.pools, vector, strict=True) if count}
        for vector in menu.vectors
    ]
    rows = [
        [site in vector_sites for vector_sites in sites]
        for site in range(menu.beginnings.num_sites)
    ]
    return np.array(rows)
