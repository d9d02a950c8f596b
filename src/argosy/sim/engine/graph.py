"""One iteration of a plan as a graph of tasks: the input of the exact engine.

A task computes on one device or moves bytes between devices. The static order of a pipeline
schedule is in the edges: whatever a device does next waits for what it did before. Tasks are
numbered so that a task only waits for smaller numbers, or, through ``carry``, for tasks of the
iteration before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from argosy.cluster.host import Tier, tier_name, with_host_links
from argosy.cluster.topology import Cluster
from argosy.timeline import SpanKind

PLACES = {Tier.HOST: -1, Tier.NVME: -2}
"""One end of a flow that is no device: the memory or the drive of the node of the other end."""
_TIERS = {place: tier for tier, place in PLACES.items()}


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes from one device to another; devices by their index in the graph, or one end of
    ``PLACES``."""

    source: int
    target: int
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece of work on one device (``seconds``) or on the network (``flows``)."""

    kind: SpanKind
    device: int = -1
    seconds: float = 0.0
    """Of compute at full speed."""
    flows: tuple[Flow, ...] = ()
    """All begin together; the task is over when the last one has arrived."""
    rounds: int = 1
    """How many times the latency is paid after the last byte has left."""
    beside: bool = False
    """Whether its devices compute meanwhile."""
    after: tuple[int, ...] = ()
    """Tasks that must be over."""
    behind: int | None = None
    """The task before it on the same channel, whose last byte must have left."""
    stage: int | None = None
    micro_batch: int | None = None
    takes: tuple[tuple[int, float], ...] = ()
    """(device, bytes of memory) held from its start on."""
    frees: tuple[tuple[int, float], ...] = ()
    """(device, bytes of memory) given back at its end."""


@dataclass(frozen=True, kw_only=True)
class TaskGraph:
    """One iteration, and how the next one hangs on it."""

    devices: tuple[str, ...]
    tasks: tuple[Task, ...] = field(repr=False)
    carry: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    """(earlier, later): in the next iteration ``later`` waits until ``earlier`` of this one is
    over."""
    resident: tuple[float, ...] = ()
    """Bytes each device holds all the time: weights, gradients, optimizer state."""

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster, with links to host memory if a task needs them."""
        copies = any(task.kind is SpanKind.COPY for task in self.tasks)
        return with_host_links(cluster) if copies else cluster

    def ends(self, flow: Flow, cluster: Cluster) -> tuple[str, str]:
        """Names of where a flow begins and ends."""
        if flow.source >= 0 and flow.target >= 0:
            return self.devices[flow.source], self.devices[flow.target]
        device = self.devices[max(flow.source, flow.target)]
        place = tier_name(cluster.device(device).node, _TIERS[min(flow.source, flow.target)])
        return (device, place) if flow.target < 0 else (place, device)
