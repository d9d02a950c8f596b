"""Simulate several plans for one job in one exact engine, and find where each loses time.

A cluster could compute T times the sum of its devices' speeds w_d (samples of the whole model per
second) in an iteration of T seconds. This capacity is spent as follows, with M micro-batches, u_d
the seconds that device d computes, m_s the largest u_d of stage s, m the largest m_s, and c the
seconds of the critical path that only communication fills:

    (1)  devices left out        T w_d              of every device that no stage uses
    (2)  recomputation           w_d again_d
    (3)  uneven shares           w_d (m_s - u_d)    a device waits for a slower one of its own stage
    (4)  uneven stages           w_d (m - m_s)      a stage waits for the slowest one
    (5)  exposed communication   w_d min(c, T - m)
    (6)  filling and draining    w_d (T - m - min(c, T - m))
    (7)  computing               w_d (u_d - again_d)

The largest difference between these shares of a plan and those of the best plan is the reason why
it is slower. Differences in (7) mean pieces that are too small to run at full speed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from argosy.cluster.lasting import from_moment, last_change
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import FloatArray
from argosy.cost.compute import ComputeModel, Portion, stage_seconds, update_seconds
from argosy.plan.plan import Plan, Recompute, Replica, Stage
from argosy.sim.simulate import first_end, play, plays_whole
from argosy.timeline import Timeline
from argosy.workload.chain import Chain

# The number of times at which iterations begin on a changing cluster.
MOMENTS = 8


class Loss(StrEnum):
    """The uses of a cluster's capacity that the module's equations (1) to (7) define."""

    LEFT_OUT = "devices left out"
    RECOMPUTATION = "recomputation"
    SHARES = "uneven shares"
    STAGES = "uneven stages"
    COMMUNICATION = "exposed communication"
    FILLING = "filling and draining"
    COMPUTING = "computing"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A plan that takes part in the comparison, with its time and losses."""

    name: str
    plan: Plan
    seconds: float
    """The seconds of an iteration, averaged (or as the objective says) over the times at which it
    begins; infinite if one never ends."""
    losses: tuple[tuple[Loss, float], ...]
    """(1) to (7) as shares of the cluster's capacity, in the order of ``Loss``."""

    @property
    def samples_per_second(self) -> float:
        """Return the samples per second."""
        return self.plan.global_batch / self.seconds

    def share(self, loss: Loss) -> float:
        """Return the share of the cluster's capacity that goes to a loss."""
        return dict(self.losses)[loss]


Objective = Callable[[Sequence[FloatArray]], float]
"""A function from the iteration times of each scenario to the one figure that counts."""


def mean_of_means(times: Sequence[FloatArray]) -> float:
    """Return the mean over scenarios of the mean iteration time, in seconds."""
    return float(np.mean([scenario_times.mean() for scenario_times in times]))


def contest(
    plans: Sequence[tuple[str, Plan]],
    chain: Chain,
    scenarios: Sequence[Cluster],
    model: ComputeModel | None = None,
    objective: Objective = mean_of_means,
) -> list[Entry]:
    """Return the time and the losses of every plan, in the order given, over all scenarios."""
    costs = model or ComputeModel()
    whole = all(plays_whole(plan) for _, plan in plans)  # if one is folded, all are
    begun = [[from_moment(cluster, moment) for moment in moments(cluster)] for cluster in scenarios]
    entries = []
    for name, plan in plans:
        played = [
            [play(plan, chain, cluster, costs, whole=whole) for cluster in clusters]
            for clusters in begun
        ]
        seconds = objective(
            [np.array([first_end(timeline) for timeline in timelines]) for timelines in played]
        )
        losses: dict[Loss, float] = {}
        if math.isfinite(seconds):
            timelines = itertools.chain.from_iterable(played)
            exposed = float(np.mean([communication_seconds(timeline) for timeline in timelines]))
            losses = _losses(plan, chain, begun[0][0], costs, seconds, exposed)
        shares = tuple((loss, losses.get(loss, 0.0)) for loss in Loss)
        entries.append(Entry(name=name, plan=plan, seconds=seconds, losses=shares))
    return entries


def moments(cluster: Cluster, count: int = MOMENTS) -> list[float]:
    """Return ``count`` times spread evenly until the last change, or only 0 if nothing changes."""
    last = last_change([cluster])
    return [last * index / count for index in range(count)] if last > 0 else [0.0]


def communication_seconds(timeline: Timeline) -> float:
    """Return the seconds c of the critical path that only transfers and collectives fill."""
    seconds = clock = 0.0
    for span in timeline.critical_path():
        if span.kind.is_communication:
            seconds += span.end - max(span.start, min(clock, span.end))
        clock = span.end
    return seconds


def _losses(
    plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel, seconds: float, exposed: float
) -> dict[Loss, float]:
    """Return (1) to (7) as shares of the cluster's capacity."""
    speed = {
        device.name: _speed(plan, chain, cluster, model, device.name) for device in cluster.devices
    }
    busy: dict[str, float] = {}
    again: dict[str, float] = {}
    most: dict[str, float] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            for member, device in enumerate(replica.devices):
                portion = Portion(
                    device=cluster.device(device),
                    samples=replica.samples,
                    share=replica.shares[member],
                    width=replica.width,
                )
                computed, twice = _busy(plan, chain, model, stage, portion)
                busy[device] = busy.get(device, 0.0) + computed
                again[device] = again.get(device, 0.0) + twice
        slowest = max(busy[device] for device in stage.devices)
        most |= dict.fromkeys(stage.devices, slowest)
    longest = max(most.values())
    waits = min(exposed, max(seconds - longest, 0.0))
    used = [(speed[device], device) for device in busy]
    losses = {
        Loss.LEFT_OUT: sum(w * seconds for name, w in speed.items() if name not in busy),
        Loss.RECOMPUTATION: sum(w * again[device] for w, device in used),
        Loss.SHARES: sum(w * (most[device] - busy[device]) for w, device in used),
        Loss.STAGES: sum(w * (longest - most[device]) for w, device in used),
        Loss.COMMUNICATION: sum(w * waits for w, _ in used),
        Loss.FILLING: sum(w * (seconds - longest - waits) for w, _ in used),
        Loss.COMPUTING: sum(w * (busy[device] - again[device]) for w, device in used),
    }
    whole = seconds * sum(speed.values())
    return {loss: amount / whole for loss, amount in losses.items()}


def _speed(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel, name: str) -> float:
    """Return w_d at time 0, in samples per second; 0 if a device is lost or lacks the dtype."""
    device = cluster.device(name)
    if device.speed.at(0) == 0 or not model.can_run(chain, device):
        return 0.0
    samples = max(1, plan.global_batch // len(cluster.devices))
    stage = Stage(
        first=0, end=len(chain.layers), replicas=(Replica(devices=(name,), samples=samples),)
    )
    return (
        samples
        * device.speed.at(0)
        / sum(stage_seconds(model, chain, stage, Portion(device=device, samples=samples)))
    )


def _busy(
    plan: Plan, chain: Chain, model: ComputeModel, stage: Stage, portion: Portion
) -> tuple[float, float]:
    """Return u_d, and the part of it that is recomputation, in seconds."""
    speed = portion.device.speed.at(0) or 1.0
    seconds = sum(stage_seconds(model, chain, stage, portion))
    plain = sum(stage_seconds(model, chain, replace(stage, recompute=Recompute.NONE), portion))
    update = update_seconds(chain, stage, portion)
    count = plan.num_micro_batches
    return (count * seconds + update) / speed, count * (seconds - plain) / speed


def why_slower(entry: Entry, best: Entry) -> tuple[Loss, float]:
    """Return the loss that grew most over the best plan, and that growth as a share of the
    iteration."""
    ratio = best.seconds / entry.seconds
    growth = {loss: share - ratio * best.share(loss) for loss, share in entry.losses}
    worst = max(growth, key=lambda loss: growth[loss])
    return worst, growth[worst]
