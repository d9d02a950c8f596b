"""What exporters share: what comes of an export, and what a target cannot express.

An exporter is a list of rules, each a function that yields a ``Limit`` for what the target has no words for, and a
function that writes what it has words for. A limit is final where nothing that the target can say comes close; any
other may be lost, by name, where the user allows it (``--lossy``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from argosy.errors import InputError, Problem
from argosy.plan.plan import Plan, Recompute, Replica, Stage
from argosy.runtime.launch import comment
from argosy.schedule import ScheduleKind
from argosy.workload.chain import Chain


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Something in a plan that a target cannot express."""

    problem: Problem
    final: bool = False
    """Nothing that the target can say comes close."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan for another system."""

    files: tuple[tuple[str, str], ...]
    """Names and contents."""
    lost: tuple[Problem, ...] = ()
    """What the files do not say although the plan does."""


def head(target: str, plan: Plan, chain: Chain) -> str:
    """The first line of a file that is made for a target."""
    return comment(f"{target}: {chain.name} on {plan.cluster.name}. Data, tokenizer and optimizer are yours to add.")


def settle(limits: Iterable[Limit], *, lossy: bool) -> tuple[Problem, ...]:
    """What is lost, or an ``InputError`` with everything that stands in the way."""
    found = tuple(limits)
    refused = [limit for limit in found if limit.final or not lossy]
    if refused:
        raise InputError(map(_refusal, refused))
    return tuple(limit.problem for limit in found)


def _refusal(limit: Limit) -> Problem:
    if limit.final or limit.problem.suggestion is not None:
        return limit.problem
    return replace(limit.problem, suggestion="--lossy writes the rest")


def limit(path: str, found: object, expected: str, *, final: bool = False, suggestion: str | None = None) -> Limit:
    return Limit(problem=Problem(path=path, found=str(found), expected=expected, suggestion=suggestion), final=final)


def replicas(plan: Plan) -> Iterator[tuple[str, Stage, Replica]]:
    """Every replica with its place in the plan."""
    for index, stage in enumerate(plan.stages):
        for position, replica in enumerate(stage.replicas):
            yield f"stages[{index}].replicas[{position}]", stage, replica


def stages_are_alike(plan: Plan, target: str) -> Iterator[Limit]:
    """One data, tensor, context and expert width for the whole pipeline."""
    first = plan.stages[0]
    for index, stage in enumerate(plan.stages):
        for what, found, usual in (
            ("replicas", len(stage.replicas), len(first.replicas)),
            ("context", stage.context, first.context),
            ("expert", stage.expert, first.expert),
        ):
            if found != usual:
                expected = f"{usual}, as in stage 0: {target} has one number for the whole pipeline"
                yield limit(f"stages[{index}].{what}", found, expected, final=True)
    yield from widths_are_alike(plan.stages, plan, target)


def widths_are_alike(stages: Iterable[Stage], plan: Plan, target: str) -> Iterator[Limit]:
    """One width for all replicas of these stages."""
    usual = None
    for stage in stages:
        for position, replica in enumerate(stage.replicas):
            usual = usual or replica.width
            if replica.width != usual:
                path = f"stages[{plan.stages.index(stage)}].replicas[{position}].devices"
                expected = f"{usual}: {target} has one tensor-parallel width there"
                yield limit(path, replica.width, expected, final=True)


def samples_are_even(plan: Plan, target: str) -> Iterator[Limit]:
    """Replicas of a stage that take unequal shares; shared out evenly where the micro-batch allows it."""
    for index, stage in enumerate(plan.stages):
        shares = [replica.samples for replica in stage.replicas]
        if len(set(shares)) > 1:
            rest = plan.micro_batch_size % len(shares)
            expected = f"equal shares: {target} gives every replica as many samples"
            suggestion = None if not rest else f"{plan.micro_batch_size} samples do not divide by {len(shares)}"
            found = "/".join(map(str, shares))
            yield limit(f"stages[{index}].samples", found, expected, final=rest > 0, suggestion=suggestion)


def tensors_are_even(plan: Plan, target: str) -> Iterator[Limit]:
    for path, _, replica in replicas(plan):
        if max(replica.shares) - min(replica.shares) > 1e-9:
            found = "/".join(f"{share:g}" for share in replica.ratios)
            yield limit(f"{path}.ratios", found, f"equal ratios: {target} splits tensors evenly")


def recomputation_is_one(plan: Plan, target: str) -> Iterator[Limit]:
    """Where stages differ, what is written is what recomputes most: it fits wherever the plan fits."""
    kinds = {stage.recompute for stage in plan.stages}
    if len(kinds) > 1:
        found = "/".join(stage.recompute for stage in plan.stages)
        expected = f"one kind for all stages in {target}; {strongest_recompute(plan)} is written"
        yield limit("stages.recompute", found, expected)


def strongest_recompute(plan: Plan) -> Recompute:
    order = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    return max((stage.recompute for stage in plan.stages), key=order.index)


def zero_is_one_of(plan: Plan, target: str, known: tuple[int, ...]) -> Iterator[Limit]:
    """ZeRO levels that the target has; a level that it lacks is written as the next higher one, or the highest."""
    levels = sorted({stage.zero for stage in plan.stages})
    if len(levels) > 1 or levels[0] not in known:
        found = "/".join(str(stage.zero) for stage in plan.stages)
        names = " or ".join(map(str, known))
        yield limit("stages.zero", found, f"{names} for all stages in {target}; {zero_level(plan, known)} is written")


def zero_level(plan: Plan, known: tuple[int, ...]) -> int:
    highest = max(stage.zero for stage in plan.stages)
    return min((level for level in known if level >= highest), default=max(known))


def schedule_is_one_of(plan: Plan, target: str, known: tuple[ScheduleKind, ...]) -> Iterator[Limit]:
    """A schedule that the target runs, and runs instead; workers with several stages need one that has them."""
    schedule = plan.schedule
    if len(plan.stages) > 1 and (schedule.kind not in known or schedule.depth is not None):
        expected = f"{' or '.join(known)}, which {target} runs"
        final = schedule.kind.is_chunked and schedule.kind not in known
        hint = f"argosy plan --schedule {known[0]}" + ("" if final else ", or --lossy")
        yield limit("schedule", repr(schedule), expected, final=final, suggestion=hint)


def policy_is_absent(plan: Plan, target: str) -> Iterator[Limit]:
    if plan.policy:
        yield limit("policy", f"{len(plan.policy)} rules", f"none: {target} keeps its schedule as the network changes")
