"""Simulate a variant of a plan that no search contains, and let it replace the plan."""

from __future__ import annotations

import math
from dataclasses import replace

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.memory import USABLE
from argosy.plan.plan import LeftOut, Plan
from argosy.sim.prediction import Played, play_once, prediction
from argosy.sim.tasks.choose import with_collectives
from argosy.workload.chain import Chain


def played_if_it_fits(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> Played:
    """Simulate a plan; its time is infinite if it does not fit."""
    played = play_once(with_collectives(plan, chain, cluster), chain, cluster, model, whole=True)
    room = {device.name: USABLE * device.kind.memory for device in cluster.devices}
    fits = all(peak <= room[name] for name, peak in played.memory)
    return played if fits else replace(played, seconds=math.inf)


def in_place_of(
    plain: Plan,
    variant: Plan,
    played: Played,
    chain: Chain,
    cluster: Cluster,
    *,
    scope: str,
    unused: str,
) -> Plan:
    """Return a variant with the search results of the plan that it replaces.

    Its certificate keeps only the bound that holds for any granularity. ``scope`` extends the scope
    of the certificate; ``unused`` is the reason why a device of the plan is not used any more.
    """
    assert plain.certificate is not None
    bound = min(plain.certificate.free_bound_seconds or played.seconds, played.seconds)
    known = {left.device: left for left in plain.left_out}
    used = set(variant.devices)
    return replace(
        with_collectives(variant, chain, cluster),
        predicted=prediction(variant, played, chain),
        certificate=replace(
            plain.certificate,
            lower_bound_seconds=bound,
            gap=played.seconds / bound - 1,
            scope=f"{plain.certificate.scope}, {scope}",
            free_bound_seconds=bound,
        ),
        search=plain.search,
        runner_ups=(),
        left_out=tuple(
            known.get(device.name, LeftOut(device=device.name, reason=unused))
            for device in cluster.devices
            if device.name not in used
        ),
    )
