"""What our own runtime executes: one table, which the search keeps to and the runtime checks plans
against.

A row is a feature of a stage, what a stage asks for, and the values that run. Whatever has no row
runs for any value: numbers of stages and replicas, shares of samples, numbers and sizes of
micro-batches, k and depths of schedules, the algorithms of ``collectives``, widths and ratios of
tensor-parallel groups. A policy runs where its schedules have the same stages per worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from argosy.dtype import Dtype
from argosy.errors import InputError, Problem
from argosy.plan.plan import Plan, Recompute, Stage
from argosy.units import RATE

Value = int | str


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One row: what a stage may ask for, and what of it runs."""

    name: str
    asked: Callable[[Stage], Value]
    """The value that a stage asks for."""
    runs: tuple[Value, ...]
    """The values that the runtime executes."""

    def allows(self, stage: Stage) -> bool:
        return self.asked(stage) in self.runs


def _parts(stage: Stage) -> str:
    """What has a part of the sequence."""
    return ALONE if stage.context == 1 or stage.parts_are_alone else "over tensor-parallel groups"


def _experts(stage: Stage) -> str:
    """What has a part of the experts."""
    if stage.expert == 1 or all(replica.width == 1 for replica in stage.replicas):
        return ALONE
    return "over parts of the sequence" if stage.context > 1 else "over tensor-parallel groups"


ALONE = "over single devices"
CONTEXT = Feature(name="context parallelism", asked=_parts, runs=(ALONE,))
EXPERT = Feature(name="expert parallelism", asked=_experts, runs=(ALONE,))
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

FEATURES = (CONTEXT, EXPERT, ZERO, RECOMPUTE, OFFLOAD)


def powersgd_problems(plan: Plan) -> Iterator[Problem]:
    """What in a plan PowerSGD cannot do: it needs whole gradients of whole matrices, in units that
    do not change."""
    if not plan.model.powersgd:
        return
    if plan.model.dtype is Dtype.FP16:
        expected = "bf16 or fp32 with PowerSGD, whose errors cannot follow the loss scale of fp16"
        yield Problem(path="model.dtype", found="fp16", expected=expected)
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
                yield Problem(path=f"stages[{index}]", found=f"{name} {value}", expected=expected)
        if stage.offload:
            expected = "nothing offloaded with PowerSGD, whose errors stay on the device"
            yield Problem(
                path=f"stages[{index}]", found=f"offload of {stage.offload}", expected=expected
            )


def unsupported(plan: Plan) -> tuple[str, ...]:
    """A sentence for everything in a plan that the runtime does not execute; empty where it runs as
    it is."""
    return tuple(_sentences(plan))


def check_movable(plan: Plan) -> None:
    """Raise an ``InputError`` for what in a plan cannot be handed on to other devices while it
    runs."""
    expected, hint = (
        "stages that a run can move",
        "argosy plan --max-context 1 --max-expert 1 keeps to them",
    )
    problems = [
        Problem(
            path=f"stages[{index}]", found=f"{name} {degree}", expected=expected, suggestion=hint
        )
        for index, stage in enumerate(plan.stages)
        for name, degree in (("context", stage.context), ("expert", stage.expert))
        if degree > 1
    ]
    problems += [
        Problem(path=f"stages[{index}]", found=f"offload of {stage.offload}", expected=expected)
        for index, stage in enumerate(plan.stages)
        if stage.offload
    ]
    if plan.model.powersgd:
        whole = (
            "sums of whole gradients, because the errors that PowerSGD keeps stay where they are"
        )
        problems.append(
            Problem(path="model.powersgd", found=str(plan.model.powersgd), expected=whole)
        )
    if problems:
        raise InputError(problems)


def max_width_after(plan: Plan, *, is_compiled: bool = False) -> int | None:
    """Devices of a tensor-parallel group at most in the plans that a run goes on by; None for any
    number.

    Groups share operations of a captured forward. A run that began with layers alone may have a
    model that cannot be captured, and compiled stages have no groups: such runs go on without any.
    """
    is_captured = bool(plan.model.content) or any(
        r.width > 1 for stage in plan.stages for r in stage.replicas
    )
    return None if is_captured and not is_compiled else 1


def _sentences(plan: Plan) -> Iterator[str]:
    for problem in powersgd_problems(plan):
        yield f"The plan asks for {problem.found} in {problem.path}, and the runtime executes {problem.expected}."
    for index, rule in enumerate(plan.policy):
        if rule.schedule.placement != plan.schedule.placement:
            switch = f"from {plan.schedule.kind} to {rule.schedule.kind} below {RATE.format(rule.below)} on {rule.edge}"
            yield f"Rule {index} of the policy switches {switch}, and the runtime switches between others only."
    sharing = [index for index, stage in enumerate(plan.stages) if stage.expert > 1]
    wide = [
        index
        for index, stage in enumerate(plan.stages)
        if any(replica.width > 1 for replica in stage.replicas)
    ]
    if sharing and set(wide) - set(sharing):
        beside = (
            f"beside stage {min(set(wide) - set(sharing))}, whose replicas have several devices"
        )
        yield f"Stage {sharing[0]} shares out experts {beside}, and the runtime executes that only with single devices."
    for index, stage in enumerate(plan.stages):
        for feature in FEATURES:
            if not feature.allows(stage):
                asked, runs = feature.asked(stage), _listed(feature.runs)
                yield f"Stage {index} asks for {feature.name} {asked}, and the runtime executes only {runs}."
        if stage.offload.activations is not None and stage.zero > 1:
            yield (
                f"Stage {index} asks for offload of activations with ZeRO {stage.zero}, and the runtime executes it "
                "only with ZeRO 0 and 1."
            )


def _listed(values: tuple[Value, ...]) -> str:
    """
    >>> _listed((0, 1, 3))
    '0, 1 and 3'
    """
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last
