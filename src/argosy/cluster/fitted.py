"""Apply a calibration to the links and devices of a cluster."""

from __future__ import annotations

from dataclasses import replace

from argosy.cluster.device import Device
from argosy.cluster.topology import CalibrationFactors, Cluster, Link
from argosy.cluster.trace import Trace
from argosy.errors import bad_input
from argosy.units import SIZE


def fitted(cluster: Cluster, fit: CalibrationFactors) -> Cluster:
    """Return the cluster with slower links and smaller devices. Its content stays unchanged, so
    that a plan still names the cluster it was made for."""
    assert cluster.fit == CalibrationFactors(), "a calibration is applied once"
    if fit.bandwidth != 1 or fit.nic_bandwidth is not None or fit.latency:
        inside = inside_links(cluster)
        links = (_slower(link, fit, inside=at in inside) for at, link in enumerate(cluster.links))
        cluster = replace(cluster, links=tuple(links))
    if fit.process_bytes:
        cluster = replace(
            cluster, devices=tuple(_smaller(device, fit) for device in cluster.devices)
        )
    return replace(cluster, fit=fit)


def inside_links(cluster: Cluster) -> frozenset[int]:
    """Return the links of the media inside nodes."""
    media = [medium for node in cluster.nodes for medium in node.media]
    return frozenset(link for medium in media for link in (*medium.outward, *medium.inward))


def _slower(link: Link, fit: CalibrationFactors, *, inside: bool) -> Link:
    """Return a link with calibrated bandwidth and latency. Most routes have two links, out of one
    end and into the other, so each takes half of the latency."""
    late = Trace(
        link.latency.times, tuple(value + fit.latency / 2 for value in link.latency.values)
    )
    share = fit.bandwidth if inside or fit.nic_bandwidth is None else fit.nic_bandwidth
    return replace(link, bandwidth=link.bandwidth.scaled(share), latency=late)


def _smaller(device: Device, fit: CalibrationFactors) -> Device:
    left = device.kind.memory - fit.process_bytes
    if left <= 0:
        taken = SIZE.short(fit.process_bytes)
        memory = SIZE.short(device.kind.memory)
        raise bad_input(
            f"a process that takes less than the {memory} of {device}", taken, "process_bytes"
        )
    return replace(device, kind=replace(device.kind, memory=left))
