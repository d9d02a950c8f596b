"""A variant of a plan that no search contains: played by the exact engine, and put in the place of
the plan."""

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
    """Play a plan; its time is infinite if it does not fit."""
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
    """Give a variant what was known of the plan that it replaces.

    Of its certificate only the bound that holds whatever the granularity is certain. ``scope`` adds
    to what the certificate is for; ``unused`` is why a device is left out that the plan had.
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
