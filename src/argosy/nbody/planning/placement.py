"""Place a run on the devices of a cluster: initial domains, memory limits and expected speeds.

A cluster file gives the speeds that devices should have; the run then measures them and cuts the
curve again. Ranks are the devices that have work in the plan, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from argosy.cluster.topology import Cluster
from argosy.errors import bad_input
from argosy.nbody.planning.balance import Balancer, Rules, takes_part
from argosy.nbody.planning.plan import StepPrices, plan_step
from argosy.nbody.planning.plan_file import GravityPlan
from argosy.nbody.planning.play import slowest_hop
from argosy.nbody.planning.pricing import CELL_BYTES, typical_box


@dataclass(frozen=True, kw_only=True)
class InitialPlacement:
    """The state that a run has before its first force."""

    parts: tuple[float, ...]
    """The end of each rank's run along the curve, as a share of all particles."""
    planes: tuple[int, ...]
    """The first plane of each rank's slab of the mesh, and the end."""
    balancer: Balancer


def plan_on(cluster: Cluster, particles: int, mesh_cells: int) -> GravityPlan:
    """Return the plan that ``argosy nbody plan`` would choose.

    Raises ``InfeasibleError`` if the box does not fit into the cluster's memory.
    """
    box = typical_box(particles, mesh_cells=mesh_cells)
    return GravityPlan(
        cluster=cluster, box=box, plan=plan_step(cluster, box).best.domains, compared=()
    )


def place_as_planned(plan: GravityPlan, particles: int, mesh_cells: int) -> InitialPlacement:
    """Return the initial state of a plan's ranks.

    Raises ``InputError`` if the plan was made for another box.
    """
    box = plan.box
    if (box.particles, box.mesh_cells) != (particles, mesh_cells):
        actual = f"{particles} particles and a mesh of {mesh_cells}^3 cells"
        expected = (
            f"{box.particles} particles and a mesh of {box.mesh_cells}^3 cells, as in the plan"
        )
        raise bad_input(expected, actual, "--plan")
    domains, works = plan.plan, plan.plan.working
    prices = StepPrices.of(plan.cluster, box, domains)
    plane_bytes = CELL_BYTES * box.mesh_cells**2
    planes = np.array(domains.planes)
    capacity = np.where(takes_part(domains.ends), prices.memory, planes * plane_bytes)
    names = [device.name for device in plan.ranks]
    return InitialPlacement(
        parts=tuple((np.array(domains.ends)[works] / len(box.interactions)).tolist()),
        planes=(0, *np.cumsum(planes[works]).tolist()),
        balancer=Balancer(
            capacity=tuple(capacity[works].tolist()),
            plane_bytes=plane_bytes,
            rules=Rules(bandwidth=slowest_hop(plan.cluster, names)),
            speeds=prices.speeds()[works],
        ),
    )
