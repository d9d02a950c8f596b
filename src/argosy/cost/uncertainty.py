"""How far off a prediction may be: an interval around its seconds, and a margin on its bytes.

The catalogue has for each generation of devices how far off nine of ten measured training steps were that no constant
was fitted on (``Reached.error``). A plan's prediction is as uncertain as that of its least known kind, and more where
less was measured:

    (1)  e of a kind = its generation's; 0.5 without one; at most 0.1 with a measured profile of the kind
    (2)  e of a plan = the largest of its kinds; with tensor-parallel groups root(e^2 + 0.08^2); with n > 64 devices
         e + 0.02 log2(n / 64)
    (3)  interval    = seconds / (1 + e) to seconds (1 + e)
    (4)  a peak of memory is *close* to its limit if 10 % more would not fit: the bytes of nine of ten measured
         training steps were within that (docs/validation.md)

Not in here: the choice of the best of many predictions, which is on average more optimistic than the predictions are.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from argosy.cluster.topology import Cluster
from argosy.plan.plan import Plan

MEMORY_MARGIN = 0.1
"""(4)"""
_PROFILED = 0.1
_GROUPS = 0.08
_DOUBLING = 0.02
_MEASURED_DEVICES = 64


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Seconds between which an iteration is expected to be, with the relative error behind them."""

    low: float
    high: float
    error: float


def relative_error(plan: Plan, cluster: Cluster) -> float:
    """Return (2)."""
    profiled = set()
    if plan.cost_model is not None:
        profiled = {profile["device"] for profile in json.loads(plan.cost_model.content).get("profiles", [])}
    kinds = {device.kind.name: device.kind for device in map(cluster.device, plan.devices)}
    errors = [
        min(kind.reached.error, _PROFILED) if name in profiled else kind.reached.error for name, kind in kinds.items()
    ]
    error = max(errors)
    if any(replica.width > stage.context for stage in plan.stages for replica in stage.replicas):
        error = math.hypot(error, _GROUPS)
    return error + _DOUBLING * max(0.0, math.log2(len(plan.devices) / _MEASURED_DEVICES))


def interval(plan: Plan, cluster: Cluster, seconds: float) -> Interval:
    """Return (3)."""
    error = relative_error(plan, cluster)
    return Interval(low=seconds / (1 + error), high=seconds * (1 + error), error=error)


def is_close(peak: float, capacity: float) -> bool:
    """Whether a peak is as close to a device's memory as (4) says."""
    return peak * (1 + MEMORY_MARGIN) > capacity
