"""Complete plans that a search has judged, and the small steps between them."""

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
from argosy.space.enumerate import Scope
from argosy.space.option import Option, Vector
from argosy.space.price import Prices
from argosy.units import counted

_EFFORT = {Recompute.NONE: 0, Recompute.SELECTIVE: 1, Recompute.FULL: 2}


@dataclass(order=True)
class Candidate:
    """A complete plan with its time; of equal ones the one with least ZeRO and recomputation comes
    first."""

    seconds: float
    effort: int = field(init=False)
    number: int
    """In the order in which they were found: breaks ties."""
    shape: Shape = field(compare=False)
    schedule: ScheduleSpec = field(compare=False)
    plan: Complete = field(compare=False)
    units: Vector = field(compare=False)
    is_played: bool = field(default=False, compare=False)
    """Whether its time is the exact engine's and not the judge's."""

    def __post_init__(self) -> None:
        if not self.is_played:
            self.seconds = float(f"{self.seconds:.9g}")
        self.effort = sum(
            choice.option.zero + _EFFORT[choice.option.recompute] + len(choice.option.offload.named)
            for choice in self.plan
        )

    @cached_property
    def key(self) -> Key:
        """What it is, however it was found."""
        return self.schedule, plan_key(self.shape, self.plan)

    @property
    def num_steps(self) -> int:
        """Devices times micro-batches."""
        devices = sum(part.devices for choice in self.plan for part in choice.option.parts)
        return devices * self.shape.num_micro_batches

    @property
    def folds_exactly(self) -> bool:
        """Whether ``sim.fold`` loses nothing: equal replicas, on whole nodes or inside one, hand on
        to as many, or to a multiple or a part of that number."""
        parts = [
            (part, pool)
            for c in self.plan
            for part, pool in zip(c.option.parts, c.option.pools, strict=True)
        ]
        if any(
            part.extra or (part.devices > pool.per_node and part.devices % pool.per_node)
            for part, pool in parts
        ):
            return False
        counts = sorted({choice.option.replicas for choice in self.plan})
        return all(large % small == 0 for small, large in itertools.pairwise(counts))

    def fits(self, plan: Complete) -> bool:
        """Whether another plan of as many stages fits under this one's schedule."""
        count = self.shape.num_micro_batches
        group, kept = group_size(self.schedule, count), held(self.schedule, len(plan), count)
        return all(
            c.option.fits(c.first, c.end, depth, group) for c, depth in zip(plan, kept, strict=True)
        )

    def __repr__(self) -> str:
        stages = " | ".join(describe_choice(choice) for choice in self.plan)
        return f"{self.shape!r}, {self.schedule!r}: {stages}"


def describe_choice(choice: Choice) -> str:
    """``4 layers on 8x V100-32GB, tensor width 2, zero 3``."""
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
    """The first of all that have the same layers on the same numbers of devices."""
    seen = set()
    for candidate in candidates:
        key = (candidate.shape, *((choice.end, choice.option.vector) for choice in candidate.plan))
        if key not in seen:
            seen.add(key)
            yield candidate


def diverse(candidates: Sequence[Candidate], most: int) -> list[Candidate]:
    """At most so many, and of as many sorts as there are among them: the judge errs in the same
    direction for all plans of a sort (micro-batches, devices of the stages, whether weights are
    sharded), so the first of a sort speaks for the others. A quarter is left to the best of what
    differs in layers only."""
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
    """Plans without a pipeline that may take less than a time."""
    end, count = prices.num_layers, shape.num_micro_batches
    for option in itertools.chain.from_iterable(options.values()):
        if count * sum(option.seconds(0, end)) + option.tail(0, end) < below:
            yield (Choice(option, 0, end),)


def neighbours(plan: Complete, options: Mapping[Vector, Sequence[Option]]) -> Iterator[Complete]:
    """Plans one small step away: another option for a stage, a layer moved to another stage, two
    stages swapped."""
    alike = {group[0].vector: group for group in options.values()}
    for index, choice in enumerate(plan):
        mine = choice.option
        for option in alike.get(mine.vector, ()):
            if option is not mine and option.way != mine.way:
                yield (*plan[:index], replace(choice, option=option), *plan[index + 1 :])
    yield from shifted(plan)
    lengths = [choice.end - choice.first for choice in plan]
    chosen = [choice.option for choice in plan]
    for one, other in itertools.combinations(range(len(plan)), 2):
        swapped, both = [*chosen], [*lengths]
        swapped[one], swapped[other] = swapped[other], swapped[one]
        both[one], both[other] = both[other], both[one]
        yield _with_lengths(swapped, both)


def shifted(plan: Complete, number: int = 1) -> Iterator[Complete]:
    """The same stages with so many layers moved from any of them to any other; where they fit is
    for a judge to say."""
    lengths = [choice.end - choice.first for choice in plan]
    chosen = [choice.option for choice in plan]
    for one, other in itertools.permutations(range(len(plan)), 2):
        if lengths[one] > number:
            moved = [*lengths]
            moved[one], moved[other] = moved[one] - number, moved[other] + number
            yield _with_lengths(chosen, moved)


def on_pools(candidate: Candidate, prices: Prices, pools: Sequence[int]) -> Candidate:
    """A plan that was found on some of the pools, numbered from 0, as a plan on all of them:
    ``pools`` says which."""

    def option_of(option: Option) -> Option:
        vector = [0] * len(prices.pools)
        for pool, number in zip(pools, option.vector, strict=True):
            vector[pool] = number
        parts = tuple(replace(part, pool=pools[part.pool]) for part in option.parts)
        return replace(option, prices=prices, vector=tuple(vector), parts=parts)

    plan = tuple(replace(choice, option=option_of(choice.option)) for choice in candidate.plan)
    return replace(candidate, plan=plan, units=(1,) * len(prices.pools))


def _with_lengths(options: Sequence[Option], lengths: Sequence[int]) -> Complete:
    ends = itertools.accumulate(lengths)
    return tuple(
        Choice(o, end - length, end) for o, length, end in zip(options, lengths, ends, strict=True)
    )


def lightened(candidate: Candidate, scope: Scope) -> Complete:
    """The same plan with every stage at the least offload, recomputation and ZeRO of a scope with
    which it fits; ZeRO 1 costs no more than none."""
    plan = candidate.plan
    for index, choice in enumerate(plan):
        mine = choice.option
        if mine.zero <= 1 and mine.recompute is Recompute.NONE and not mine.offload:
            continue
        alone = choice.option.holders == 1
        lighter = (
            replace(choice, option=replace(mine, recompute=recompute, zero=zero, offload=offload))
            for offload in choices(mine.offload)
            for recompute in _EFFORT
            if recompute in scope.recompute
            and not (offload.activations and recompute is Recompute.SELECTIVE)
            for zero in ((0,) if alone else sorted({*scope.zero} - {0}))
        )
        fitting = ((*plan[:index], other, *plan[index + 1 :]) for other in lighter)
        plan = next((other for other in fitting if candidate.fits(other)), plan)
    return plan
