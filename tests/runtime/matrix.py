"""The matrix of training cases: all of it, and a seeded sample in which every pair of values
meets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import fields

from runtime.training_cases import Case

from argosy.plan.plan import Recompute
from argosy.schedule import ScheduleKind

SCHEDULES = [
    (ScheduleKind.GPIPE, 1),
    (ScheduleKind.ONE_F_ONE_B, 1),
    (ScheduleKind.EAGER, 1),
    *((ScheduleKind.KFKB, k) for k in (2, 3)),
    (ScheduleKind.INTERLEAVED, 1),
    (ScheduleKind.ZERO_BUBBLE, 1),
    (ScheduleKind.ZERO_BUBBLE_V, 1),
    (ScheduleKind.DUALPIPE_V, 1),
]
LAYOUTS: list[tuple[tuple[int, ...], ...]] = [
    ((2,), (2,)),
    ((2,), (2,), (2,)),
    ((1,), (1,), (1,), (1,)),
    ((1, 1), (2,)),
    ((2,), (1, 1)),
    ((2, 2, 2), (3, 3)),
    ((3, 1), (4,)),
    ((4,), (3, 1), (2, 2)),
]
"""2 to 4 stages; replica counts 2:1, 1:2, 3:2; shares 3:1."""
MODELS = ["gpt", "vit", "cnn", "t5"]
RAGGED = [5, 7]
"""Micro-batches; no multiple of 2, 3 or 4."""
ROWS: list[tuple[Recompute, int, tuple[bool, bool, bool]]] = [
    (Recompute.NONE, 0, (False, False, False)),
    (Recompute.FULL, 3, (True, False, False)),
    (Recompute.SELECTIVE, 1, (False, True, False)),
    (Recompute.NONE, 2, (True, True, True)),
]
"""Recomputation, ZeRO, and whether clipped, tied, in single precision: every pair of settings of
interest."""


def make(
    model: str,
    schedule: tuple[ScheduleKind, int],
    layout: tuple[tuple[int, ...], ...],
    count: int,
    recompute: Recompute,
    zero: int,
    switches: tuple[bool, bool, bool],
) -> Case:
    kind, k = schedule
    if kind is ScheduleKind.INTERLEAVED:
        layout = layout[:3] * 2 if len(layout) < 4 else layout
        count = len(layout) // 2 * (count - 3)
    if kind.is_v:
        first = layout[:3] if len(layout) < 4 else layout[:2]
        layout = (*first, *first[::-1])
        count = max(count, len(layout)) if kind is ScheduleKind.DUALPIPE_V else count
    clip, tied, single = switches
    return Case(
        model=model,
        kind=kind,
        k=k,
        shares=layout,
        num_micro_batches=count,
        recompute=recompute,
        zero=zero,
        clip=clip,
        tied=tied,
        single=single,
        proportions=(3.0, 1.0)
        if zero == 1 and all(len(stage) in (1, 2) for stage in layout)
        else (),
    )


def everything() -> Iterator[Case]:
    """Every model under every schedule on every layout, four times."""
    for at, (model, schedule, layout) in enumerate(itertools.product(MODELS, SCHEDULES, LAYOUTS)):
        for row in ROWS:
            yield make(model, schedule, layout, RAGGED[at % 2], *row)


def pairwise(seed: int = 0) -> list[Case]:
    """Cases drawn until every two values of two different columns have met, always the draw with
    most new pairs."""
    switches = list(itertools.product((False, True), repeat=3))
    columns: list[list[object]] = [
        MODELS,
        SCHEDULES,
        LAYOUTS,
        RAGGED,
        list(Recompute),
        [0, 1, 2, 3],
        switches,
    ]  # type: ignore[list-item]
    indices = [range(len(column)) for column in columns]
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(range(len(columns)), 2)
        for a in indices[one]
        for b in indices[other]
    }
    draw = random.Random(seed)
    cases = []
    while missing:
        candidates = [tuple(draw.choice(index) for index in indices) for _ in range(300)]
        best = max(candidates, key=lambda picked: len(missing & _pairs(picked)))
        missing -= _pairs(best)
        cases.append(make(*(column[at] for column, at in zip(columns, best, strict=True))))  # type: ignore[arg-type]
    return cases


def _pairs(picked: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(picked), 2))


def distinct(cases: Iterator[Case] | list[Case]) -> list[Case]:
    keys = [field.name for field in fields(Case)]
    return list({tuple(getattr(case, key) for key in keys): case for case in cases}.values())
