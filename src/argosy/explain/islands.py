"""What other numbers of steps between exchanges, and other outer links, would do to an island
plan."""

from __future__ import annotations

import math
from dataclasses import replace

from argosy.cluster.lasting import at_time_zero
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.plan.islands import Compression, IslandPlan, lead
from argosy.sim.islands import play_islands
from argosy.workload.chain import Chain

_FACTORS = (1, 10, 50, 100, 500)
"""Numbers of steps between exchanges that are tried, beside the plan's own."""


_LONGER = (0.0, 0.02, 0.04, 0.06, 0.08, 0.1)
"""Shares by which computing may take longer than predicted."""


def island_what_ifs(
    plan: IslandPlan, chain: Chain, cluster: Cluster, model: ComputeModel | None = None
) -> list[tuple[str, float]]:
    """Changes with the seconds of a step; the plan as it is first."""
    still = at_time_zero(cluster)

    def seconds(changed: IslandPlan, where: Cluster) -> float:
        course = play_islands(changed, chain, where, model, steps=2 * changed.sync_every)
        return math.inf if course.stalled is not None else course.step_seconds

    rows = [("as it is", seconds(plan, still))]
    for every in _FACTORS:
        if (
            every != plan.sync_every
            and every % plan.fragments == 0
            and plan.overlap < every // plan.fragments
        ):
            rows.append(
                (
                    f"an exchange every {every} steps",
                    seconds(replace(plan, sync_every=every), still),
                )
            )
    for compression in Compression:
        if compression is not plan.compression:
            changed = replace(plan, compression=compression)
            rows.append((f"exchanged as {compression}", seconds(changed, still)))
    rows.append(
        ("links between islands twice as fast", seconds(plan, _faster_outside(plan, still)))
    )
    return rows


def step_range(
    plan: IslandPlan,
    chain: Chain,
    cluster: Cluster,
    model: ComputeModel | None = None,
    *,
    steps: int,
) -> tuple[float, float]:
    """The least and the most seconds of a step if computing takes as predicted or up to 10 %
    longer.

    Whether an exchange meets a stretch in which a link is slow may hang on a second, so that under
    traces a small error of the steps may be a large one of the whole.
    """
    found = []
    for more in _LONGER:
        devices = tuple(
            replace(one, speed=one.speed.scaled(1 / (1 + more))) for one in cluster.devices
        )
        course = play_islands(plan, chain, replace(cluster, devices=devices), model, steps=steps)
        found.append(math.inf if course.stalled is not None else course.step_seconds)
    return min(found), max(found)


def _faster_outside(plan: IslandPlan, cluster: Cluster) -> Cluster:
    """The cluster with twice the bandwidth on every link that leads of islands reach each other
    by."""
    leads = [lead(island) for island in plan.islands]
    pairs = [(one, other) for one in leads for other in leads if one != other]
    outer = {link for pair in pairs for route in cluster.routes(*pair) for link in route.links}
    links = [
        replace(link, bandwidth=link.bandwidth.scaled(2.0)) if at in outer else link
        for at, link in enumerate(cluster.links)
    ]
    return replace(cluster, links=tuple(links))
