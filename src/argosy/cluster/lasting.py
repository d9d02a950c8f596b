"""A cluster that stays as it is at one moment."""

from __future__ import annotations

from dataclasses import replace

from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace


def at_time_zero(cluster: Cluster) -> Cluster:
    """The cluster as it is at time 0, for ever: what a plan without a scenario is made for."""
    links = tuple(
        replace(link, bandwidth=Trace.constant(link.bandwidth.at(0)), latency=Trace.constant(link.latency.at(0)))
        for link in cluster.links
    )
    devices = tuple(replace(device, speed=Trace.constant(device.speed.at(0))) for device in cluster.devices)
    return replace(cluster, links=links, devices=devices)
