"""The chain cut against enumeration, against a dynamic programme, and its laws."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.errors import InfeasibleError, InputError
from argosy.solve import ChainCut, cut_chain


@dataclass(frozen=True)
class Case:
    """The arguments of ``cut_chain``."""

    work: tuple[float, ...]
    speeds: tuple[float, ...]
    cut: tuple[float, ...]
    memory: tuple[float, ...]
    capacity: tuple[float, ...]
    allow_empty: bool = True

    def solve(self) -> ChainCut:
        return cut_chain(
            self.work,
            self.speeds,
            cut=self.cut,
            memory=self.memory,
            capacity=self.capacity,
            allow_empty=self.allow_empty,
        )

    def cost(self, device: int, i: int, j: int) -> float:
        """Infinite where the run is not allowed. Sums of slices: no prefix sums here."""
        if i == j:
            return 0.0 if self.allow_empty else math.inf
        if sum(self.memory[i:j]) > self.capacity[device]:
            return math.inf
        return sum(self.work[i:j]) / self.speeds[device] + self.cut[i] + self.cut[j]


def enumerate_cuts(case: Case) -> tuple[float, tuple[int, ...]]:
    """The least largest cost over all cuts, and the ends of the optimal cut whose last boundaries
    are leftmost."""
    n, d = len(case.work), len(case.speeds)
    best = (math.inf, (), ())
    for inner in itertools.combinations_with_replacement(range(n + 1), d - 1):
        ends = (*inner, n)
        cost = max(
            case.cost(k, i, j) for k, (i, j) in enumerate(zip((0, *inner), ends, strict=True))
        )
        best = min(best, (cost, ends[::-1], ends))
    return best[0], best[2]


def cut_chain_dp(case: Case) -> float:
    """The least largest cost, device after device: best[j] = min over i of max(best[i], cost(i,
    j)). O(D n^2)."""
    n = len(case.work)
    before, held = (
        np.concatenate(([0.0], np.cumsum(values))) for values in (case.work, case.memory)
    )
    start, end = np.arange(n + 1)[:, None], np.arange(n + 1)
    boundaries = np.add.outer(case.cut, case.cut)
    best = np.where(end == 0, 0.0, np.inf)
    for speed, capacity in zip(case.speeds, case.capacity, strict=True):
        costs = (before - before[:, None]) / speed + boundaries
        costs[(start > end) | (held - held[:, None] > capacity)] = np.inf
        np.fill_diagonal(costs, 0.0 if case.allow_empty else np.inf)
        best = np.maximum(best[:, None], costs).min(axis=0)
    return float(best[n])


def draw_case(rng: np.random.Generator, n: int, d: int, *, exact: bool) -> Case:
    """With ``exact`` in numbers whose sums and quotients floats hold exactly, so that ties are
    ties."""
    if exact:
        work = rng.integers(0, 9, n).astype(float)
        speeds = 2.0 ** rng.integers(-1, 3, d)
        inner = rng.integers(0, 9, n - 1) / 4
    else:
        work, speeds, inner = (
            rng.lognormal(0, 1, n),
            rng.lognormal(0, 1, d),
            rng.uniform(0, 2, n - 1),
        )
    inner = inner * rng.choice([0.0, 0.25, 1.0, 4.0])
    memory = rng.integers(0, 6, n).astype(float)
    capacity = rng.integers(0, max(2, int(4 * memory.sum() / d)) + 1, d).astype(float)
    capacity[rng.random(d) < 0.3] = math.inf
    return Case(
        tuple(work.tolist()),
        tuple(speeds.tolist()),
        (0.0, *inner.tolist(), 0.0),
        tuple(memory.tolist()),
        tuple(capacity.tolist()),
        bool(rng.random() < 0.7),
    )


def assert_consistent(case: Case, result: ChainCut) -> None:
    starts = (0, *result.ends[:-1])
    assert result.ends[-1] == len(case.work)
    costs = [case.cost(k, i, j) for k, (i, j) in enumerate(zip(starts, result.ends, strict=True))]
    assert result.costs == pytest.approx(costs, rel=1e-11, abs=1e-12)
    assert result.seconds == max(result.costs) == result.costs[result.bottleneck]


@pytest.mark.parametrize("seed", range(8))
def test_equals_enumeration_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    feasible = 0
    for _ in range(75):
        case = draw_case(rng, int(rng.integers(1, 9)), int(rng.integers(1, 5)), exact=True)
        seconds, ends = enumerate_cuts(case)
        if math.isinf(seconds):
            with pytest.raises(InfeasibleError):
                case.solve()
            continue
        result = case.solve()
        assert_consistent(case, result)
        assert (result.seconds, result.ends) == (seconds, ends), case
        feasible += 1
    assert feasible > 30


@pytest.mark.parametrize("seed", range(4))
def test_equals_enumeration_on_any_floats(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    for _ in range(75):
        case = draw_case(rng, int(rng.integers(1, 9)), int(rng.integers(1, 5)), exact=False)
        seconds, _ = enumerate_cuts(case)
        if math.isinf(seconds):
            with pytest.raises(InfeasibleError):
                case.solve()
        else:
            result = case.solve()
            assert_consistent(case, result)
            assert result.seconds == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("most_items", "most_devices", "num_cases"), [(60, 8, 150), (400, 24, 10)])
def test_equals_dynamic_programme(
    most_items: int, most_devices: int, num_cases: int, exact: bool
) -> None:
    rng = np.random.default_rng(most_items)
    feasible = 0
    for _ in range(num_cases):
        n, d = rng.integers(most_items // 4, most_items + 1), rng.integers(1, most_devices + 1)
        case = draw_case(rng, int(n), int(d), exact=exact)
        seconds = cut_chain_dp(case)
        if math.isinf(seconds):
            with pytest.raises(InfeasibleError):
                case.solve()
            continue
        result = case.solve()
        assert_consistent(case, result)
        assert result.seconds == (seconds if exact else pytest.approx(seconds, rel=1e-12))
        feasible += 1
    assert feasible > num_cases // 3


@pytest.mark.parametrize("seed", range(3))
def test_devices_of_wildly_unequal_speed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        case = draw_case(rng, 40, 6, exact=False)
        speeds = tuple((10.0 ** rng.uniform(-6, 6, 6)).tolist())
        case = replace(case, speeds=speeds, capacity=(math.inf,) * 6)
        assert case.solve().seconds == pytest.approx(cut_chain_dp(case), rel=1e-9)


@pytest.mark.parametrize("charge", [0.0, 0.25])
def test_costs_that_hardly_differ_are_told_apart(charge: float) -> None:
    rng = np.random.default_rng(11)
    for _ in range(30):
        n, d = int(rng.integers(10, 50)), int(rng.integers(2, 6))
        work = 1 + 1e-9 * rng.random(n)
        cut = (0.0, *[charge] * (n - 1), 0.0)
        case = Case(tuple(work.tolist()), (1.0,) * d, cut, (0.0,) * n, (math.inf,) * d)
        seconds = cut_chain_dp(case)
        assert case.solve().seconds == (pytest.approx(seconds, rel=2e-12) if charge else seconds)


whole = st.integers(0, 20).map(float)
quarters = st.integers(0, 20).map(lambda count: count / 4)
limits = st.one_of(st.just(math.inf), st.integers(0, 40).map(float))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n, d = draw(st.integers(1, 12)), draw(st.integers(1, 5))

    def several(values: st.SearchStrategy[float], count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    speeds = several(st.sampled_from([0.5, 1.0, 2.0, 8.0]), d)
    cut = (0.0, *several(quarters, n - 1), 0.0)
    return Case(
        several(whole, n), speeds, cut, several(whole, n), several(limits, d), draw(st.booleans())
    )


def seconds_or_infinity(case: Case) -> float:
    try:
        return case.solve().seconds
    except InfeasibleError:
        return math.inf


@given(cases())
def test_drawn_cases_equal_dynamic_programme(case: Case) -> None:
    assert seconds_or_infinity(case) == cut_chain_dp(case)


@given(cases(), st.data())
def test_a_faster_device_or_more_memory_is_never_worse(case: Case, data: st.DataObject) -> None:
    device = data.draw(st.integers(0, len(case.speeds) - 1))
    factor = data.draw(st.sampled_from([2.0, 4.0]))
    more = data.draw(whole)
    faster = tuple(speed * factor if k == device else speed for k, speed in enumerate(case.speeds))
    larger = tuple(limit + more if k == device else limit for k, limit in enumerate(case.capacity))
    before = seconds_or_infinity(case)
    assert seconds_or_infinity(replace(case, speeds=faster)) <= before
    assert seconds_or_infinity(replace(case, capacity=larger)) <= before


@given(cases())
def test_empty_devices_never_hurt(case: Case) -> None:
    assert seconds_or_infinity(replace(case, allow_empty=True)) <= seconds_or_infinity(
        replace(case, allow_empty=False)
    )


@given(cases(), st.sampled_from([0.25, 2.0, 1024.0]))
def test_scaled_work_and_cuts_scale_the_time_and_move_nothing(case: Case, factor: float) -> None:
    seconds = seconds_or_infinity(case)
    work, cut = (tuple(value * factor for value in values) for values in (case.work, case.cut))
    scaled = replace(case, work=work, cut=cut)
    assert seconds_or_infinity(scaled) == seconds * factor
    if seconds < math.inf:
        assert scaled.solve().ends == case.solve().ends


@given(cases())
def test_a_chain_read_backwards_takes_as_long(case: Case) -> None:
    backwards = Case(
        case.work[::-1],
        case.speeds[::-1],
        case.cut[::-1],
        case.memory[::-1],
        case.capacity[::-1],
        case.allow_empty,
    )
    assert seconds_or_infinity(backwards) == seconds_or_infinity(case)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 12))
def test_equal_devices_are_within_one_item_of_balance(work: list[float], num_devices: int) -> None:
    seconds = cut_chain(work, [1.0] * num_devices).seconds
    ideal = sum(work) / num_devices
    assert ideal * (1 - 1e-12) <= seconds <= (ideal + max(work)) * (1 + 1e-12)


def covers_greedily(work: np.ndarray, speeds: np.ndarray, seconds: float) -> bool:
    """Whether the devices, each taking as many items as it can in so many seconds, take all of
    them."""
    before = np.concatenate(([0.0], np.cumsum(work)))
    start = 0
    for speed in speeds:
        costs = (before[start:] - before[start]) / speed
        start += int(np.count_nonzero(costs <= seconds)) - 1
    return start == len(work)


def long_chain() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    n, d = 100_000, 256
    work, speeds = rng.lognormal(0, 1.5, n), rng.choice([1.0, 3.0, 10.0], d)
    cut = np.zeros(n + 1)
    cut[1:-1] = rng.uniform(0, 0.1, n - 1) * work.sum() / speeds.sum()
    return work, speeds, cut


def test_long_chain_has_a_certificate() -> None:
    work, speeds, _ = long_chain()
    seconds = cut_chain(work, speeds).seconds
    assert covers_greedily(work, speeds, seconds)
    assert not covers_greedily(work, speeds, math.nextafter(seconds, 0.0))


def test_long_chain_with_boundary_costs_and_memory() -> None:
    """It lies between the cut without boundary costs and what that cut costs with them."""
    work, speeds, cut = long_chain()
    memory = np.ones(len(work))
    capacity = np.full(len(speeds), 1.5 * len(work) / len(speeds) // 1)
    free = cut_chain(work, speeds, memory=memory, capacity=capacity)
    result = cut_chain(work, speeds, cut=cut, memory=memory, capacity=capacity)
    starts = np.array((0, *free.ends[:-1]))
    ends = np.array(free.ends)
    charged = np.where(ends > starts, np.array(free.costs) + cut[starts] + cut[ends], 0.0)
    assert free.seconds < result.seconds < charged.max()
    assert (np.diff((0, *result.ends)) <= capacity).all()


def test_zero_work_items_are_free() -> None:
    assert cut_chain([0, 0, 0], [1, 2]).seconds == 0
    assert cut_chain([0, 0, 0], [1, 2], cut=[0, 3, 2, 0], allow_empty=False).ends == (2, 3)


def test_ties_go_to_the_leftmost_boundaries() -> None:
    assert cut_chain([4, 1, 1], [1, 1]).ends == (1, 3)
    assert cut_chain([1, 1, 4], [1, 1]).ends == (2, 3)
    assert cut_chain([3, 0, 0, 3], [1, 1, 1]).ends == (0, 1, 4)


def test_slow_devices_may_stay_empty() -> None:
    assert cut_chain([5, 5], [1, 1000]) == ChainCut((0, 2), (0.0, 0.01), 1, 0.01)


def test_repr_is_for_people() -> None:
    assert (
        repr(cut_chain([1, 1, 1], [1, 1, 1]))
        == "3 items over 3 devices, 1 s on device 0: 0..0 | 1..1 | 2..2"
    )
    assert repr(cut_chain([1] * 10, [1] * 10)).endswith("| 6..6 | ... | 9..9")


@pytest.mark.parametrize(
    ("memory", "capacity", "options", "message"),
    [
        (
            [1, 9, 1],
            [8, 4],
            {},
            "item 1 needs 9 B, more than any device holds; the largest, device 0, has 8 B",
        ),
        (
            [6, 6, 6],
            [8, 8],
            {},
            "the 3 items need 18 B, more than the 16 B that the 2 devices hold together",
        ),
        (
            [6, 4, 6],
            [8, 8],
            {},
            "filled to capacity in this order, the 2 devices hold 2 of 3 items; item 2 no longer",
        ),
        (
            [6, 6, 6],
            [9, 0, 18],
            {"allow_empty": False},
            "memory leaves no cut in which each of the 3 devices takes",
        ),
        (
            [0, 0, 0],
            [8, 8, 8, 8],
            {"allow_empty": False},
            "3 items cannot give each of 4 devices one",
        ),
    ],
)
def test_infeasible_names_what_binds(
    memory: list[float], capacity: list[float], options: dict[str, bool], message: str
) -> None:
    with pytest.raises(InfeasibleError, match=message):
        cut_chain([1, 1, 1], [1] * len(capacity), memory=memory, capacity=capacity, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"work": [1, -1, 1]}, r"work\[1\]: found -1.0, expected a finite number of at least 0"),
        ({"work": [1, math.nan, 1]}, r"work\[1\]: found nan, expected"),
        ({"work": [1, math.inf, 1]}, r"work\[1\]: found inf, expected"),
        ({"work": []}, "work: expected at least one item"),
        ({"speeds": []}, "speeds: expected at least one device"),
        ({"speeds": [1, 0]}, r"speeds\[1\]: found 0.0, expected a finite number above 0"),
        ({"cut": [0, 1, 0]}, "cut: found 3, expected 4 values, one for each of the 4 boundaries"),
        ({"cut": [0, 1, 1, 2]}, r"cut\[3\]: found 2.0, expected 0"),
        ({"cut": [0, -1, 1, 0]}, r"cut\[1\]: found -1.0, expected"),
        ({"memory": [1, 1, 1]}, "capacity: expected both memory and capacity, or neither"),
        ({"capacity": [1, 1]}, "memory: expected both"),
        ({"memory": [1, 1], "capacity": [1, 1]}, "memory: found 2, expected 3 values"),
        ({"memory": [1, 1, 1], "capacity": [1]}, "capacity: found 1, expected 2 values"),
        (
            {"memory": [1, 1, 1], "capacity": [1, math.nan]},
            r"capacity\[1\]: found nan, expected a number of at least",
        ),
    ],
)
def test_bad_input_says_where(change: dict[str, list[float]], message: str) -> None:
    arguments = {"work": [1, 1, 1], "speeds": [1, 1]} | change
    work, speeds = arguments.pop("work"), arguments.pop("speeds")
    with pytest.raises(InputError, match=message):
        cut_chain(work, speeds, **arguments)


@settings(max_examples=30)
@given(cases())
def test_same_input_same_answer(case: Case) -> None:
    if seconds_or_infinity(case) < math.inf:
        assert case.solve() == case.solve()
