"""Estimate the time of a plan in closed form, as planners for 1F1B do.

With L_s = F_s + B_s of the slowest replica of stage s (tensor-parallel reductions included) and M
micro-batches:

    (1)  T = (M - 1) max L_s + sum L_s + 2 sum p2p_s + max AR_s + max update_s
    (2)  p2p = bytes of a micro-batch / bandwidth + latency, between the first devices of
         neighbouring stages
    (3)  AR  = 2 (n - 1) / n  bytes of the gradients / the slowest link of the ring

This is an estimate and no bound (``solve.search.bounds`` has the bounds): the overlap of the first
and the last stage is counted twice. Metis chooses by it (source: its public ``cost_estimator.py``,
form only); here it also ranks the plans that the exact engine then simulates.
"""

from __future__ import annotations

from argosy.baselines.job import PlanningJob
from argosy.cost.communicate import ring_seconds
from argosy.cost.memory import optimizer_bytes
from argosy.plan.plan import Plan, Replica, Stage


def closed_form_seconds(job: PlanningJob, plan: Plan) -> float:
    """Return the seconds of an iteration by (1)."""
    times = [slowest_replica(job, stage) for stage in plan.stages]
    hops = sum(
        hand_over_seconds(job, sender, receiver)
        for sender, receiver in zip(plan.stages, plan.stages[1:], strict=False)
    )
    exchange = max(exchange_seconds(job, stage) for stage in plan.stages)
    update = max(_update(job, stage) for stage in plan.stages)
    return (plan.num_micro_batches - 1) * max(times) + sum(times) + 2 * hops + exchange + update


def slowest_replica(job: PlanningJob, stage: Stage) -> float:
    """Return L_s, the forward and backward seconds of one micro-batch on the slowest replica."""
    return max(replica_seconds(job, stage, replica) for replica in stage.replicas)


def replica_seconds(job: PlanningJob, stage: Stage, replica: Replica) -> float:
    """Return the forward and backward seconds of one micro-batch; the members share it evenly."""
    samples, width = replica.samples, replica.width
    sums = [job.running_seconds(name, samples, width, stage.recompute) for name in replica.devices]
    seconds = max(running[stage.end] - running[stage.first] for running in sums)
    if width < 2:
        return seconds
    before, after = job.reductions[stage.first], job.reductions[stage.end]
    bandwidth, latency = job.between(replica.devices[0], replica.devices[1])
    around = ring_seconds(2 * samples * (after[0] - before[0]), width, bandwidth, 0.0)
    return seconds + 2 * (around + 2 * (width - 1) * (after[1] - before[1]) * latency)


def hand_over_seconds(job: PlanningJob, stage: Stage, following: Stage) -> float:
    """Return the seconds of a transfer between stages by (2), one way."""
    samples = sum(replica.samples for replica in stage.replicas)
    bandwidth, latency = job.between(stage.devices[-1], following.devices[0])
    return samples * job.chain.layers[stage.end - 1].output_bytes / bandwidth + latency


def exchange_seconds(job: PlanningJob, stage: Stage) -> float:
    """Return the seconds of a stage's gradient exchange by (3)."""
    count = len(stage.replicas)
    if count < 2:
        return 0.0
    leaders = [replica.devices[0] for replica in stage.replicas]
    pairs = [job.between(a, b) for a, b in zip(leaders, [*leaders[1:], leaders[0]], strict=True)]
    held = job.parameters[stage.end] - job.parameters[stage.first]
    weights = held * job.chain.dtype.bytes / max(replica.width for replica in stage.replicas)
    bandwidth, latency = min(pair[0] for pair in pairs), max(pair[1] for pair in pairs)
    return 2 * ring_seconds(weights, count, bandwidth, latency)


def _update(job: PlanningJob, stage: Stage) -> float:
    """Return the seconds in which the optimizer reads and writes its state; ZeRO divides it among
    replicas."""
    replica = stage.replicas[0]
    device = job.device(replica.devices[0])
    state = optimizer_bytes(job.chain) / (len(stage.replicas) if stage.zero else 1)
    held = (job.parameters[stage.end] - job.parameters[stage.first]) / replica.width
    return (
        2
        * held
        * (2 * job.chain.dtype.bytes + state)
        / (device.efficiency * device.kind.memory_bandwidth)
    )
