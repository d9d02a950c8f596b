"""PipeDream's planner against every partition there is, under its own objective."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from argosy.baselines.pipedream import Amounts, Level, pipedream_partition


def random_amounts(rng: random.Random, layers: int) -> Amounts:
    def running(values: list[float]) -> np.ndarray:
        return np.concatenate(([0.0], np.cumsum(values)))

    outputs = [0.0, *(rng.choice([1.0, 10.0, 100.0]) for _ in range(layers - 1)), 0.0]
    return Amounts(
        seconds=running([rng.uniform(1, 5) for _ in range(layers)]),
        weights=running([rng.choice([0.0, 5.0, 50.0]) for _ in range(layers)]),
        outputs=np.array(outputs),
    )


def brute_force(amounts: Amounts, levels: list[Level], first: int, end: int, count: int) -> float:
    """A of the last level for layers first..end-1 on ``count`` components: all first stages, then
    the rest."""
    if not levels:
        return float(amounts.seconds[end] - amounts.seconds[first])
    level, below = levels[-1], levels[:-1]
    inner = below[-1].count if below else 1

    def replicated(start: int, stop: int, number: int) -> float:
        weights = float(amounts.weights[stop] - amounts.weights[start])
        compute = brute_force(amounts, below, start, stop, inner)
        return max(compute, 2 * (number - 1) * weights / level.bandwidth) / number

    best = replicated(first, end, count)
    for cut in range(first + 1, end):
        crossing = 2 * float(amounts.outputs[cut]) / level.bandwidth
        for number in range(1, count):
            rest = brute_force(amounts, levels, cut, end, count - number)
            best = min(best, max(replicated(first, cut, number), crossing, rest))
    return best


def value_of(
    amounts: Amounts, level: Level, partition: tuple[tuple[int, int, tuple[int, ...]], ...]
) -> float:
    worst = 0.0
    for first, end, devices in partition:
        count = len(devices)
        seconds = float(amounts.seconds[end] - amounts.seconds[first])
        weights = float(amounts.weights[end] - amounts.weights[first])
        stage = max(seconds, 2 * (count - 1) * weights / level.bandwidth) / count
        crossing = 2 * float(amounts.outputs[end]) / level.bandwidth
        worst = max(worst, stage, crossing)
    return worst


@pytest.mark.parametrize("seed", range(30))
def test_one_level_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    amounts = random_amounts(rng, rng.randrange(1, 7))
    level = Level(count=rng.randrange(1, 6), bandwidth=rng.choice([1.0, 10.0, 1000.0]))
    value, partition = pipedream_partition(amounts, [level])
    assert value == pytest.approx(
        brute_force(amounts, [level], 0, len(amounts.seconds) - 1, level.count)
    )
    assert value == pytest.approx(value_of(amounts, level, partition))
    assert sorted(rank for *_, ranks in partition for rank in ranks) == list(range(level.count))


@pytest.mark.parametrize("seed", range(30))
def test_two_levels_equal_brute_force(seed: int) -> None:
    rng = random.Random(1000 + seed)
    amounts = random_amounts(rng, rng.randrange(1, 6))
    levels = [
        Level(count=rng.randrange(1, 4), bandwidth=rng.choice([100.0, 1000.0])),
        Level(count=rng.randrange(1, 4), bandwidth=rng.choice([1.0, 10.0, 100.0])),
    ]
    value, partition = pipedream_partition(amounts, levels)
    assert value == pytest.approx(
        brute_force(amounts, levels, 0, len(amounts.seconds) - 1, levels[1].count)
    )
    ends = [end for _, end, _ in partition]
    assert [first for first, _, _ in partition] == [0, *ends[:-1]] and ends[-1] == len(
        amounts.seconds
    ) - 1
    assert sorted(rank for *_, ranks in partition for rank in ranks) == list(
        range(levels[0].count * levels[1].count)
    )


def test_a_replicated_machine_keeps_its_stages_inside() -> None:
    """Two machines of two devices, fast inside and slow between: both train the same two stages."""
    running = np.array([0.0, 1.0, 2.0])
    amounts = Amounts(
        seconds=running, weights=np.array([0.0, 1.0, 2.0]), outputs=np.array([0.0, 60.0, 0.0])
    )
    levels = [Level(count=2, bandwidth=1000.0), Level(count=2, bandwidth=100.0)]
    _, partition = pipedream_partition(amounts, levels)
    inside = [ranks for *_, ranks in partition]
    assert inside in ([(0, 2), (1, 3)], [(0, 1, 2, 3)])
    assert math.isclose(pipedream_partition(amounts, levels)[0], 0.5)
