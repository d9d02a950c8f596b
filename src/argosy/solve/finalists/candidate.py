"""Describe complete plans that a search has judged, and the small steps between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from argosy.plan.offload import choices
from argosy.plan.plan import Recompute
from argosy.schedule import ScheduleSpec
from argosy.schedule.generate import group_size
from argosy.solve.finalists.judge import Complete, Key, plan_key
from argosy.solve.search.pipeline import Choice
from argosy.solve.search.shape import Shape, held
from argosy.space.enumerate import Scope, is_measured
from argosy.space.option import Option, Vector
from argosy.space.price import Prices
from argosy.space.shares import share_samples
from argosy.units import counted

# Kinds of recomputation by effort; ties go to the plan with less.
_EFFORT = {Recompute.NONE: 0, Recompute.SELECTIVE: 1, Recompute.FULL: 2}
# Seen at most: 1.002 with stages of one pool each, 1.010 with mixed stages of 64 devices.
_LOST, _LOST_BEHIND_MIXED = 1.002, 1.015


@dataclass(order=True)
class Candidate:
    """A complete plan that has a time; of equally fast ones the one with least ZeRO and
    recomputation comes first."""

    seconds: float
    effort: int = field(init=False)
    number: int
    """The order in which plans were found, which breaks ties."""
    shape: Shape = field(compare=False)
    schedule: ScheduleSpec = field(compare=False)
    plan: Complete = field(compare=False)
    units: Vector = field(compare=False)
    is_played: bool = field(default=False, compare=False)
    """Whether the time comes from the exact engine and not from the judge."""

    def __post_init__(self) -> None:
        if not self.is_played:
            self.seconds = float(f"{self.seconds:.9g}")
        self.effort = sum(
            choice.option.zero + _EFFORT[choice.option.recompute] + len(choice.option.offload.named)
            for choice in self.plan
        )

    @cached_property
    def key(self) -> Key:
        """Return what identifies the plan, independent of how it was found."""
        return self.schedule, plan_key(self.shape, self.plan)

    @property
    def num_steps(self) -> int:
        """Return the number of devices times micro-batches."""
        devices = sum(part.devices for choice in self.plan for part in choice.option.parts)
        return devices * self.shape.num_micro_batches

    @property
    def folding_loss(self) -> float:
        """Return the factor by which the folded play (``sim.fold``) may be slower than that of the
        whole plan.

        Nothing is lost if equal replicas, on whole nodes or inside one, hand on to as many, or to a
        multiple or a part of that number. A replica behind a stage of several pools waits for the
        slowest of them only when it is folded.
        """
        parts = [
            (part, pool)
            for c in self.plan
            for part, pool in zip(c.option.parts, c.option.pools, strict=True)
        ]
        if len(parts) > len(self.plan):
            return _LOST_BEHIND_MIXED
        if any(
            part.extra or (part.devices > pool.per_node and part.devices % pool.per_node)
            for part, pool in parts
        ):
            return _LOST
        counts = sorted({choice.option.replicas for choice in self.plan})
        is_exact = all(large % small == 0 for small, large in itertools.pairwise(counts))
        return 1.0 if is_exact else _LOST

    def fits(self, plan: Complete) -> bool:
        """Return whether another plan with the same number of stages fits under this one's
        schedule."""
        count = self.shape.num_micro_batches
        group, kept = group_size(self.schedule, count), held(self.schedule, len(plan), count)
        return all(
            c.option.fits(c.first, c.end, depth, group) for c, depth in zip(plan, kept, strict=True)
        )

    def __repr__(self) -> str:
        stages = " | ".join(describe_choice(choice) for choice in self.plan)
        return f"{self.shape!r}, {self.schedule!r}: {stages}"


def describe_choice(choice: Choice) -> str:
    """Return a description such as ``4 layers on 8x V100-32GB, tensor width 2, zero 3``."""
    on = " + ".join(
        f"{part.devices}x {pool.name}"
        for part, pool in zip(choice.option.parts, choice.option.pools, strict=True)
    )
    widths = sorted({part.tensor_width for part in choice.option.parts})
    tricks = [f"tensor width {'/'.join(map(str, widths))}"] if widths != [1] else []
    tricks += [f"context {choice.option.context}"] if choice.option.context > 1 else []
    tricks += [f"expert {choice.option.expert}"] if choice.option.expert > 1 else []
    tricks += [f"zero {choice.option.zero}"] if choice.option.zero > 1 else []
    tricks += (
        [f"recompute {choice.option.recompute}"]
        if choice.option.recompute is not Recompute.NONE
        else []
    )
    tricks += [f"offload {choice.option.offload}"] if choice.option.offload else []
    return ", ".join([f"{counted(choice.end - choice.first, 'layer')} on {on}", *tricks])


def unlike(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the first of all candidates that have the same layers on the same numbers of
    devices."""
    seen = set()
    for candidate in candidates:
        key = (candidate.shape, *((choice.end, choice.option.vector) for choice in candidate.plan))
        if key not in seen:
            seen.add(key)
            yield candidate


def diverse(candidates: Sequence[Candidate], most: int) -> list[Candidate]:
    """Return at most ``most`` candidates, of as many sorts as possible.

    The judge errs in the same direction for all plans of a sort (micro-batches, devices of the
    stages, whether weights are sharded), so the first of a sort represents the others. A quarter is
    left to the best candidates that differ in layers only.
    """
    sorts: dict[object, Candidate] = {}
    for candidate in candidates:
        sharded = any(choice.option.zero > 1 for choice in candidate.plan)
        key = (candidate.shape, sharded, *(choice.option.vector for choice in candidate.plan))
        sorts.setdefault(key, candidate)
    first = list(sorts.values())[: max(1, most - most // 4)]
    known = {id(candidate) for candidate in first}
    return [*first, *(candidate for candidate in unlike(candidates) if id(candidate) not in known)][
        :most
    ]


def single_stages(
    prices: Prices, shape: Shape, options: Mapping[Vector, Sequence[Option]], below: float
) -> Iterator[Complete]:
    """Yield plans without a pipeline that may take less than ``below`` seconds."""
    end, count = prices.num_layers, shape.num_micro_batches
    for option in itertools.chain.from_iterable(options.values()):
        if count * sum(option.seconds(0, end)) + option.tail(0, end) < below:
            yield (Choice(option, 0, end),)


def neighbours(plan: Complete, options: Mapping[Vector, Sequence[Option]]) -> Iterator[Complete]:
    """Yield plans one small step away: another option for a stage, a layer moved to another stage,
    two stages swapped."""
    by_vector = {group[0].vector: group for group in options.values()}
    for index, choice in enumerate(plan):
        current = choice.option
        for option in by_vector.get(current.vector, ()):
            if option is not current and option.way != current.way:
                yield (*plan[:index], replace(choice, option=option), *plan[index + 1 :])
    yield from shifted(plan)
    lengths = [choice.end - choice.first for choice in plan]
    chosen = [choice.option for choice in plan]
    for first, second in itertools.combinations(range(len(plan)), 2):
        swapped, both = [*chosen], [*lengths]
        swapped[first], swapped[second] = swapped[second], swapped[first]
        both[first], both[second] = both[second], both[first]
        yield _with_lengths(plan, swapped, both)


def shifted(plan: Complete, number: int = 1) -> Iterator[Complete]:
    """Yield the plan with ``number`` layers moved from any stage to any other; a judge checks
    whether they fit."""
    lengths = [choice.end - choice.first for choice in plan]
    chosen = [choice.option for choice in plan]
    for source, target in itertools.permutations(range(len(plan)), 2):
        if lengths[source] > number:
            moved = [*lengths]
            moved[source], moved[target] = moved[source] - number, moved[target] + number
            yield _with_lengths(plan, chosen, moved)


def reshaped(candidate: Candidate, shape: Shape, scope: Scope) -> Complete | None:
    """Return a plan with the same stages, cut into other micro-batches, with the least
    recomputation that fits.

    There is none if a stage has too few samples or does not fit, or if the scope forbids it.
    """
    count = shape.num_micro_batches
    if candidate.schedule not in shape.schedules:
        return None
    group = group_size(candidate.schedule, count)
    kept = held(candidate.schedule, len(candidate.plan), count)
    stages = []
    for choice, depth in zip(candidate.plan, kept, strict=True):
        variants = (
            _resized(choice.option, shape.micro_batch_size, recompute, scope)
            for recompute in _EFFORT
            if recompute in scope.recompute
        )
        fitting = (
            option
            for option in variants
            if option is not None and option.fits(choice.first, choice.end, depth, group)
        )
        option = next(fitting, None)
        if option is None:
            return None
        stages.append(replace(choice, option=option))
    return tuple(stages)


def _resized(option: Option, micro_batch: int, recompute: Recompute, scope: Scope) -> Option | None:
    """Return the option with its replicas' shares of a micro-batch of another size; None if there
    are too few samples or the scope or a profile does not allow the shares."""
    groups = [(part.pool, part.width, part.replicas) for part in option.parts]
    split = {"context": option.context, "expert": option.expert}
    parts = share_samples(option.prices, groups, micro_batch, recompute, **split)
    if parts is None or not scope.allows_shares(parts):
        return None
    is_split = option.expert > 1 and any(part.extra for part in parts)
    if is_split or not all(is_measured(option.prices, part) for part in parts):
        return None
    return replace(option, parts=parts, recompute=recompute)


def on_pools(candidate: Candidate, prices: Prices, pools: Sequence[int]) -> Candidate:
    """Return a plan that was found on some of the pools, numbered from 0, as a plan on all of them;
    ``pools`` lists which."""

    def option_of(option: Option) -> Option:
        vector = [0] * len(prices.pools)
        for pool, number in zip(pools, option.vector, strict=True):
            vector[pool] = number
        parts = tuple(part._replace(pool=pools[part.pool]) for part in option.parts)
        return replace(option, prices=prices, vector=tuple(vector), parts=parts)

    plan = tuple(replace(choice, option=option_of(choice.option)) for choice in candidate.plan)
    return replace(candidate, plan=plan, units=(1,) * len(prices.pools))


def _with_lengths(plan: Complete, options: Sequence[Option], lengths: Sequence[int]) -> Complete:
    """Return a plan with other options and lengths, with the same stages where nothing changes."""
    stages, first = [], 0
    for choice, option, length in zip(plan, options, lengths, strict=True):
        end = first + length
        is_same = choice.option is option and choice.first == first and choice.end == end
        stages.append(choice if is_same else Choice(option, first, end))
        first = end
    return tuple(stages)


def lightened(candidate: Candidate, scope: Scope) -> Complete:
    """Return the plan with every stage at the least offload, recomputation and ZeRO of a scope with
    which it fits; ZeRO 1 costs no more than none."""
    plan = candidate.plan
    for index, choice in enumerate(plan):
        current = choice.option
        if current.zero <= 1 and current.recompute is Recompute.NONE and not current.offload:
            continue
        alone = choice.option.holders == 1
        lighter = (
            replace(
                choice, option=replace(current, recompute=recompute, zero=zero, offload=offload)
            )
            for offload in choices(current.offload)
            for recompute in _EFFORT
            if recompute in scope.recompute
            and not (offload.activations and recompute is Recompute.SELECTIVE)
            for zero in ((0,) if alone else sorted({*scope.zero} - {0}))
        )
        fitting = ((*plan[:index], variant, *plan[index + 1 :]) for variant in lighter)
        plan = next((variant for variant in fitting if candidate.fits(variant)), plan)
    return plan
