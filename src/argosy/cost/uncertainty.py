"""Estimate how far off a prediction may be: an interval around its seconds, and a margin on its
bytes.

For each generation of devices the catalogue has the error that nine of ten measured training steps
stayed within; no constant was fitted on these steps (``Reached.error``). The prediction of a plan
is as uncertain as that of its least known kind, and more so if less was measured:

    (1)  e of a kind = its generation's; 0.5 without one; at most 0.1 with a measured profile of the
         kind
    (2)  e of a plan = the largest of its kinds; with tensor-parallel groups root(e^2 + 0.08^2);
         with n > 64 devices e + 0.01 log2(n / 64)
    (3)  interval    = seconds (1 + o) / (1 + e) to seconds (1 + o) (1 + e)
    (4)  a peak of memory is *close* to its limit if 10 % more would not fit: the bytes of nine of
         ten measured training steps were within that (docs/validation.md)

The plan that is predicted to be the best of n plans is on average slower than predicted, because it
was chosen: a plan whose prediction is too low is chosen more often than one whose prediction is too
high (the winner's curse). If the logarithms of the true times of n plans are normal with deviation
s, and predictions differ from them by a normal residual r of their own, the chosen plan is slower
than predicted by

    (5)  o = r^2 z_n / root(r^2 + s^2)      z_n: the expected largest of n standard normal numbers

on average. r is 2/3 e and at most 0.08, and s = 0.4, as on the 1,440 runs of vTrain's table, of
which up to 26 are plans for one job; more plans than that count as 26, because the errors of nearly
equal plans are nearly equal. There the chosen plans of jobs with eight plans or more are 2.9 %
slower than predicted, and (5) gives 2.6 %; with four to seven plans they were 4.1 % faster
(``benchmarks/selection.py``). A plan that was not searched for has o = 0. The prediction itself and
the certificate do not contain o.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from argosy.cluster.topology import Cluster
from argosy.cost.compute import largest_of
from argosy.plan.plan import Plan

# Relative margin below a device's memory within which a peak counts as close (4).
MEMORY_MARGIN = 0.1
# Largest residual r of a prediction in (5), relative.
RESIDUAL = 0.08
# s of (5): standard deviation of the logarithms of the plans' true times.
PLANS_APART = 0.4
# Largest number n of plans in (5), because the errors of nearly equal plans are nearly equal.
MOST_PLANS = 26
# r of (5) over e.
_RESIDUAL_OVER_ERROR = 2 / 3
# Largest e of a kind with a measured profile (1).
_PROFILED = 0.1
# Relative error that tensor-parallel groups add (2).
_GROUPS = 0.08
# Relative error that each doubling of the devices beyond ``_MEASURED_DEVICES`` adds (2).
_DOUBLING = 0.01
# Number of devices up to which e does not grow (2).
_MEASURED_DEVICES = 64


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An interval of seconds in which an iteration is expected to be, with the relative error
    behind it."""

    low: float
    high: float
    error: float
    optimism: float
    """o of (5)."""


def relative_error(plan: Plan, cluster: Cluster) -> float:
    """Return e of a plan (2)."""
    profiled = set()
    if plan.cost_model is not None:
        profiled = {
            profile["device"] for profile in json.loads(plan.cost_model.content).get("profiles", [])
        }
    kinds = {device.kind.name: device.kind for device in map(cluster.device, plan.devices)}
    errors = [
        min(kind.reached.error, _PROFILED) if name in profiled else kind.reached.error
        for name, kind in kinds.items()
    ]
    error = max(errors)
    if any(replica.width > stage.context for stage in plan.stages for replica in stage.replicas):
        error = math.hypot(error, _GROUPS)
    return error + _DOUBLING * max(0.0, math.log2(len(plan.devices) / _MEASURED_DEVICES))


def optimism(num_plans: int, residual: float, apart: float = PLANS_APART) -> float:
    """Return o of (5).

    >>> [round(optimism(count, 0.08), 4) for count in (1, 10, 26)]
    [0.0, 0.0243, 0.0311]
    """
    if num_plans < 2:
        return 0.0
    return residual**2 * largest_of(num_plans) / math.hypot(residual, apart)


def interval(plan: Plan, cluster: Cluster, seconds: float) -> Interval:
    """Return the interval (3) around ``seconds``."""
    error = relative_error(plan, cluster)
    num_plans = min(plan.search.candidates, MOST_PLANS) if plan.search is not None else 1
    chosen = optimism(num_plans, min(RESIDUAL, _RESIDUAL_OVER_ERROR * error))
    expected = seconds * (1 + chosen)
    return Interval(
        low=expected / (1 + error), high=expected * (1 + error), error=error, optimism=chosen
    )


def is_close(peak: float, capacity: float) -> bool:
    """Return whether a peak is close to a device's memory, by (4)."""
    return peak * (1 + MEMORY_MARGIN) > capacity
