"""What is played beside the finalists of a search: uniform pipelines, and the winner with a layer
moved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from argosy.solve.finalists.candidate import Candidate, neighbours, shifted
from argosy.solve.finalists.judge import Complete, Judge
from argosy.solve.finalists.uniform import is_allowed, uniform_candidates
from argosy.solve.finalists.verdict import ExactTrial, Verdict
from argosy.solve.search.shape import Shape
from argosy.space.enumerate import Scope
from argosy.space.option import Option, Vector

_UNIFORM = 8
"""Uniform pipelines that the exact engine plays at most."""
_MOVED = 3
"""Moves from the winner that are played at once, and"""
_ROUNDS = 4
"""times as many, and as often, if there are few devices."""
_NEAR = 1.005
"""A move that the judge finds slower than this times the winner is not played."""


def with_uniform(
    verdict: Verdict,
    trial: ExactTrial,
    judge: Judge,
    shapes: Sequence[Shape],
    most_tasks: int,
    menus: Mapping[int, Mapping[Vector, Sequence[Option]]],
) -> Verdict:
    """The verdict, or a better one; the exact engine plays at most so many tasks of uniform
    pipelines more. ``menus`` has options by the size of micro-batches: with these, small moves from
    the winner are played while that helps."""
    assert verdict.plan.predicted is not None
    below = verdict.plan.predicted.iteration_seconds
    plain = uniform_candidates(trial.prices, judge, shapes, trial.scope, below, _UNIFORM)
    tasks = itertools.accumulate(4 * len(one.plan) * one.shape.num_micro_batches for one in plain)
    plain = [one for one, played in zip(plain, tasks, strict=True) if played <= most_tasks]
    verdict = trial.decide([verdict.winner, *plain]) if plain else verdict
    for _ in range(_ROUNDS if menus else 1):
        options = menus.get(verdict.winner.shape.micro_batch_size, {})
        moved = _moved(verdict.winner, judge, trial.scope, 10 * most_tasks, options)
        better = trial.decide([verdict.winner, *moved]) if moved else verdict
        if better.winner.key == verdict.winner.key:
            break
        verdict = better
    return verdict


def _moved(
    winner: Candidate,
    judge: Judge,
    scope: Scope,
    most_steps: int,
    options: Mapping[Vector, Sequence[Option]],
) -> list[Candidate]:
    """The winner with a layer moved or a stage in wider groups or, given options, after any other
    small move: the few that the judge finds fastest."""
    moves = neighbours(winner.plan, options) if options else shifted(winner.plan)
    plans = [*moves, *_regrouped(winner.plan, scope)]
    if not plans or len(plans) * len(winner.plan) * winner.shape.num_micro_batches > most_steps:
        return []
    judged = zip(plans, *judge.seconds(winner.shape, plans, best=winner.seconds), strict=True)
    found = [
        replace(winner, seconds=seconds, number=number, schedule=schedule, plan=plan)
        for number, (plan, seconds, schedule) in enumerate(judged)
        if seconds <= _NEAR * winner.seconds
    ]
    return sorted(found)[: _ROUNDS * _MOVED if options else _MOVED]


def _regrouped(plan: Complete, scope: Scope) -> Iterator[Complete]:
    """The same stages with the replicas of one of them joined in pairs to groups twice as wide."""
    for at, choice in enumerate(plan):
        option, part = choice.option, choice.option.parts[0]
        wider = 2 * part.width
        if (
            len(option.parts) > 1
            or part.replicas % 2
            or option.pools[0].per_node % wider
            or part.context > 1
        ):
            continue
        samples, extra = divmod(part.all_samples, part.replicas // 2)
        joined = replace(
            part, width=wider, replicas=part.replicas // 2, samples=samples, extra=extra
        )
        if part.expert > 1 and (extra or joined.replicas % part.expert):
            continue  # experts need equal holders, as many as groups
        if scope.allows_width(wider) and is_allowed(option.prices, (joined,), scope):
            zero = option.zero if joined.replicas > 1 else 0
            other = replace(choice, option=replace(option, parts=(joined,), zero=zero))
            yield (*plan[:at], other, *plan[at + 1 :])
