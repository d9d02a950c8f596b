"""What our own runtime executes: one table, which the search keeps to and the runtime checks plans against.

A row is a feature of a stage, what a stage asks for, and the values that run. Whatever has no row runs for any value:
numbers of stages and replicas, shares of samples, numbers and sizes of micro-batches, k and depths of schedules, the
algorithms of ``collectives``, widths and ratios of tensor-parallel groups. A policy runs where its schedules have the
same stages per worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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


def _groups(stage: Stage) -> str:
    """Whether the replicas of a stage are shared alike by their devices."""
    return ALIKE if len({replica.shares for replica in stage.replicas}) == 1 else "of unequal width or ratios"


ALIKE = "all of one width and ratios"
GROUPS = Feature(name="tensor-parallel groups", asked=_groups, runs=(ALIKE,))
CONTEXT = Feature(name="context parallelism", asked=lambda stage: stage.context, runs=(1,))
EXPERT = Feature(name="expert parallelism", asked=lambda stage: stage.expert, runs=(1,))
ZERO = Feature(name="ZeRO", asked=lambda stage: stage.zero, runs=(0, 1, 2, 3))
RECOMPUTE = Feature(
    name="recomputation", asked=lambda stage: str(stage.recompute), runs=tuple(str(value) for value in Recompute)
)
OFFLOAD = Feature(
    name="offload of",
    asked=lambda stage: str(stage.offload) or "nothing",
    runs=("nothing", "optimizer", "activations", "optimizer,activations"),
)

FEATURES = (GROUPS, CONTEXT, EXPERT, ZERO, RECOMPUTE, OFFLOAD)


def unsupported(plan: Plan) -> tuple[str, ...]:
    """A sentence for everything in a plan that the runtime does not execute; empty where it runs as it is."""
    return tuple(_sentences(plan))


def check_movable(plan: Plan) -> None:
    """Raise an ``InputError`` for what in a plan cannot be handed on to other devices while it runs."""
    expected, hint = "stages that a run can move to other devices", "argosy plan --max-width 1 keeps to them"
    problems = [
        Problem(path=f"stages[{index}]", found=f"tensor width {width}", expected=expected, suggestion=hint)
        for index, width in enumerate(stage.replicas[0].width for stage in plan.stages)
        if width > 1
    ]
    problems += [
        Problem(path=f"stages[{index}]", found=f"offload of {stage.offload}", expected=expected)
        for index, stage in enumerate(plan.stages)
        if stage.offload
    ]
    if problems:
        raise InputError(problems)


def _sentences(plan: Plan) -> Iterator[str]:
    for index, rule in enumerate(plan.policy):
        if rule.schedule.placement != plan.schedule.placement:
            switch = f"from {plan.schedule.kind} to {rule.schedule.kind} below {RATE.format(rule.below)} on {rule.edge}"
            yield f"Rule {index} of the policy switches {switch}, and the runtime switches between others only."
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
