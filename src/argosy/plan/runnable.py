"""List what Argosy's own runtime executes: one table that limits the search and checks plans for
the runtime.

A row is a feature of a stage, the value that a stage requests, and the values that run. A feature
without a row runs for any value: numbers of stages and replicas, shares of samples, numbers and
sizes of micro-batches, k and depths of schedules, the algorithms of ``collectives``, widths and
ratios of tensor-parallel groups, parts of sequences, holders of experts. A policy runs if its
schedules have the same stages per worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from argosy.dtype import Dtype
from argosy.errors import Problem, raise_any
from argosy.plan.plan import Plan, Recompute, Stage
from argosy.units import RATE, counted

# A value of a feature.
Value = int | str


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature that a stage may request, with the values of it that run: a row of the table."""

    name: str
    asked: Callable[[Stage], Value]
    """Function that returns the value that a stage requests."""
    runs: tuple[Value, ...]
    """Values that the runtime executes."""

    def allows(self, stage: Stage) -> bool:
        return self.asked(stage) in self.runs


ZERO = Feature(name="ZeRO", asked=lambda stage: stage.zero, runs=(0, 1, 2, 3))
RECOMPUTE = Feature(
    name="recomputation",
    asked=lambda stage: str(stage.recompute),
    runs=tuple(str(value) for value in Recompute),
)
OFFLOAD = Feature(
    name="offload of",
    asked=lambda stage: str(stage.offload) or "nothing",
    runs=("nothing", "optimizer", "activations", "optimizer,activations"),
)

# All rows of the table.
FEATURES = (ZERO, RECOMPUTE, OFFLOAD)


def powersgd_problems(plan: Plan) -> Iterator[Problem]:
    """Yield what PowerSGD cannot do in a plan: it needs whole gradients of whole matrices, in units
    that do not change."""
    if not plan.model.powersgd:
        return
    if plan.model.dtype is Dtype.FP16:
        expected = "bf16 or fp32 with PowerSGD, whose errors cannot follow the loss scale of fp16"
        yield Problem("model.dtype", "fp16", expected)
    for index, stage in enumerate(plan.stages):
        width = max(replica.width for replica in stage.replicas) // stage.context
        for name, value, most in (
            ("zero", stage.zero, 0),
            ("tensor width", width, 1),
            ("context", stage.context, 1),
            ("expert", stage.expert, 1),
        ):
            if value > most:
                expected = f"{name} {most} with PowerSGD, which needs whole gradients"
                yield Problem(f"stages[{index}]", f"{name} {value}", expected)
        if stage.offload:
            expected = "nothing offloaded with PowerSGD, whose errors stay on the device"
            yield Problem(f"stages[{index}]", f"offload of {stage.offload}", expected)


def unsupported(plan: Plan) -> tuple[str, ...]:
    """Return a sentence for each feature of a plan that the runtime does not execute; empty if the
    plan runs."""
    return tuple(_sentences(plan))


def check_movable(plan: Plan) -> None:
    """Raise an ``InputError`` for everything in a plan that cannot move to other devices during a
    run."""
    expected = "stages that a run can move"
    problems = [
        Problem(f"stages[{index}]", f"offload of {stage.offload}", expected)
        for index, stage in enumerate(plan.stages)
        if stage.offload
    ]
    if plan.model.powersgd:
        whole = (
            "sums of whole gradients, because the errors that PowerSGD keeps stay where they are"
        )
        problems.append(Problem("model.powersgd", str(plan.model.powersgd), whole))
    raise_any(problems)


class SplitLimits(NamedTuple):
    """The largest numbers of devices over which the plans that a run continues with may split a
    layer; None for any number."""

    width: int | None = 1
    """Devices of a tensor-parallel group."""
    context: int | None = 1
    """Parts of a sequence."""
    expert: int | None = 1
    """Holders of the experts."""


def splits_after(plan: Plan, *, is_compiled: bool = False) -> SplitLimits:
    """Return the limits of the plans that a run continues with.

    Groups, and parts of a sequence, share operations of a captured forward. A run that began with
    single devices may have a model that cannot be captured, and compiled stages have no groups:
    such runs continue without any. Sequences and experts are divided only in runs that began so:
    nothing else shows that those of the model can be.
    """
    is_captured = bool(plan.model.content) or any(
        r.width > 1 for stage in plan.stages for r in stage.replicas
    )
    cuts = any(stage.context > 1 for stage in plan.stages)
    shares = any(stage.expert > 1 for stage in plan.stages)
    return SplitLimits(
        width=None if is_captured and not is_compiled else 1,
        context=len(plan.devices) if cuts else 1,
        expert=None if shares else 1,
    )


def _sentences(plan: Plan) -> Iterator[str]:
    for problem in powersgd_problems(plan):
        asked = f"The plan asks for {problem.found} in {problem.path}"
        yield f"{asked}, and the runtime executes {problem.expected}."
    for index, rule in enumerate(plan.policy):
        if rule.schedule.placement != plan.schedule.placement:
            change = f"from {plan.schedule.kind} to {rule.schedule.kind}"
            switch = f"{change} below {RATE.format(rule.below)} on {rule.edge}"
            yield (
                f"Rule {index} of the policy switches {switch}, "
                "and the runtime switches between others only."
            )
    for index, stage in enumerate(plan.stages):
        for feature in FEATURES:
            if not feature.allows(stage):
                request = f"Stage {index} asks for {feature.name} {feature.asked(stage)}"
                yield f"{request}, and the runtime executes only {_listed(feature.runs)}."
        width = next((r.width for r in stage.replicas if r.width % stage.context), None)
        if width is not None:
            yield (
                f"Stage {index} asks for context parallelism in {stage.context} parts on replicas "
                f"of {counted(width, 'device')}, and the runtime executes only a multiple of the "
                "parts."
            )
        if stage.offload.activations is not None and stage.zero > 1:
            yield (
                f"Stage {index} asks for offload of activations with ZeRO {stage.zero}, "
                "and the runtime executes it only with ZeRO 0 and 1."
            )


def _listed(values: tuple[Value, ...]) -> str:
    """Return values as a list in words.

    >>> _listed((0, 1, 3))
    '0, 1 and 3'
    """
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last
