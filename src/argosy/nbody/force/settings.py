"""Define the settings that decide the accuracy and the cost of a force.

Three numbers set the error: how smooth the mesh's part is, where the tree's part ends, and how
coarse a node may be. ``CHOICES`` has the useful combinations, each with the error that it keeps in
every box that was tried: random, clustered and evolved particles, and perturbed lattices on a mesh
with a whole number of cells per particle (``python -m benchmarks gravity-errors``). The error is
the 99th percentile over particles, relative to each one's force, with softenings up to 0.3 mean
separations. A softening of a whole separation removes most of the force; the mesh's error stays,
and is up to four times as large in comparison.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from argosy.errors import bad_input
from argosy.nbody.force.split import SPLINE, ForceSplit


class Accuracy(NamedTuple):
    """A row that the table of error against cost has."""

    error: float
    """The 99th percentile of the relative force error, in the worst box."""
    split_cells: float
    cutoff_scales: float
    tolerance: float

    @property
    def least_mesh(self) -> int:
        """Return the mesh cells per side with which the cut-off is within a quarter of the box."""
        return math.ceil(4 * self.cutoff_scales * self.split_cells - 1e-9)


CHOICES = (
    Accuracy(0.005, 1.25, 5.6, 0.03),
    Accuracy(0.003, 1.25, 6.4, 0.01),
    Accuracy(0.0015, 1.5, 6.4, 0.005),
)
"""The useful accuracies, the cheapest first; the second is the default."""
DEFAULT = CHOICES[1]


def accuracy_for(error: float) -> Accuracy:
    """Return the cheapest row that keeps this error; raise ``InputError`` if none does."""
    best = CHOICES[-1].error
    if not best <= error < math.inf:
        raise bad_input(f"a relative error of at least {best:g}", error, "force_error")
    return next(row for row in CHOICES if row.error <= error)


class Cloud(StrEnum):
    """The shapes in which a particle's mass can be spread over the mesh.

    The more cells a shape covers, the less a mesh cell shows.
    """

    CIC = "cic"
    TSC = "tsc"
    PCS = "pcs"

    @property
    def order(self) -> int:
        """Return the cells covered per dimension; the cloud's transform is sinc to this power."""
        return {Cloud.CIC: 2, Cloud.TSC: 3, Cloud.PCS: 4}[self]


@dataclass(frozen=True, kw_only=True)
class GravitySettings:
    """The settings that a force is computed with."""

    mesh_cells: int
    """Mesh cells per dimension."""
    softening: float
    """The Plummer-equivalent softening in the box's units; the force is Newton's beyond 2.8 times
    that."""
    split_cells: float = DEFAULT.split_cells
    """The split scale r_s in mesh cells."""
    cutoff_scales: float = DEFAULT.cutoff_scales
    """The cut-off r_c in units of r_s."""
    cloud: Cloud = Cloud.PCS
    tolerance: float = DEFAULT.tolerance
    """The bound on the relative error of a node's force, (2) of ``tasks``; 0 computes every pair
    within the cut-off."""
    leaf_size: int = 32
    """The largest number of particles of a leaf."""
    cell_size: int = 512
    """The largest number of particles of a target cell, the smallest part of the curve that a
    device can get."""
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)

    def __post_init__(self) -> None:
        for name in ("softening", "tolerance"):
            if not 0 <= getattr(self, name) < math.inf:
                raise bad_input("a number of at least 0", getattr(self, name), name)

    def split(self, box: float) -> ForceSplit:
        """Return the split in a box of this size; raise ``InputError`` if the cut-off does not fit
        into it."""
        least = Accuracy(0.0, self.split_cells, self.cutoff_scales, self.tolerance).least_mesh
        if self.mesh_cells < least:
            expected = f"at least {least}, so that the cut-off is within a quarter of the box"
            raise bad_input(expected, self.mesh_cells, "mesh_cells")
        scale = self.split_cells * box / self.mesh_cells
        split = ForceSplit(scale=scale, cutoff=self.cutoff_scales * scale, softening=self.softening)
        if split.spline > split.cutoff:
            most = f"{split.cutoff / SPLINE:.4g}"
            expected = (
                f"at most {most}: a softened force must end within the tree's cut-off of "
                f"{split.cutoff:.4g}"
            )
            raise bad_input(expected, self.softening, "softening")
        return split
