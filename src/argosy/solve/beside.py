"""What is played beside the finalists of a search: uniform pipelines, and the winner with a layer moved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from argosy.solve.candidate import Candidate
from argosy.solve.judge import Judge
from argosy.solve.shape import Shape
from argosy.solve.uniform import regrouped, shifted, uniform_candidates
from argosy.solve.verdict import Verdict
from argosy.space.enumerate import Scope
from argosy.space.price import Prices

_UNIFORM = 8
"""Uniform pipelines that the exact engine plays at most."""
_MOVED = 3


def with_uniform(
    verdict: Verdict,
    play: Callable[[Sequence[Candidate]], Verdict],
    prices: Prices,
    judge: Judge,
    shapes: Sequence[Shape],
    scope: Scope,
    most_tasks: int,
) -> Verdict:
    """The verdict, or a better one; the exact engine plays at most so many tasks more, twice."""
    assert verdict.plan.predicted is not None
    below = verdict.plan.predicted.iteration_seconds
    plain = uniform_candidates(prices, judge, shapes, scope, below, _UNIFORM)
    tasks = itertools.accumulate(4 * len(one.plan) * one.shape.num_micro_batches for one in plain)
    plain = [one for one, played in zip(plain, tasks, strict=True) if played <= most_tasks]
    verdict = play([verdict.winner, *plain]) if plain else verdict
    moved = _moved(verdict.winner, judge, scope, 10 * most_tasks)
    return play([verdict.winner, *moved]) if moved else verdict


def _moved(winner: Candidate, judge: Judge, scope: Scope, most_steps: int) -> list[Candidate]:
    """The winner with a layer moved or a stage in wider groups, the few that the judge finds no slower."""
    plans = [*shifted(winner.plan), *regrouped(winner.plan, scope)]
    if not plans or len(plans) * len(winner.plan) * winner.shape.num_micro_batches > most_steps:
        return []
    judged = zip(plans, *judge.seconds(winner.shape, plans), strict=True)
    found = [
        replace(winner, seconds=seconds, number=number, schedule=schedule, plan=plan)
        for number, (plan, seconds, schedule) in enumerate(judged)
        if seconds <= winner.seconds
    ]
    return sorted(found)[:_MOVED]
