"""The time of a plan in closed form, as planners for 1F1B write it down.

With L_s = F_s + B_s of the slowest replica of stage s (tensor-parallel reductions included), M micro-batches:

    (1)  T = (M - 1) max L_s + sum L_s + 2 sum p2p_s + max AR_s + max update_s
    (2)  p2p = bytes of a micro-batch / bandwidth + latency        between the first devices of neighbouring stages
    (3)  AR  = 2 (n - 1) / n  bytes of the gradients / the slowest link of the ring

An estimate and no bound (DESIGN of the search: ``solve.bounds``): what the first and the last stage overlap is
counted twice. Metis chooses by it (source: its public ``cost_estimator.py``, form only); here it also ranks what the
exact engine then plays.
"""

from __future__ import annotations

from argosy.baselines.job import Job
from argosy.cost.communicate import num_reductions, ring_seconds
from argosy.cost.compute import Portion, stage_seconds, update_seconds
from argosy.cost.memory import stage_parameters
from argosy.plan.plan import Plan, Replica, Stage


def closed_form_seconds(job: Job, plan: Plan) -> float:
    """(1)"""
    times = [slowest_replica(job, stage) for stage in plan.stages]
    hops = sum(hand_over_seconds(job, one, other) for one, other in zip(plan.stages, plan.stages[1:], strict=False))
    exchange = max(exchange_seconds(job, stage) for stage in plan.stages)
    update = max(_update(job, stage) for stage in plan.stages)
    return (plan.num_micro_batches - 1) * max(times) + sum(times) + 2 * hops + exchange + update


def slowest_replica(job: Job, stage: Stage) -> float:
    """L_s: forward and backward of one micro-batch."""
    times: dict[tuple[object, ...], float] = {}
    for replica in stage.replicas:
        device = job.device(replica.devices[0])
        key = (device.kind.name, device.efficiency, device.speed.at(0), replica.samples, replica.width)
        if key not in times:
            times[key] = max(_member_seconds(job, stage, replica, name) for name in replica.devices)
    return max(times.values())


def _member_seconds(job: Job, stage: Stage, replica: Replica, name: str) -> float:
    device = job.device(name)
    share = replica.shares[replica.devices.index(name)]
    portion = Portion(device=device, samples=replica.samples, share=share, width=replica.width)
    seconds = sum(stage_seconds(job.model, job.chain, stage, portion)) / device.speed.at(0)
    if replica.width < 2:
        return seconds
    layers = job.chain.layers[stage.first : stage.end]
    payload = 2 * replica.samples * sum(layer.reduced_bytes for layer in layers)
    bandwidth, latency = job.between(replica.devices[0], replica.devices[1])
    rounds = 2 * (replica.width - 1) * sum(map(num_reductions, layers))
    return seconds + 2 * (ring_seconds(payload, replica.width, bandwidth, 0.0) + rounds * latency)


def hand_over_seconds(job: Job, one: Stage, other: Stage) -> float:
    """(2), one way."""
    samples = sum(replica.samples for replica in one.replicas)
    bandwidth, latency = job.between(one.devices[-1], other.devices[0])
    return samples * job.chain.layers[one.end - 1].output_bytes / bandwidth + latency


def exchange_seconds(job: Job, stage: Stage) -> float:
    """(3)"""
    count = len(stage.replicas)
    if count < 2:
        return 0.0
    leaders = [replica.devices[0] for replica in stage.replicas]
    pairs = [job.between(a, b) for a, b in zip(leaders, [*leaders[1:], leaders[0]], strict=True)]
    weights = stage_parameters(job.chain, stage) * job.chain.dtype.bytes / max(r.width for r in stage.replicas)
    bandwidth, latency = min(pair[0] for pair in pairs), max(pair[1] for pair in pairs)
    return 2 * ring_seconds(weights, count, bandwidth, latency)


def _update(job: Job, stage: Stage) -> float:
    one = stage.replicas[0]
    return update_seconds(job.chain, stage, Portion(device=job.device(one.devices[0]), samples=1, share=one.shares[0]))
