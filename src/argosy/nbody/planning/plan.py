"""Choose which device gets which run of the curve and which planes of the mesh.

    price items and planes -> cut the curve (solve.search.chain) for each choice of mesh holders
    -> simulate a step (sim) -> best

One step is a task graph: every device walks its tree, those with planes deposit and transform,
pairs are summed while slabs are turned, and forces come back. Pairs wait for the halo. The mesh of
a device and its pairs share the device, one after the other, except on a GPU beside CPUs, whose
mesh has a core of the host (``pricing``); transfers run beside them. Devices that would only slow
the step down are left out, and what a device computes depends on the others that have work: GPUs
without CPUs beside them compute the whole force.

The result is compared with the usual cuts: equal counts, and counts by speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from argosy.cluster.topology import Cluster
from argosy.errors import InfeasibleError
from argosy.nbody.particles import Floats
from argosy.nbody.planning.balance import Balancer, Ends, Leaves, run_totals
from argosy.nbody.planning.pricing import (
    CELL_BYTES,
    GHOST_BYTES,
    MODE_BYTES,
    PARTICLE_BYTES,
    POINT_BYTES,
    SENT_BYTES,
    STATE_BYTES,
    BoxWork,
    Company,
    company_of,
    halo_particles,
    is_cpu,
    rates,
)
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import Flow, Task, TaskGraph
from argosy.solve.search.chain import cut_chain
from argosy.timeline import SpanKind

# Per device, whether it belongs to a group.
Flags = NDArray[np.bool_]

# The number of choices that are simulated, times the number of devices.
_PLAYED = 160
# The number of groups of devices that are considered, times the number of devices.
_MOST_GROUPS = 300
# How often a cut is repeated with the halos and exchanges that it causes.
_CUTS = 3
# The share of a device's memory that a plan may use.
_USABLE = 0.9


class StepPhase(StrEnum):
    """The phases that a step has; the number of a phase is the ``stage`` of its spans."""

    TREE = "tree"
    MESH = "mesh"
    PAIRS = "pairs"


@dataclass(frozen=True, kw_only=True)
class Domains:
    """A choice that gives each device of the cluster a run of items and a number of planes."""

    name: str
    ends: Ends
    planes: tuple[int, ...]

    @property
    def working(self) -> Flags:
        """Return which devices have particles or planes."""
        return (np.diff((0, *self.ends)) > 0) | (np.array(self.planes) > 0)


@dataclass(frozen=True, kw_only=True)
class PricedDomains:
    """A choice of domains, and the time and memory that it costs."""

    domains: Domains
    step_seconds: float
    """The simulated seconds of a step."""
    tree_seconds: tuple[float, ...]
    pair_seconds: tuple[float, ...]
    mesh_seconds: tuple[float, ...]
    busy_seconds: tuple[float, ...]
    """The seconds in which each device computes; phases that run side by side count once."""
    memory: tuple[float, ...]
    """Bytes per device."""
    fits: tuple[bool, ...]
    balance: float
    """The slowest device's seconds of computing over those of an ideal division by speed."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The best choice, and those that it was compared with."""

    cluster: Cluster
    box: BoxWork
    best: PricedDomains
    others: tuple[PricedDomains, ...]


def plan_step(cluster: Cluster, box: BoxWork) -> StepPlan:
    """Find domains by work over speed with the best holders of the mesh.

    They are compared with equal counts and counts by speed. Raises ``InfeasibleError`` if nothing
    fits or no step ends.
    """
    everyone = StepPrices(cluster, box)
    ours = [
        (prices, domains)
        for prices in everyone.companies()
        for active, planes in prices.choices()
        if (domains := prices.cut(active, planes)) is not None
    ]
    if not ours:
        parts = f"{box.particles} particles and a mesh of {box.mesh_cells}^3 cells"
        raise InfeasibleError(f"{parts} do not fit into the memory of {cluster.name}")
    ours.sort(key=lambda choice: choice[0].estimate(choice[1]))
    promising = ours[: max(2, _PLAYED // everyone.size)]
    others = everyone.usual_cuts()
    # If the network is the bottleneck, one of the usual cuts can be better: then it is the plan.
    finalists = [
        *(prices.priced(domains) for prices, domains in promising),
        *(priced for priced in others if all(priced.fits)),
    ]
    best = min(finalists, key=lambda priced: priced.step_seconds)
    if best.step_seconds == math.inf:
        raise InfeasibleError(
            f"no step would end on {cluster.name}: every cut needs a device or link that is lost"
        )
    return StepPlan(cluster=cluster, box=box, best=best, others=others)


class StepPrices:
    """Computes the seconds and bytes that choices of domains need on every device.

    They hold if the ``active`` devices have work, or others in the same company; by default all.
    """

    def __init__(self, cluster: Cluster, box: BoxWork, active: Flags | None = None) -> None:
        self.cluster, self.box, self.size = cluster, box, len(cluster.devices)
        per_cell = box.particles / box.mesh_cells**3
        self.company = self._company(np.ones(self.size, bool) if active is None else active)
        known = [rates(device, per_cell, self.company) for device in cluster.devices]
        self.start = np.array([rate.start for rate in known])
        self.pair_speed = np.array([rate.interactions for rate in known])
        self.tree_speed = np.array([rate.particles for rate in known])
        self.mesh_speed = np.array([rate.cells for rate in known])
        self.halo = np.array([rate.halo for rate in known])
        self.byte = np.array([rate.byte for rate in known])
        self.beside = np.array([rate.mesh_beside for rate in known])
        self.ways: dict[tuple[str, str], tuple[int, ...]] = {}
        """Links between two devices, cached when they are looked up."""
        self.memory = np.array([_USABLE * device.kind.memory for device in cluster.devices])

    @classmethod
    def of(cls, cluster: Cluster, box: BoxWork, domains: Domains) -> StepPrices:
        """Return the prices among the devices that have work."""
        return cls(cluster, box, domains.working)

    def _company(self, active: Flags) -> Company:
        """Return the company that active devices are to each other."""
        devices = self.cluster.devices
        return company_of([device for device, works in zip(devices, active, strict=True) if works])

    def companies(self) -> list[StepPrices]:
        """Return the prices in every company that a group of devices can be, these first."""
        known = {self.company: self}
        for active in self._groups():
            if self._company(active) not in known:
                known[self._company(active)] = StepPrices(self.cluster, self.box, active)
        return list(known.values())

    def choices(self) -> Iterator[tuple[Flags, tuple[int, ...]]]:
        """Yield the devices that take part in this company, and their planes.

        The devices are all, all GPUs, all CPUs, a node, a kind, or the fastest 1, 2, 4, ...; any
        such group of those that take part holds the mesh.
        """
        groups = self._groups()
        for active in groups:
            if self._company(active) is not self.company:
                continue
            for holders in groups:
                if (holders <= active).all():
                    yield active, self.shared_planes(holders.astype(float))

    def _groups(self) -> list[Flags]:
        """Return the groups of devices, each once."""
        devices = self.cluster.devices
        order = np.argsort(-self.mesh_speed, kind="stable")
        cpus = np.array([is_cpu(device.kind) for device in devices])
        masks = [np.ones(self.size, bool), *(mask for mask in (~cpus, cpus) if mask.any())]
        masks += [
            np.array([device.node == node.name for device in devices])
            for node in self.cluster.nodes
        ]
        masks += [
            np.array([d.kind.name == kind for d in devices])
            for kind in {d.kind.name: 0 for d in devices}
        ]
        masks += [
            np.isin(np.arange(self.size), order[: 2**k])
            for k in range(int(math.log2(self.size)) + 1)
        ]
        most = max(4, _MOST_GROUPS // self.size)
        return list({mask.tobytes(): mask for mask in masks}.values())[:most]

    def usual_cuts(self) -> tuple[PricedDomains, PricedDomains]:
        """Return equal counts and counts by speed, on all devices."""
        planes = self.shared_planes(np.ones(self.size))
        equal, by_speed = self.by_count(np.ones(self.size)), self.by_count(self.pair_speed)
        return (
            self.priced(Domains(name="equal counts", ends=equal, planes=planes)),
            self.priced(Domains(name="counts by speed", ends=by_speed, planes=planes)),
        )

    def shared_planes(self, weight: Floats) -> tuple[int, ...]:
        """Divide whole planes by mesh speed among devices with weight."""
        speeds = self.mesh_speed * weight
        holds = speeds > 0
        ends = cut_chain(np.ones(self.box.mesh_cells), speeds[holds]).ends
        planes = np.zeros(self.size, int)
        planes[holds] = np.diff((0, *ends))
        return tuple(planes.tolist())

    def by_count(self, weight: Floats) -> Ends:
        """Divide the curve in proportion to weights."""
        edges = np.cumsum(weight) / weight.sum() * len(self.box.interactions)
        return tuple(np.rint(edges).astype(int).tolist())

    def cut(self, active: Flags, planes: tuple[int, ...]) -> Domains | None:
        """Divide the work by speed among active devices that hold these planes; None if it does not
        fit."""
        left = self.capacity(planes)
        if (left < 0).any():
            return None
        leaves, speeds = self.leaves(), self.speeds()
        balancer = Balancer(capacity=tuple(left[active].tolist()), speeds=speeds[active])
        domains, fixed = None, self.mesh_seconds(planes)
        for _ in range(_CUTS):
            fixed = np.where(self.beside, 0.0, fixed) if domains is None else fixed
            try:
                ends, _ = balancer.best(leaves, fixed[active])
            except InfeasibleError:
                return None
            runs = np.zeros(self.size, int)
            runs[active] = np.diff((0, *ends))
            whole = tuple(np.cumsum(runs).tolist())
            domains = Domains(name="work by speed", ends=whole, planes=planes)
            # What a device does besides its leaves follows from the cut, so it is cut again.
            shares = run_totals(leaves.work, whole) / speeds
            fixed = np.maximum(self.busy_seconds(domains) - shares, 0.0)
        return domains

    def capacity(self, planes: Sequence[int]) -> Floats:
        """Return the bytes left for particles beside these planes."""
        return self.memory - np.array(planes) * self.box.mesh_cells**2 * CELL_BYTES

    def leaves(self) -> Leaves:
        """Return the items with their reference work: interactions and particles at mean speed."""
        work = (
            self.box.interactions / self.pair_speed.mean()
            + self.box.per_item / self.tree_speed.mean()
        )
        particles_each = np.full(len(work), self.box.per_item)
        return Leaves(
            work=work,
            bytes=particles_each * (PARTICLE_BYTES + GHOST_BYTES),
            sent=particles_each * STATE_BYTES,
        )

    def speeds(self) -> Floats:
        """Return the relative speed of each device for the mix of work of a whole box."""
        alone = self.box.interactions.sum() / self.pair_speed + self.box.particles / self.tree_speed
        return self.leaves().work.sum() / alone

    def particles(self, ends: Ends) -> Floats:
        """Return the number of particles of each device."""
        return np.asarray(np.diff((0, *ends)) * self.box.per_item, np.float64)

    def tree_seconds(self, particles: Floats) -> Floats:
        """Return the seconds of the tree on devices that hold these numbers of particles."""
        halo = self.halos(particles) * self.halo
        seconds = self.start + particles / self.tree_speed + halo
        return np.asarray(np.where(particles > 0, seconds, 0.0), np.float64)

    def halos(self, particles: Floats) -> Floats:
        """Return the numbers of particles that devices with these numbers of particles fetch."""
        return np.array([halo_particles(self.box, float(count)) for count in particles])

    def mesh_seconds(self, planes: Sequence[int]) -> Floats:
        """Return the seconds of the mesh on devices that hold these numbers of planes."""
        return np.asarray(np.array(planes) * self.box.mesh_cells**2 / self.mesh_speed, np.float64)

    def busy_seconds(self, domains: Domains) -> Floats:
        """Return the seconds in which each device computes; phases that run side by side count
        once."""
        return self._busy(_StepGraph(self, domains))

    def _busy(self, graph: _StepGraph) -> Floats:
        tree, pairs, mesh = graph.phases
        return np.where(self.beside, np.maximum(tree + pairs, mesh), tree + pairs + mesh)

    def priced(self, domains: Domains) -> PricedDomains:
        """Simulate a step with these domains; return its time and memory."""
        step_graph = _StepGraph(self, domains)
        tree, pairs, mesh = step_graph.phases
        busy = self._busy(step_graph)
        particles = self.particles(domains.ends)
        memory = particles * PARTICLE_BYTES + self.halos(particles) * GHOST_BYTES
        memory += np.array(domains.planes) * self.box.mesh_cells**2 * CELL_BYTES
        step = simulate_exact(step_graph.graph(), self.cluster).iteration_ends[-1:]
        speed = np.where(busy > 0, self.pair_speed, 0.0)
        ideal = (busy * speed).sum() / speed.sum()
        return PricedDomains(
            domains=domains,
            step_seconds=step[0] if step else math.inf,
            tree_seconds=tuple(tree.tolist()),
            pair_seconds=tuple(pairs.tolist()),
            mesh_seconds=tuple(mesh.tolist()),
            busy_seconds=tuple(busy.tolist()),
            memory=tuple(memory.tolist()),
            fits=tuple((memory <= self.memory).tolist()),
            balance=float(busy.max() / ideal),
        )

    def graph(self, domains: Domains) -> TaskGraph:
        """Return the task graph of one step."""
        return _StepGraph(self, domains).graph()

    def estimate(self, domains: Domains) -> float:
        """Return the seconds of the slowest device plus those of the busiest link.

        This is enough to rank choices.
        """
        graph = self.graph(domains)
        computing = self.busy_seconds(domains)
        loads: dict[int, float] = {}
        names = graph.devices
        for task in graph.tasks:
            for flow in task.flows:
                ends = names[flow.source], names[flow.target]
                if ends not in self.ways:
                    self.ways[ends] = self.cluster.fastest(*ends, flow.bytes).links
                for link in self.ways[ends]:
                    loads[link] = loads.get(link, 0.0) + flow.bytes
        links = self.cluster.links
        busiest = max(
            (amount / max(links[i].bandwidth.at(0.0), 1.0) for i, amount in loads.items()),
            default=0.0,
        )
        return float(computing.max()) + busiest


class _StepGraph:
    """The tasks of one step, which are numbered as they are added; each device runs its own in
    order."""

    def __init__(self, prices: StepPrices, domains: Domains) -> None:
        self.prices, self.domains, self.box = prices, domains, prices.box
        self.particles = prices.particles(domains.ends)
        self.busy = [device for device in range(prices.size) if self.particles[device] > 0]
        self.holders = [device for device in range(prices.size) if domains.planes[device] > 0]
        self.halo_flows, self.mesh_flows = self._halo_flows(), self._mesh_flows()
        turned = self._turn_flows(3)
        returned = [Flow(flow.target, flow.source, flow.bytes) for flow in self.mesh_flows]
        tree = prices.tree_seconds(self.particles) + self._handling(self.halo_flows)
        pairs = run_totals(self.box.interactions, domains.ends) / prices.pair_speed
        mesh = prices.mesh_seconds(domains.planes)
        mesh = mesh + self._handling([*self.mesh_flows, *turned, *returned])
        self.phases = tree, pairs, mesh
        """Seconds of tree, pairs and mesh per device."""
        self.tasks: list[Task] = []
        self.last: dict[tuple[int, bool], int] = {}
        """Per device, and per device whose mesh has a core of its own, the latest task."""

    def _handling(self, flows: Sequence[Flow]) -> Floats:
        """Return the seconds that devices spend on what they send and receive."""
        moved = np.zeros(self.prices.size)
        for flow in flows:
            moved[flow.source] += flow.bytes
            moved[flow.target] += flow.bytes
        return moved * self.prices.byte

    def graph(self) -> TaskGraph:
        """Build the task graph of one step."""
        tree, pair, mesh = self.phases
        trees = [self._compute(d, StepPhase.TREE, tree[d]) for d in self.busy]
        halo = self._transfer(self.halo_flows, trees)
        to_mesh = self._transfer(self.mesh_flows, [])
        deposited = [self._compute(d, StepPhase.MESH, mesh[d] / 3, to_mesh) for d in self.holders]
        turned = self._transfer(self._turn_flows(1), deposited)
        paired = [self._compute(d, StepPhase.PAIRS, pair[d], halo) for d in self.busy]
        solved = [self._compute(d, StepPhase.MESH, mesh[d] / 3, turned) for d in self.holders]
        back = self._transfer(self._turn_flows(2), solved)
        filled = [self._compute(d, StepPhase.MESH, mesh[d] / 3, back) for d in self.holders]
        returned = self._transfer(
            [Flow(f.target, f.source, f.bytes) for f in self.mesh_flows], filled
        )
        over = len(self.tasks)
        everything = tuple(sorted({*paired, *filled, *returned}))
        self.tasks.append(Task(kind=SpanKind.COLLECTIVE, after=everything, flows=()))
        names = tuple(device.name for device in self.prices.cluster.devices)
        resident = tuple(float(count) * PARTICLE_BYTES for count in self.particles)
        return TaskGraph(
            devices=names,
            tasks=tuple(self.tasks),
            carry=tuple((over, first) for first in (*trees, *to_mesh)),
            resident=resident,
        )

    def _compute(
        self, device: int, phase: StepPhase, seconds: float, after: Sequence[int] = ()
    ) -> int:
        """Add a computation after the latest task of the same core; return its number."""
        core = device, phase is StepPhase.MESH and bool(self.prices.beside[device])
        before = [self.last[core]] if core in self.last else []
        number = len(self.tasks)
        waits = tuple(sorted({*before, *after}))
        stage = list(StepPhase).index(phase)
        self.tasks.append(
            Task(
                kind=SpanKind.FORWARD,
                device=device,
                seconds=float(seconds),
                after=waits,
                stage=stage,
            )
        )
        self.last[core] = number
        return number

    def _transfer(self, flows: list[Flow], after: Sequence[int]) -> list[int]:
        """Add a transfer; return its number."""
        number = len(self.tasks)
        self.tasks.append(Task(kind=SpanKind.TRANSFER, flows=tuple(flows), after=tuple(after)))
        return [number]

    def _halo_flows(self) -> list[Flow]:
        """Return the flows of the halo.

        Half of it comes from the neighbours along the curve, half from all devices by their
        particles.
        """
        flows: dict[tuple[int, int], float] = {}
        for place, device in enumerate(self.busy):
            wanted = halo_particles(self.box, float(self.particles[device])) * SENT_BYTES
            near = [
                self.busy[sender]
                for sender in (place - 1, place + 1)
                if 0 <= sender < len(self.busy)
            ]
            senders = [sender for sender in self.busy if sender != device]
            held = sum(self.particles[sender] for sender in senders)
            for sender in senders:
                part = wanted / 2 * self.particles[sender] / held + (
                    wanted / 2 / len(near) if sender in near else 0.0
                )
                flows[sender, device] = flows.get((sender, device), 0.0) + float(part)
        return [Flow(source, target, amount) for (source, target), amount in flows.items()]

    def _mesh_flows(self) -> list[Flow]:
        """Return the flows of particles to the holders of the mesh."""
        share = [self.domains.planes[holder] / self.box.mesh_cells for holder in self.holders]
        return [
            Flow(device, holder, float(self.particles[device]) * POINT_BYTES * part)
            for device in self.busy
            for holder, part in zip(self.holders, share, strict=True)
            if device != holder
        ]

    def _turn_flows(self, times: int) -> list[Flow]:
        """Return the flows by which the holders of the mesh turn their slabs."""
        planes, cells = self.domains.planes, self.box.mesh_cells
        return [
            Flow(source, target, times * MODE_BYTES / 2 * planes[source] * planes[target] * cells)
            for source in self.holders
            for target in self.holders
            if source != target
        ]
