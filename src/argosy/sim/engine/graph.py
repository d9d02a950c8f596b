"""Represent one iteration of a plan as a graph of tasks, the input of the exact engine.

A task computes on one device or moves bytes between devices. The static order of a pipeline
schedule is in the edges: each task of a device waits for the previous one. Tasks are numbered so
that a task only waits for smaller numbers, or, through ``carry``, for tasks of the previous
iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from argosy.cluster.host import Tier, tier_name, with_host_links
from argosy.cluster.topology import Cluster
from argosy.timeline import SpanKind

PLACES = {Tier.HOST: -1, Tier.NVME: -2}
"""The end of a flow that is no device: the memory or the drive of the node of the other end."""
# The storage tier of each number of ``PLACES``.
_TIERS = {place: tier for tier, place in PLACES.items()}


@dataclass(frozen=True, slots=True)
class Flow:
    """A number of bytes that is sent from one device to another.

    Devices are given by their index in the graph; one end may be a number of ``PLACES``.
    """

    source: int
    target: int
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece of work that runs on one device (``seconds``) or on the network (``flows``)."""

    kind: SpanKind
    device: int = -1
    seconds: float = 0.0
    """Seconds of compute at full speed."""
    flows: tuple[Flow, ...] = ()
    """All flows begin together; the task is over when the last one has arrived."""
    rounds: int = 1
    """How many times the latency is paid after the last byte has left."""
    beside: bool = False
    """True if its devices compute meanwhile."""
    after: tuple[int, ...] = ()
    """Tasks that must be over before this one starts."""
    behind: int | None = None
    """The previous task on the same channel, whose last byte must have left."""
    stage: int | None = None
    micro_batch: int | None = None
    takes: tuple[tuple[int, float], ...] = ()
    """(device, bytes of memory) that are allocated at its start."""
    frees: tuple[tuple[int, float], ...] = ()
    """(device, bytes of memory) that are freed at its end."""


@dataclass(frozen=True, kw_only=True)
class TaskGraph:
    """The tasks of one iteration, and the edges by which the next iteration depends on it."""

    devices: tuple[str, ...]
    tasks: tuple[Task, ...] = field(repr=False)
    carry: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    """(earlier, later): in the next iteration ``later`` waits until ``earlier`` of this one is
    over."""
    resident: tuple[float, ...] = ()
    """Bytes that each device holds all the time: weights, gradients, optimizer state."""

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster, with links to host memory if a task needs them."""
        copies = any(task.kind is SpanKind.COPY for task in self.tasks)
        return with_host_links(cluster) if copies else cluster

    def ends(self, flow: Flow, cluster: Cluster) -> tuple[str, str]:
        """Return the names of the two ends of a flow: devices, or a device and its host's
        storage."""
        if flow.source >= 0 and flow.target >= 0:
            return self.devices[flow.source], self.devices[flow.target]
        device = self.devices[max(flow.source, flow.target)]
        place = tier_name(cluster.device(device).node, _TIERS[min(flow.source, flow.target)])
        return (device, place) if flow.target < 0 else (place, device)
