"""Simulate an island plan with other exchange intervals, compressions and outer links."""

from __future__ import annotations

import math
from dataclasses import replace

from argosy.cluster.lasting import at_time_zero
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.plan.islands import Compression, IslandPlan, lead
from argosy.sim.islands import play_islands
from argosy.workload.chain import Chain

# Numbers of steps between exchanges that are tried, beside the plan's own.
_FACTORS = (1, 10, 50, 100, 500)


# Shares by which computing may take longer than predicted.
_LONGER = (0.0, 0.02, 0.04, 0.06, 0.08, 0.1)


def island_what_ifs(
    plan: IslandPlan, chain: Chain, cluster: Cluster, model: ComputeModel | None = None
) -> list[tuple[str, float]]:
    """Return changes with the seconds of a step; the unchanged plan comes first."""
    still = at_time_zero(cluster)

    def seconds(changed: IslandPlan, where: Cluster) -> float:
        """Return the mean seconds of a step of a changed plan; infinite if it stalls."""
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
    """Return the smallest and largest seconds of a step if computing takes up to 10 % longer.

    A difference of a second may decide whether an exchange falls into a period in which a link is
    slow, so under traces a small error of the steps may become a large error of the whole.
    """
    step_times = []
    for delay in _LONGER:
        devices = tuple(
            replace(device, speed=device.speed.scaled(1 / (1 + delay)))
            for device in cluster.devices
        )
        course = play_islands(plan, chain, replace(cluster, devices=devices), model, steps=steps)
        step_times.append(math.inf if course.stalled is not None else course.step_seconds)
    return min(step_times), max(step_times)


def _faster_outside(plan: IslandPlan, cluster: Cluster) -> Cluster:
    """Return the cluster with twice the bandwidth on every link between leads of islands."""
    leads = [lead(island) for island in plan.islands]
    pairs = [(source, target) for source in leads for target in leads if source != target]
    outer = {link for pair in pairs for route in cluster.routes(*pair) for link in route.links}
    links = [
        replace(link, bandwidth=link.bandwidth.scaled(2.0)) if at in outer else link
        for at, link in enumerate(cluster.links)
    ]
    return replace(cluster, links=tuple(links))
