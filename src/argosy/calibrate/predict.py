"""Predict measured runs by the cost model: in closed form for fitting, by the exact engine for
judging.

In closed form a run is a bare pipeline (``sim.constant``), all runs of one shape at once, every
transfer alone on its route:

    (1)  forward, backward of a stage = its slowest device, with what exchanges take from it, and
         the reductions of its tensor-parallel groups as rings
    (2)  transfer between stages = what leaves the busiest node, or device inside a node, for a
         whole micro-batch
    (3)  tail of a stage         = twice around the ring of its replicas, and the update
    (4)  blocking                = that share of (2) is part of the forwards and backwards at both
         ends instead
    (5)  ZeRO 3 with ``prefetch`` = a forward takes at least a gather of the weights, a backward at
         least a gather and a scatter
    (6)  interleaved             = M times the work of the busiest worker, and the bubble over its
         chunks
    (7)  peak memory             = the bytes of the process, and the state and activations of the
         fullest device (``cost.planned``)

The exact engine simulates the same plan with shared links (``sim.engine.exact``), folded along its
symmetries if it is large.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from argosy.calibrate.run import MeasuredRun, Measurements
from argosy.cluster.fitted import inside_links
from argosy.cluster.topology import Cluster, Route
from argosy.cluster.trace import FloatArray
from argosy.cost.calibration import Calibration
from argosy.cost.communicate import num_reductions, reduction_passes, ring_seconds
from argosy.cost.compute import (
    ComputeModel,
    Portion,
    layer_seconds,
    recompute_seconds,
    update_seconds,
    waiting,
)
from argosy.cost.memory import stage_parameters
from argosy.cost.planned import planned_memory
from argosy.cost.taken import taken_seconds
from argosy.plan.plan import Plan, Replica, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.schedule.generate import depth_of
from argosy.sim.constant import pipeline_seconds
from argosy.sim.simulate import SMALL_PLAN, iteration_seconds
from argosy.workload.chain import Chain, Layer

# Devices times micro-batches above which an interleaved run is not simulated: (6) was within 0.4 %
# of the simulation when both were tried.
_LARGE = 16_384


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """A bare pipeline that stands for one run, in seconds per stage."""

    forward: list[float]
    backward: list[float]
    transfer: list[float]
    tail: list[float]


def quick_seconds(
    measured: Measurements, runs: Sequence[MeasuredRun], calibration: Calibration
) -> FloatArray:
    """Return the seconds of an iteration of each run in closed form, by (1) to (6)."""
    pricings: dict[Calibration, _Pricing] = {}
    columns = []
    for run in runs:
        own = run.under(calibration)
        if own not in pricings:
            pricings[own] = _Pricing(own, measured)
        columns.append(pricings[own].columns(run))
    groups: dict[tuple[tuple[int, ...], int, int], list[int]] = defaultdict(list)
    seconds = np.empty(len(runs))
    for index, run in enumerate(runs):
        if run.plan.schedule.kind is ScheduleKind.INTERLEAVED:
            seconds[index] = _interleaved(columns[index], run.plan)
            continue
        depth = depth_of(run.plan.schedule, len(run.plan.stages), run.plan.num_micro_batches)
        groups[depth, run.plan.schedule.k, run.plan.num_micro_batches].append(index)
    for (depth, group, count), members in groups.items():
        pipelines = [columns[index] for index in members]
        seconds[members] = pipeline_seconds(
            ScheduleSpec(kind=ScheduleKind.KFKB, k=group, depth=depth),
            count,
            forward=np.array([c.forward for c in pipelines]).T,
            backward=np.array([c.backward for c in pipelines]).T,
            transfer=np.array([c.transfer for c in pipelines]).T,
            latency=np.zeros((len(depth), len(members))),
            tail=np.array([c.tail for c in pipelines]).T,
        )
    return seconds


def _interleaved(columns: _Columns, plan: Plan) -> float:
    """Return the seconds of an iteration of an interleaved run (6)."""
    chunks = plan.schedule.chunks
    workers = len(plan.stages) // chunks
    work = [
        sum(columns.forward[at::workers]) + sum(columns.backward[at::workers])
        for at in range(workers)
    ]
    bubble = (sum(work) - max(work)) / chunks + 2 * sum(columns.transfer[: workers - 1])
    return plan.num_micro_batches * max(work) + bubble + max(columns.tail)


def peak_bytes(runs: Sequence[MeasuredRun], calibration: Calibration) -> FloatArray:
    """Return the peak memory of each run (7), in bytes."""
    return np.array([_peak(run, run.under(calibration)) for run in runs])


def _peak(run: MeasuredRun, calibration: Calibration) -> float:
    return calibration.process_bytes + max(
        planned_memory(run.plan, calibration.chain(run.chain)).values()
    )


def exact_seconds(measured: Measurements, run: MeasuredRun, calibration: Calibration) -> float:
    """Return the seconds of an iteration in the exact engine; by (6) for a large interleaved plan,
    which cannot be folded."""
    own = run.under(calibration)
    size = len(run.plan.devices) * run.plan.num_micro_batches
    if run.plan.schedule.kind is ScheduleKind.INTERLEAVED and size > _LARGE:
        return float(quick_seconds(measured, [run], calibration)[0])
    cluster, model = own.cluster(run.cluster), own.compute_model(measured.profiles or None)
    return iteration_seconds(
        run.plan, own.chain(run.chain), cluster, model, whole=size <= SMALL_PLAN
    )


class _Pricing:
    """A pricing of stages under one calibration that caches layers, which recur in many runs."""

    def __init__(self, calibration: Calibration, measured: Measurements) -> None:
        self.calibration = calibration
        self.model: ComputeModel = calibration.compute_model(measured.profiles or None)
        self.inside: dict[int, frozenset[int]] = {}
        """Links inside the nodes of each cluster, by the cluster's id."""
        self.chains: dict[int, Chain] = {}
        """Chains of runs under this calibration, by the id of the run's chain."""
        self.layers: dict[tuple[object, ...], tuple[float, float]] = {}
        self.stages: dict[tuple[object, ...], tuple[float, float, float]] = {}

    def columns(self, run: MeasuredRun) -> _Columns:
        """Return a run as a bare pipeline, with (4)."""
        cluster, stages = run.cluster, run.plan.stages
        if id(run.chain) not in self.chains:
            self.chains[id(run.chain)] = self.calibration.chain(run.chain)
        chain = self.chains[id(run.chain)]
        priced = [self._known_stage(chain, stage, cluster) for stage in stages]
        hops = [self._hop(run, cluster, index) for index in range(len(stages) - 1)]
        forward, backward = [f for f, _, _ in priced], [b for _, b, _ in priced]
        if share := self.calibration.blocking:  # (4)
            for index, hop in enumerate(hops):
                for end in (index, index + 1):
                    forward[end] += share * hop
                    backward[end] += share * hop
            hops = [(1 - share) * hop for hop in hops]
        return _Columns(
            forward=forward,
            backward=backward,
            transfer=[*hops, 0.0],
            tail=[t for _, _, t in priced],
        )

    def _known_stage(
        self, chain: Chain, stage: Stage, cluster: Cluster
    ) -> tuple[float, float, float]:
        """Return forward, backward (1) and tail (3) of a stage in seconds, cached because stages
        recur in many runs."""
        key = (id(chain), id(cluster), stage)
        if key not in self.stages:
            self.stages[key] = (
                *self._stage(chain, stage, cluster),
                self._tail(chain, stage, cluster),
            )
        return self.stages[key]

    def _stage(self, chain: Chain, stage: Stage, cluster: Cluster) -> tuple[float, float]:
        """Return the seconds of forward and backward of a stage (1)."""
        pairs = []
        for replica in {
            _replica_key(replica, cluster): replica for replica in stage.replicas
        }.values():
            device = cluster.device(replica.devices[0])
            portion = Portion(
                device=device,
                samples=replica.samples,
                share=max(replica.shares),
                width=replica.width,
                context=stage.context,
                expert=stage.expert,
            )
            times = [self._layer(chain, layer, stage, portion) for layer in chain.layers_of(stage)]
            reduce = self._reduce(chain, stage, replica, cluster)
            late = waiting(self.model.spread, stage.num_devices)
            taken = taken_seconds(chain, stage, device, portion.share)
            forward = late * sum(f for f, _ in times) + reduce + taken[0]
            again = reduction_passes(chain, stage.recompute)
            backward = late * sum(b for _, b in times) + reduce * again + taken[1]
            if self.calibration.prefetch and stage.zero == 3 and stage.num_holders > 1:  # (5)
                around = self._around(chain, stage, cluster)
                forward, backward = max(forward, around), max(backward, 2 * around)
            pairs.append((forward, backward))
        return max(f for f, _ in pairs), max(b for _, b in pairs)

    def _layer(
        self, chain: Chain, layer: Layer, stage: Stage, portion: Portion
    ) -> tuple[float, float]:
        """Return the seconds of forward and backward of a layer, with recomputation, cached by
        their key."""
        device = portion.device
        layer_key = (
            layer.kind,
            layer.forward_flop,
            layer.parameters,
            layer.tied_parameters,
            stage.recompute,
        )
        name = layer.name if self.model.profile_for(device) else ""
        portion_key = (
            device.kind.name,
            device.efficiency,
            portion.samples,
            portion.share,
            portion.width,
            portion.context,
        )
        # Chains are distinguished by id: several lengths and dtypes may have one name.
        key = (id(chain), name, *layer_key, *portion_key)
        if key not in self.layers:
            forward, backward = layer_seconds(self.model, chain, layer, portion)
            again = recompute_seconds(self.model, chain, layer, portion, stage.recompute, forward)
            self.layers[key] = forward, backward + again
        return self.layers[key]

    def _hop(self, run: MeasuredRun, cluster: Cluster, index: int) -> float:
        """Return the seconds of a transfer (2) from a stage to the next."""
        source, target = run.plan.stages[index], run.plan.stages[index + 1]
        size = run.plan.micro_batch_size * run.chain.layers[source.end - 1].output_bytes
        start, end = source.devices[0], target.devices[0]
        route = cluster.fastest(start, end, size)
        places = {cluster.node_of[name][0].name for name in source.devices}
        inside = cluster.node_of[start][0] is cluster.node_of[end][0]
        share = len(source.devices) if inside and len(route.links) > 1 else len(places)
        return size / share / self._bandwidth(cluster, route) + self._latency(cluster, route)

    def _reduce(self, chain: Chain, stage: Stage, replica: Replica, cluster: Cluster) -> float:
        """Return the seconds of the reductions of one forward or backward of a stage in a
        tensor-parallel group."""
        layers = chain.layers_of(stage)
        payload = replica.samples * sum(layer.reduced_bytes for layer in layers) / stage.context
        width = replica.width // stage.context
        if width < 2 or not payload:
            return 0.0
        route = cluster.fastest(replica.devices[0], replica.devices[1], payload)
        rounds = 2 * (width - 1) * sum(map(num_reductions, layers))
        crowd = 1 if len(route.links) > 1 else len(stage.replicas) * replica.width
        seconds = ring_seconds(2 * payload, width, self._bandwidth(cluster, route) / crowd, 0.0)
        return seconds + rounds * self._latency(cluster, route)

    def _tail(self, chain: Chain, stage: Stage, cluster: Cluster) -> float:
        """Return the seconds of the tail of a stage (3)."""
        first, count = stage.replicas[0], len(stage.replicas)
        device = cluster.device(first.devices[0])
        portion = Portion(
            device=device, samples=first.samples, share=max(first.shares), width=first.width
        )
        update = update_seconds(chain, stage, portion)
        if count < 2 or (self.calibration.prefetch and stage.zero == 3):
            return update
        return update + 2 * self._around(chain, stage, cluster)

    def _around(self, chain: Chain, stage: Stage, cluster: Cluster) -> float:
        """Return the seconds that a stage's weights take once around the ring of its replicas."""
        first, count = stage.replicas[0], len(stage.replicas)
        if count < 2:
            return 0.0
        payload = (
            stage_parameters(chain, stage)
            * chain.exchanged_bytes(stage.zero)
            / self.calibration.reduction
        )
        ends = [replica.devices[0] for replica in stage.replicas]
        routes = [cluster.fastest(ends[i - 1], ends[i], payload) for i in range(count)]
        inside = all(
            cluster.node_of[ends[i - 1]][0] is cluster.node_of[ends[i]][0] for i in range(count)
        )
        lanes = first.width if inside else 1
        bandwidth = min(self._bandwidth(cluster, route) for route in routes) * lanes
        return ring_seconds(payload, count, bandwidth, 0.0) + (count - 1) * self._latency(
            cluster, routes[0]
        )

    def _bandwidth(self, cluster: Cluster, route: Route) -> float:
        """Return the bytes/s that reach the program."""
        constants = self.calibration
        share = constants.bandwidth
        if constants.nic_bandwidth is not None:
            if id(cluster) not in self.inside:
                self.inside[id(cluster)] = inside_links(cluster)
            if not self.inside[id(cluster)].issuperset(route.links):
                share = constants.nic_bandwidth
        return share * cluster.bandwidth_at(route)

    def _latency(self, cluster: Cluster, route: Route) -> float:
        """Return the seconds of latency; every link of a route adds half of the calibrated
        latency."""
        return cluster.latency(route) + len(route.links) * self.calibration.latency / 2


def _replica_key(replica: Replica, cluster: Cluster) -> tuple[object, ...]:
    """Return a key that is equal for replicas that take the same time."""
    device = cluster.device(replica.devices[0])
    return device.kind.name, device.efficiency, replica.samples, replica.shares
