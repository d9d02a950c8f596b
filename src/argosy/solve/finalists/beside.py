"""Simulate more plans beside the finalists of a search: uniform pipelines, and the winner after
small moves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from argosy.solve.finalists.candidate import Candidate, neighbours, shifted
from argosy.solve.finalists.judge import NEAR, SAME, Complete, Judge
from argosy.solve.finalists.uniform import is_allowed, uniform_candidates
from argosy.solve.finalists.verdict import ExactTrial, Verdict
from argosy.solve.search.shape import Shape
from argosy.space.enumerate import Scope
from argosy.space.option import Option, Vector

# The exact engine simulates at most this many uniform pipelines.
_UNIFORM = 8
# This many moves from the winner are simulated at once.
_MOVED = 3
# On few devices ``_ROUNDS`` times as many moves are simulated, in at most this many rounds.
_ROUNDS = 4
# A move that the judge finds slower than this factor times the winner is not simulated.
_NEAR = 1.005


def with_uniform(
    verdict: Verdict,
    trial: ExactTrial,
    judge: Judge,
    shapes: Sequence[Shape],
    most_tasks: int,
    menus: Mapping[int, Mapping[Vector, Sequence[Option]]],
) -> Verdict:
    """Return the verdict, or a better one among uniform pipelines and small moves.

    The exact engine simulates at most ``most_tasks`` further tasks of uniform pipelines. ``menus``
    has options by the size of micro-batches: with these, small moves from the winner are simulated
    while that helps.
    """
    assert verdict.plan.predicted is not None
    below = verdict.plan.predicted.iteration_seconds
    plain = uniform_candidates(trial.prices, judge, shapes, trial.scope, below, _UNIFORM)
    tasks = itertools.accumulate(
        4 * len(candidate.plan) * candidate.shape.num_micro_batches for candidate in plain
    )
    plain = [
        candidate for candidate, played in zip(plain, tasks, strict=True) if played <= most_tasks
    ]
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
    """The winner with a layer moved or a stage in wider groups or, given options, with a stage
    without ZeRO or after any other small move: the few that the judge finds fastest."""
    moves = neighbours(winner.plan, options) if options else shifted(winner.plan)
    plans = [*moves, *_regrouped(winner.plan, scope)]
    if options:
        plans += _unsharded(winner.plan, scope)
    if not plans or len(plans) * len(winner.plan) * winner.shape.num_micro_batches > most_steps:
        return []
    best = winner.seconds
    found = judge.seconds(winner.shape, plans, below=NEAR * best, best=best)
    judged = zip(plans, *found, strict=True)
    near = [
        replace(winner, seconds=seconds, number=number, schedule=schedule, plan=plan)
        for number, (plan, seconds, schedule) in enumerate(judged)
        if seconds <= _NEAR * winner.seconds
        and (options or abs(seconds / winner.seconds - 1) > SAME)
    ]
    return sorted(near)[: _ROUNDS * _MOVED if options else _MOVED]


def _regrouped(plan: Complete, scope: Scope) -> Iterator[Complete]:
    """Yield the plan with the replicas of one stage joined in pairs to groups twice as wide."""
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
        joined = part._replace(
            width=wider, replicas=part.replicas // 2, samples=samples, extra=extra
        )
        if part.expert > 1 and (extra or joined.replicas % part.expert):
            continue  # experts need equal holders, and groups that divide them
        if scope.allows_width(wider) and is_allowed(option.prices, (joined,), scope):
            zero = option.zero if joined.replicas > 1 else 0
            regrouped = replace(choice, option=replace(option, parts=(joined,), zero=zero))
            yield (*plan[:at], regrouped, *plan[at + 1 :])


def _unsharded(plan: Complete, scope: Scope) -> Iterator[Complete]:
    """Yield the plan with one of its stages under ZeRO 0 instead of 1.

    The search drops that by its closed form of a sum, but a tree may be faster on the real links.
    """
    for at, choice in enumerate(plan):
        if choice.option.zero == 1 and 0 in scope.zero:
            yield (
                *plan[:at],
                replace(choice, option=replace(choice.option, zero=0)),
                *plan[at + 1 :],
            )
