"""What decides the accuracy and the cost of a force."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from enum import StrEnum

from argosy.errors import bad_input
from argosy.nbody.split import ForceSplit


class Cloud(StrEnum):
    """The shape in which a particle's mass is spread over the mesh: the more cells, the less a mesh cell shows."""

    CIC = "cic"
    TSC = "tsc"
    PCS = "pcs"

    @property
    def order(self) -> int:
        """Cells covered per dimension; the cloud's transform is sinc to this power."""
        return {Cloud.CIC: 2, Cloud.TSC: 3, Cloud.PCS: 4}[self]


@dataclass(frozen=True, kw_only=True)
class GravitySettings:
    """How a force is computed."""

    mesh_cells: int
    """Per dimension."""
    softening: float
    """Plummer-equivalent, in the box's units; the force is Newton's beyond 2.8 times that."""
    split_cells: float = 1.25
    """r_s in mesh cells."""
    cutoff_scales: float = 5.5
    """r_c in units of r_s."""
    cloud: Cloud = Cloud.PCS
    theta: float = 0.5
    """Opening angle: 0 computes every pair within the cut-off."""
    leaf_size: int = 32
    """Most particles of a leaf."""
    cell_size: int = 512
    """Most particles of a target cell, the smallest part of the curve that a device can be given."""
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)

    def __post_init__(self) -> None:
        for name in ("softening", "theta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise bad_input("a number of at least 0", getattr(self, name), where=name)

    def split(self, box: float) -> ForceSplit:
        """The split in a box of this size; ``InputError`` where the cut-off would not fit into it."""
        least = math.ceil(4 * self.cutoff_scales * self.split_cells)
        if self.mesh_cells < least:
            expected = f"at least {least}, so that the cut-off is within a quarter of the box"
            raise bad_input(expected, self.mesh_cells, where="mesh_cells")
        scale = self.split_cells * box / self.mesh_cells
        return ForceSplit(scale=scale, cutoff=self.cutoff_scales * scale, softening=self.softening)
