"""Define what exporters share: the result of an export, and the limits of a target.

An exporter is a list of rules, each a function that yields a ``Limit`` for something that the
target cannot express, and a function that writes the rest. A limit is final if the target has
nothing similar; any other may be lost, and is then reported, if the user allows it (``--lossy``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from argosy.errors import InputError, Problem
from argosy.plan.plan import ModelRef, Plan, Recompute, Replica, Stage
from argosy.plan.targets import Target, TargetName, has_holders, position_parts
from argosy.runtime.job.launch_script import comment
from argosy.schedule import ScheduleKind
from argosy.workload.chain import Chain
from argosy.workload.tuning import FULL


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A part of a plan that a target cannot express."""

    problem: Problem
    final: bool = False
    """True if the target has nothing similar."""
    minor: bool = False
    """True if it is always lost and reported, because the computation stays the same."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan that is written for another system."""

    files: tuple[tuple[str, str], ...]
    """Names and contents of the files."""
    lost: tuple[Problem, ...] = ()
    """The parts of the plan that the files do not express."""


def head(target: Target, plan: Plan, chain: Chain) -> str:
    """Return the first line of a file that is written for a target."""
    where = f"{chain.name} on {plan.cluster.name}"
    return comment(f"{target.full_name}: {where}. Data, tokenizer and optimizer are yours to add.")


def settle(
    limits: Iterable[Limit], *, lossy: bool, target: TargetName | None = None
) -> tuple[Problem, ...]:
    """Return what the export loses; raise ``InputError`` with all problems if there are any.

    If the stages or the schedule are the problem, and not the model, the last problem names the
    option that plans for ``target``.
    """
    every_limit = tuple(limits)
    refused = [
        _refusal(limit) for limit in every_limit if limit.final or not (lossy or limit.minor)
    ]
    is_model = any(problem.path == "model.name" for problem in refused)
    if target is not None and not is_model and any(map(_is_planned, refused)):
        remedy = f"argosy plan --for {target} finds a plan that can be exported"
        last = refused[-1]
        refused[-1] = replace(last, suggestion="; ".join(filter(None, (last.suggestion, remedy))))
    if refused:
        raise InputError(refused)
    return tuple(limit.problem for limit in every_limit)


def _is_planned(problem: Problem) -> bool:
    """Return whether a problem is about something that a search chooses."""
    return (problem.path or "").startswith(("stages", "schedule"))


def _refusal(limit: Limit) -> Problem:
    """Return the problem of a limit, with the hint that ``--lossy`` helps if it does."""
    if limit.final or limit.problem.suggestion is not None:
        return limit.problem
    return replace(limit.problem, suggestion="--lossy writes the rest")


def limit(
    path: str, found: object, expected: str, *, final: bool = False, suggestion: str | None = None
) -> Limit:
    """Build a limit from a path in the plan, the value found there, and what is expected."""
    return Limit(problem=Problem(path, str(found), expected, suggestion=suggestion), final=final)


def any_of(values: Sequence[object]) -> str:
    """Join values with commas and "or".

    >>> any_of(["bf16", "fp16", "fp32"])
    'bf16, fp16 or fp32'
    """
    *first_values, last = map(str, values)
    return f"{', '.join(first_values)} or {last}" if first_values else last


def note(path: str, found: object, expected: str) -> Limit:
    """Build a minor limit: the target does this in its own way, with the same results."""
    return Limit(problem=Problem(path, str(found), expected), minor=True)


def _collectives_are_chosen(plan: Plan, target: Target) -> Iterator[Limit]:
    """Yield a note if the plan chooses algorithms of collectives."""
    if plan.collectives:
        named = ", ".join(sorted({str(choice.algorithm) for choice in plan.collectives}))
        yield note(
            "collectives",
            named,
            f"whatever NCCL chooses: {target.name} names no algorithm for a sum",
        )


def replicas(plan: Plan) -> Iterator[tuple[str, Stage, Replica]]:
    """Yield every replica with its path in the plan and its stage."""
    for index, stage in enumerate(plan.stages):
        for position, replica in enumerate(stage.replicas):
            yield f"stages[{index}].replicas[{position}]", stage, replica


def target_limits(plan: Plan, target: Target) -> Iterator[Limit]:
    """Yield everything in a plan that the row of a target does not allow (``plan.targets``)."""
    if target.one_grid:
        yield from _stages_are_alike(plan, target.name)
    else:
        for stage in plan.stages:
            yield from _widths_are_alike([stage], plan, target.name)
    yield from _splits_are_few(plan, target)
    yield from _samples_are_even(plan, target.name)
    yield from _tensors_are_even(plan, target.name)
    yield from _positions_are_even(plan, target)
    yield from _recomputation_is_known(plan, target)
    yield from _nothing_is_offloaded(plan, target)
    yield from _zero_is_known(plan, target)
    yield from _schedule_is_known(plan, target)
    yield from _policy_is_absent(plan, target.name)
    yield from training_is_known(plan.model, target)
    yield from _collectives_are_chosen(plan, target)


def training_is_known(model: ModelRef, target: Target) -> Iterator[Limit]:
    """Yield limits for a dtype or an optimizer that the target does not have, and for adapters or
    frozen layers."""
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
    if target.optimizers is not None and model.optimizer not in target.optimizers:
        expected = f"{any_of(target.optimizers)}, which is written for {target.name}"
        yield limit("model.optimizer", model.optimizer, expected)
    if model.powersgd:
        expected = f"sums of whole gradients, which are written for {target.name}"
        yield limit("model.powersgd", model.powersgd, expected, final=True)


def _stages_are_alike(plan: Plan, target: str) -> Iterator[Limit]:
    """Yield limits unless all stages have one data, tensor, context and expert width."""
    first = plan.stages[0]
    for index, stage in enumerate(plan.stages):
        for name, value, usual in (
            ("replicas", len(stage.replicas), len(first.replicas)),
            ("context", stage.context, first.context),
            ("expert", stage.expert, first.expert),
        ):
            if value != usual:
                expected = f"{usual}, as in stage 0: {target} has one number for the whole pipeline"
                yield limit(f"stages[{index}].{name}", value, expected, final=True)
    yield from _widths_are_alike(plan.stages, plan, target)


def _widths_are_alike(stages: Iterable[Stage], plan: Plan, target: str) -> Iterator[Limit]:
    """Yield limits unless all replicas of these stages have one width."""
    usual = None
    for stage in stages:
        for position, replica in enumerate(stage.replicas):
            usual = usual or replica.width
            if replica.width != usual:
                path = f"stages[{plan.stages.index(stage)}].replicas[{position}].devices"
                expected = f"{usual}: {target} has one tensor-parallel width there"
                yield limit(path, replica.width, expected, final=True)


def _splits_are_few(plan: Plan, target: Target) -> Iterator[Limit]:
    """Yield limits for widths, parts of a sequence and holders of experts beyond those of the
    target."""
    for index, stage in enumerate(plan.stages):
        for name, value, most in (
            ("width", stage.replicas[0].width // stage.context, target.max_width),
            ("context", stage.context, target.max_context),
            ("expert", stage.expert, target.max_expert),
        ):
            if most is not None and value > most:
                expected = f"at most {most}: {target.name} splits no further"
                yield limit(f"stages[{index}].{name}", value, expected, final=True)


def _samples_are_even(plan: Plan, target: str) -> Iterator[Limit]:
    """Yield limits for replicas with unequal samples.

    The samples are distributed evenly if the micro-batch can be divided.
    """
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
            actual = "/".join(map(str, shares))
            yield limit(
                f"stages[{index}].samples", actual, expected, final=rest > 0, suggestion=suggestion
            )


def _tensors_are_even(plan: Plan, target: str) -> Iterator[Limit]:
    """Yield limits for replicas whose devices have unequal shares."""
    for path, _, replica in replicas(plan):
        if max(replica.shares) - min(replica.shares) > 1e-9:
            actual = "/".join(f"{share:g}" for share in replica.ratios)
            yield limit(f"{path}.ratios", actual, f"equal ratios: {target} splits tensors evenly")


def _positions_are_even(plan: Plan, target: Target) -> Iterator[Limit]:
    """Yield a final limit for a sequence that its tensor- and context-parallel groups do not
    divide."""
    length = plan.model.sequence_length
    for _, stage, replica in replicas(plan):
        parts = position_parts(replica.width // stage.context, stage.context)
        if length % parts:
            expected = (
                f"a multiple of {parts}: {target.name} cuts sequences by tensor and context "
                "parallelism"
            )
            yield limit("model.sequence_length", length, expected, final=True)
            return


def _recomputation_is_known(plan: Plan, target: Target) -> Iterator[Limit]:
    """Yield limits for recomputation that the target does not have.

    If stages may not differ, the strongest recomputation is written: it fits if the plan fits.
    """
    kinds = {stage.recompute for stage in plan.stages}
    actual = "/".join(stage.recompute for stage in plan.stages)
    mixes = len(kinds) > 1 and (target.one_recompute or Recompute.SELECTIVE in kinds)
    if mixes and target.one_recompute:
        expected = (
            f"one kind for all stages in {target.name}; {strongest_recompute(plan)} is written"
        )
        yield limit("stages.recompute", actual, expected)
    elif mixes:
        expected = (
            f"none or full by stage, or selective everywhere, in {target.name}; full is written "
            "for selective"
        )
        yield limit("stages.recompute", actual, expected)
    elif not kinds <= set(target.recompute):
        expected = (
            f"{any_of(target.recompute)}: {target.name} recomputes whole layers; full is written"
        )
        yield limit("stages.recompute", actual, expected)


def _nothing_is_offloaded(plan: Plan, target: Target) -> Iterator[Limit]:
    """Yield final limits for offload, because without it the plan need not fit on the devices."""
    for index, stage in enumerate(plan.stages):
        if stage.offload:
            expected = f"nothing: offload is not written for {target.name}"
            yield limit(f"stages[{index}].offload", str(stage.offload), expected, final=True)


def strongest_recompute(plan: Plan) -> Recompute:
    """Return the strongest recomputation of all stages."""
    order = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    return max((stage.recompute for stage in plan.stages), key=order.index)


def _zero_is_known(plan: Plan, target: Target) -> Iterator[Limit]:
    """Yield a limit for ZeRO levels that the target does not have.

    A missing level is written as the next higher one, or as the highest.
    """
    levels, known = _levels(plan), _known_levels(plan, target)
    if len(levels) > 1 or not levels <= set(known):
        actual = "/".join(str(stage.zero) for stage in plan.stages)
        names = any_of(known)
        expected = f"{names} for all stages in {target.name}; {zero_level(plan, target)} is written"
        yield limit("stages.zero", actual, expected)


def zero_level(plan: Plan, target: Target) -> int:
    """Return the ZeRO level that is written for a target."""
    known, highest = _known_levels(plan, target), max(_levels(plan))
    return min((level for level in known if level >= highest), default=max(known))


def _known_levels(plan: Plan, target: Target) -> tuple[int, ...]:
    """Return the ZeRO levels that the target has for a plan."""
    return target.levels(len(plan.stages), plan.model.optimizer)


def _levels(plan: Plan) -> set[int]:
    """Return the ZeRO levels of the stages that have something to shard."""
    return {stage.zero for stage in plan.stages if has_holders(stage)} or {0}


def _schedule_is_known(plan: Plan, target: Target) -> Iterator[Limit]:
    """Yield a limit for a schedule that the target does not run.

    It is final if workers have several stages, because no other schedule can replace it.
    """
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
    """Yield a limit for a policy, because the target keeps its schedule."""
    if plan.policy:
        yield limit(
            "policy",
            f"{len(plan.policy)} rules",
            f"none: {target} keeps its schedule as the network changes",
        )
