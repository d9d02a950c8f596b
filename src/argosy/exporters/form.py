"""What exporters share: what comes of an export, and what a target cannot express.

An exporter is a list of rules, each a function that yields a ``Limit`` for what the target has no
words for, and a function that writes what it has words for. A limit is final where nothing that the
target can say comes close; any other may be lost, by name, where the user allows it (``--lossy``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from argosy.errors import InputError, Problem
from argosy.plan.plan import ModelRef, Plan, Recompute, Replica, Stage
from argosy.plan.targets import Target, has_holders
from argosy.runtime.job.launch_script import comment
from argosy.schedule import ScheduleKind
from argosy.workload.chain import Chain
from argosy.workload.tuning import FULL


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Something in a plan that a target cannot express."""

    problem: Problem
    final: bool = False
    """Nothing that the target can say comes close."""
    minor: bool = False
    """Always lost and listed: what is computed stays the same."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan for another system."""

    files: tuple[tuple[str, str], ...]
    """Names and contents."""
    lost: tuple[Problem, ...] = ()
    """What the files do not say although the plan does."""


def head(target: Target, plan: Plan, chain: Chain) -> str:
    """The first line of a file that is made for a target."""
    where = f"{chain.name} on {plan.cluster.name}"
    return comment(f"{target.full_name}: {where}. Data, tokenizer and optimizer are yours to add.")


def settle(limits: Iterable[Limit], *, lossy: bool) -> tuple[Problem, ...]:
    """What is lost, or an ``InputError`` with everything that stands in the way."""
    found = tuple(limits)
    refused = [limit for limit in found if limit.final or not (lossy or limit.minor)]
    if refused:
        raise InputError(map(_refusal, refused))
    return tuple(limit.problem for limit in found)


def _refusal(limit: Limit) -> Problem:
    if limit.final or limit.problem.suggestion is not None:
        return limit.problem
    return replace(limit.problem, suggestion="--lossy writes the rest")


def limit(
    path: str, found: object, expected: str, *, final: bool = False, suggestion: str | None = None
) -> Limit:
    return Limit(
        problem=Problem(path=path, found=str(found), expected=expected, suggestion=suggestion),
        final=final,
    )


def any_of(values: Sequence[object]) -> str:
    """
    >>> any_of(["bf16", "fp16", "fp32"])
    'bf16, fp16 or fp32'
    """
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def note(path: str, found: object, expected: str) -> Limit:
    """Something that the target does its own way without computing anything else."""
    return Limit(problem=Problem(path=path, found=str(found), expected=expected), minor=True)


def collectives_are_chosen(plan: Plan, target: Target) -> Iterator[Limit]:
    if plan.collectives:
        named = ", ".join(sorted({str(choice.algorithm) for choice in plan.collectives}))
        yield note(
            "collectives",
            named,
            f"whatever NCCL chooses: {target.name} names no algorithm for a sum",
        )


def replicas(plan: Plan) -> Iterator[tuple[str, Stage, Replica]]:
    """Every replica with its place in the plan."""
    for index, stage in enumerate(plan.stages):
        for position, replica in enumerate(stage.replicas):
            yield f"stages[{index}].replicas[{position}]", stage, replica


def target_limits(plan: Plan, target: Target) -> Iterator[Limit]:
    """What of a plan is not in the row of a target (``plan.targets``)."""
    if target.one_grid:
        yield from _stages_are_alike(plan, target.name)
    else:
        for stage in plan.stages:
            yield from _widths_are_alike([stage], plan, target.name)
    yield from _splits_are_few(plan, target)
    yield from _samples_are_even(plan, target.name)
    yield from _tensors_are_even(plan, target.name)
    yield from _recomputation_is_known(plan, target)
    yield from _nothing_is_offloaded(plan, target)
    yield from _zero_is_known(plan, target)
    yield from _schedule_is_known(plan, target)
    yield from _policy_is_absent(plan, target.name)
    yield from training_is_known(plan.model, target)


def training_is_known(model: ModelRef, target: Target) -> Iterator[Limit]:
    """A dtype that the target trains in, and all weights: no export writes adapters or frozen
    layers."""
    if model.dtype not in target.dtypes:
        expected = f"{any_of(target.dtypes)}, which {target.full_name} trains in"
        hint = f"plan with --dtype {target.dtypes[0]}"
        yield limit("model.dtype", model.dtype, expected, final=True, suggestion=hint)
    if model.tuning != FULL:
        yield limit(
            "model.tuning",
            "some weights",
            f"training of all weights, which is written for {target.name}",
            final=True,
        )
    if model.powersgd:
        expected = f"sums of whole gradients, which are written for {target.name}"
        yield limit("model.powersgd", model.powersgd, expected, final=True)


def _stages_are_alike(plan: Plan, target: str) -> Iterator[Limit]:
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
    yield from _widths_are_alike(plan.stages, plan, target)


def _widths_are_alike(stages: Iterable[Stage], plan: Plan, target: str) -> Iterator[Limit]:
    """One width for all replicas of these stages."""
    usual = None
    for stage in stages:
        for position, replica in enumerate(stage.replicas):
            usual = usual or replica.width
            if replica.width != usual:
                path = f"stages[{plan.stages.index(stage)}].replicas[{position}].devices"
                expected = f"{usual}: {target} has one tensor-parallel width there"
                yield limit(path, replica.width, expected, final=True)


def _splits_are_few(plan: Plan, target: Target) -> Iterator[Limit]:
    """Widths, parts of a sequence and holders of experts up to what the target has."""
    for index, stage in enumerate(plan.stages):
        for name, found, most in (
            ("width", stage.replicas[0].width // stage.context, target.max_width),
            ("context", stage.context, target.max_context),
            ("expert", stage.expert, target.max_expert),
        ):
            if most is not None and found > most:
                expected = f"at most {most}: {target.name} splits no further"
                yield limit(f"stages[{index}].{name}", found, expected, final=True)


def _samples_are_even(plan: Plan, target: str) -> Iterator[Limit]:
    """Replicas of a stage that take unequal shares; shared out evenly where the micro-batch allows
    it."""
    for index, stage in enumerate(plan.stages):
        shares = [replica.samples for replica in stage.replicas]
        if len(set(shares)) > 1:
            rest = plan.micro_batch_size % len(shares)
            expected = f"equal shares: {target} gives every replica as many samples"
            suggestion = (
                None
                if not rest
                else f"{plan.micro_batch_size} samples do not divide by {len(shares)}"
            )
            found = "/".join(map(str, shares))
            yield limit(
                f"stages[{index}].samples", found, expected, final=rest > 0, suggestion=suggestion
            )


def _tensors_are_even(plan: Plan, target: str) -> Iterator[Limit]:
    for path, _, replica in replicas(plan):
        if max(replica.shares) - min(replica.shares) > 1e-9:
            found = "/".join(f"{share:g}" for share in replica.ratios)
            yield limit(f"{path}.ratios", found, f"equal ratios: {target} splits tensors evenly")


def _recomputation_is_known(plan: Plan, target: Target) -> Iterator[Limit]:
    """If stages may not differ, what is written is what recomputes most: it fits wherever the plan
    fits."""
    kinds = {stage.recompute for stage in plan.stages}
    found = "/".join(stage.recompute for stage in plan.stages)
    mixes = len(kinds) > 1 and (target.one_recompute or Recompute.SELECTIVE in kinds)
    if mixes and target.one_recompute:
        expected = (
            f"one kind for all stages in {target.name}; {strongest_recompute(plan)} is written"
        )
        yield limit("stages.recompute", found, expected)
    elif mixes:
        expected = f"none or full by stage, or selective everywhere, in {target.name}; full is written for selective"
        yield limit("stages.recompute", found, expected)
    elif not kinds <= set(target.recompute):
        expected = (
            f"{any_of(target.recompute)}: {target.name} recomputes whole layers; full is written"
        )
        yield limit("stages.recompute", found, expected)


def _nothing_is_offloaded(plan: Plan, target: Target) -> Iterator[Limit]:
    """What the export would leave on the devices need not fit there."""
    for index, stage in enumerate(plan.stages):
        if stage.offload:
            expected = f"nothing: offload is not written for {target.name}"
            yield limit(f"stages[{index}].offload", str(stage.offload), expected, final=True)


def strongest_recompute(plan: Plan) -> Recompute:
    order = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    return max((stage.recompute for stage in plan.stages), key=order.index)


def _zero_is_known(plan: Plan, target: Target) -> Iterator[Limit]:
    """ZeRO levels that the target has; a level that it lacks is written as the next higher one, or
    the highest."""
    levels, known = _levels(plan), target.levels(len(plan.stages))
    if len(levels) > 1 or not levels <= set(known):
        found = "/".join(str(stage.zero) for stage in plan.stages)
        names = any_of(known)
        expected = f"{names} for all stages in {target.name}; {zero_level(plan, target)} is written"
        yield limit("stages.zero", found, expected)


def zero_level(plan: Plan, target: Target) -> int:
    known, highest = target.levels(len(plan.stages)), max(_levels(plan))
    return min((level for level in known if level >= highest), default=max(known))


def _levels(plan: Plan) -> set[int]:
    """Of the stages that have something to divide."""
    return {stage.zero for stage in plan.stages if has_holders(stage)} or {0}


def _schedule_is_known(plan: Plan, target: Target) -> Iterator[Limit]:
    """A schedule that the target runs, and runs instead; workers with several stages need one that
    has them."""
    schedule, known = plan.schedule, target.schedules
    takes_lists = ScheduleKind.KFKB in known
    if len(plan.stages) > 1 and (
        schedule.kind not in known or (schedule.depth is not None and not takes_lists)
    ):
        expected = f"{any_of(known)}, which {target.name} runs"
        final = schedule.kind.is_chunked and schedule.kind not in known
        hint = f"argosy plan --schedule {known[0]}" + ("" if final else ", or --lossy")
        yield limit("schedule", repr(schedule), expected, final=final, suggestion=hint)


def _policy_is_absent(plan: Plan, target: str) -> Iterator[Limit]:
    if plan.policy:
        yield limit(
            "policy",
            f"{len(plan.policy)} rules",
            f"none: {target} keeps its schedule as the network changes",
        )
