"""Where a run on the devices of a cluster begins: who holds what, within which memory, and how fast each should be.

A cluster file says what devices promise; the run then measures, and cuts anew. Ranks are the cluster's devices, in
their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from argosy.cluster.topology import Cluster
from argosy.nbody.balance import Balancer, Rules, takes_part
from argosy.nbody.plan import Prices, plan_step
from argosy.nbody.play import slowest_hop
from argosy.nbody.pricing import CELL_BYTES, typical_box


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The state of a run before its first force."""

    parts: tuple[float, ...]
    """Up to where along the curve each rank's run goes, as a part of all particles."""
    planes: tuple[int, ...]
    """Where each rank's slab of the mesh begins, and the end."""
    balancer: Balancer


def place_on(cluster: Cluster, particles: int, mesh_cells: int) -> Placement:
    """As ``argosy nbody plan`` would cut them; ``InfeasibleError`` where they do not fit into the cluster's memory."""
    box = typical_box(particles, mesh_cells=mesh_cells)
    best, prices = plan_step(cluster, box).best, Prices(cluster, box)
    plane_bytes = CELL_BYTES * mesh_cells**2
    held = np.array(best.domains.planes) * plane_bytes
    return Placement(
        parts=tuple(end / len(box.interactions) for end in best.domains.ends),
        planes=(0, *np.cumsum(best.domains.planes).tolist()),
        balancer=Balancer(
            capacity=tuple(np.where(takes_part(best.domains.ends), prices.memory, held).tolist()),
            plane_bytes=plane_bytes,
            rules=Rules(bandwidth=slowest_hop(cluster)),
            speeds=prices.speeds(),
        ),
    )
