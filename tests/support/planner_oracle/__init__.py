"""Enumerate and price all plans of a tiny planning problem without any code of the product.

The oracle reads and writes files only: it writes the model, the cluster and the constants that
``argosy plan`` reads, and reads the plan that this command writes. It has its own roofline, its own
memory account, its own collectives and its own event simulation, written from the equations that
``docs/math.md`` publishes. Replicas have one device each; sequences and experts are not split.

    (1)  forward  = max(n FLOP_f / (a_f P) + p (weights + n kept) / H, floor_f), summed over layers
    (2)  backward = max(n FLOP_b / (a_b P) + 2 p (weights + n kept) / H, floor_b), and one more
         forward under full recomputation
    (3)  update   = 2 (weights + gradients + optimizer state on the device) / H
    (4)  flows have max-min fair rates, and arrive one latency after their last byte has left
    (5)  a ring passes (n - 1) / n of the bytes from each device to the next; n - 1 latencies
    (6)  a tree passes half of the bytes along each of two binary trees; floor(log2 n) latencies
    (7)  a stage fits if state + gathered layer + samples x (dropped layer + in flight x kept +
         (2 k + 1) x largest output) is at most 92 % of a device's memory
    (8)  a gather or scatter under ZeRO 2 or 3 sends (n - 1) / n of the weights' bytes, and takes
         these over the device's exchange rate from its compute: under ZeRO 3 once from a forward
         and twice from a backward, under ZeRO 2 once from a backward
"""

from __future__ import annotations

from support.planner_oracle.iteration import Iteration
from support.planner_oracle.plans import Plan, all_plans
from support.planner_oracle.prices import busy_seconds, fits
from support.planner_oracle.problem import Problem


def best_plan(problem: Problem, seconds: float) -> tuple[float, Plan | None, int, int]:
    """Return the least time below ``seconds`` of any plan that fits, that plan, and how many plans
    were enumerated and how many simulated."""
    best: Plan | None = None
    enumerated = simulated = 0
    for plan in all_plans(problem):
        enumerated += 1
        if busy_seconds(problem, plan) >= seconds or not fits(problem, plan):
            continue
        simulated += 1
        time = Iteration(problem, plan).seconds
        if time < seconds:
            seconds, best = time, plan
    return seconds, best, enumerated, simulated
