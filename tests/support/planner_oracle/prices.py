"""Price a stage on a device by (1) to (3), (7) and (8)."""

from __future__ import annotations

from dataclasses import dataclass

from support.planner_oracle.plans import Plan, Stage
from support.planner_oracle.problem import Problem

USABLE = 0.92
WEIGHT, GRADIENT, OPTIMIZER = 2, 2, 12
"""Bytes per weight in bf16 with AdamW: weight; gradient; two moments and a copy in fp32."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """The cost of one micro-batch, and of the update, on one device of a stage."""

    forward: float
    backward: float
    update: float
    state: float
    kept: float
    dropped: float
    """Bytes that a backward computes again at a time."""
    gathered: tuple[float, float]
    """Bytes of the largest layer that ZeRO holds whole for a moment, in a forward and a
    backward."""


def price(problem: Problem, stage: Stage, device: str, samples: int) -> Price:
    node, constants = problem.node_of[device], problem.constants
    layers = [problem.layers[index] for index in stage.layers]
    forward = backward = 0.0
    for layer in layers:
        moved = constants.passes * (WEIGHT * layer.parameters + samples * layer.kept)
        traffic = moved / node.memory_bandwidth
        ahead = samples * layer.forward_flop / (constants.forward_peak * node.flops) + traffic
        back = samples * layer.backward_flop / (constants.backward_peak * node.flops) + 2 * traffic
        ahead = max(ahead, constants.forward_floor)
        forward += ahead
        backward += max(back, constants.backward_floor) + (ahead if stage.recompute else 0.0)
    parameters, holders = sum(layer.parameters for layer in layers), len(stage.devices)
    if node.exchange_rate is not None and holders > 1:
        taken = (holders - 1) / holders * GRADIENT * parameters / node.exchange_rate
        forward += taken * (stage.zero == 3)
        backward += taken * {2: 1, 3: 2}.get(stage.zero, 0)
    sharded = [holders if stage.zero >= level else 1 for level in (3, 2, 1)]
    widths = (WEIGHT, GRADIENT, OPTIMIZER)
    state = sum(parameters * width / among for width, among in zip(widths, sharded, strict=True))
    kept = [layer.kept for layer in layers]
    if stage.recompute:
        kept = [problem.layers[index - 1].output if index else 0.0 for index in stage.layers]
    largest = WEIGHT * max(layer.parameters for layer in layers)
    times = (0.0, 0.0)
    if holders > 1 and stage.zero >= 2:
        times = (2 + 1 / holders if stage.zero == 3 else 0.0, 3 + 1 / holders)
    return Price(
        forward=forward,
        backward=backward,
        update=2 * state / node.memory_bandwidth,
        state=state,
        kept=samples * sum(kept),
        dropped=samples * max(layer.kept for layer in layers) if stage.recompute else 0.0,
        gathered=(times[0] * largest, times[1] * largest),
    )


def fits(problem: Problem, plan: Plan) -> bool:
    """Return whether (7) holds on every device."""
    largest = max((layer.output for layer in problem.layers[:-1]), default=0.0)
    for stage, depth in zip(plan.stages, plan.depths, strict=True):
        for device, samples in zip(stage.devices, stage.samples, strict=True):
            cost = price(problem, stage, device, samples)
            held = cost.state + cost.gathered[1] + cost.dropped + depth * cost.kept
            held += samples * (2 * plan.group + 1) * largest
            if held > USABLE * problem.node_of[device].memory:
                return False
    return True


def busy_seconds(problem: Problem, plan: Plan) -> float:
    """Return a time that no simulation of the plan is below: the work of its busiest device."""
    return max(
        plan.micro_batches * (cost.forward + cost.backward) + cost.update
        for stage in plan.stages
        for cost in [
            price(problem, stage, *pair) for pair in zip(stage.devices, stage.samples, strict=True)
        ]
    )
