"""Cost of plans against all plans, and the front between time and cost."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from support.planning_cases import (
    Case,
    Recipe,
    cluster_of,
    complete_plans,
    kind_fields,
    node_fields,
    random_case,
)

from argosy.choose import money
from argosy.choose.money import MoneyLimits, Priced, choose, find_front, moved_cost, pareto_front
from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.errors import InfeasibleError, InputError, NothingFitsError
from argosy.plan.check import check_plan
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleSpec
from argosy.solve.finalists.judge import Complete, Judge
from argosy.workload.chain import Chain, Layer
from argosy.workload.profile import Profile, ProfileRow

SMALL = Recipe(max_devices=5, max_layers=4, max_pools=2, batches=(2, 3, 4), per_node=(1, 2))
MOST_PLANS = 6_000


def with_prices(case: Case, seed: int) -> Case:
    """The case with a price for each kind."""
    random = Random(seed)
    content = json.loads(case.cluster.content)
    for node in content["nodes"]:
        node["devices"]["price_per_hour"] = random.choice((0.5, 1.0, 3.0, 8.0))
    return replace(case, cluster=cluster_of(content))


def price_per_hour(case: Case, plan: Complete) -> float:
    return sum(
        part.devices * case.pools[part.pool].device.price_per_hour
        for choice in plan
        for part in choice.option.parts
    )


def all_points(case: Case) -> list[tuple[float, float]] | None:
    """(seconds, cost per step) of every plan, judged; None if there are too many."""
    points: list[tuple[float, float]] = []
    for shape in case.shapes:
        plans = list(
            complete_plans(
                case, shape, case.options(shape.micro_batch_size, case.scope(prune=False))
            )
        )
        if len(points) + len(plans) > MOST_PLANS:
            return None
        if plans:
            times = case.seconds(shape, plans)
            points += [
                (t, t * price_per_hour(case, p) / 3600) for t, p in zip(times, plans, strict=True)
            ]
    return points


def exact(case: Case) -> Settings:
    return Settings(level=2, gap=0, units=case.ones, schedules=case.schedules, spanning=True)


def seen_points(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """(seconds, cost) of every plan that the search has judged."""
    seen: list[tuple[float, float]] = []
    judge = Judge.seconds

    def watched(
        self: Judge,
        shape: object,
        plans: Sequence[Complete],
        *,
        below: float = math.inf,
        best: float = math.inf,
    ) -> object:
        result = judge(self, shape, plans)  # type: ignore[arg-type]
        pools = self.prices.pools
        for plan, seconds in zip(plans, result[0], strict=True):
            parts = [part for choice in plan for part in choice.option.parts]
            price = sum(part.devices * pools[part.pool].device.price_per_hour for part in parts)
            seen.append((seconds, seconds * price / 3600))
        return judge(self, shape, plans, below=below, best=best)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "seconds", watched)
        find_front(
            case.chain,
            case.cluster,
            global_batch=case.global_batch,
            settings=exact(case),
            model=case.model,
        )
    return seen


def front_of(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    front: list[tuple[float, float]] = []
    for seconds, cost in sorted(points):
        if seconds < math.inf and (not front or cost < front[-1][1] * (1 - 1e-9)):
            front.append((seconds, cost))
    return front


def test_cheapest_and_front_are_those_of_all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = left_out = 0
    for seed in range(60):
        case = with_prices(random_case(seed, SMALL), seed)
        points = all_points(case)
        if not points:
            continue
        compared += 1
        true, ours = front_of(points), front_of(seen_points(case, monkeypatch))
        assert ours[-1][1] == pytest.approx(true[-1][1], rel=1e-8), seed
        assert ours[0][0] == pytest.approx(true[0][0], rel=1e-8), seed
        for seconds, cost in true:
            assert any(t <= seconds * (1 + 1e-8) and c <= cost * (1 + 1e-8) for t, c in ours), seed
        left_out += len(true) > 1
    assert compared >= 20
    assert left_out >= 5, "in some cases it pays to leave devices out"


def unequal() -> Case:
    """Two fast and dear devices beside two slow and cheap ones."""
    layer = Layer(
        name="block",
        kind="block",
        forward_flop=1e11,
        backward_flop=2e11,
        parameters=10**7,
        activation_bytes=1e8,
        output_bytes=1e6,
    )
    nodes = [node_fields("a", count=2, nic=10.0), node_fields("b", count=2, nic=10.0)]
    nodes[0]["devices"]["price_per_hour"], nodes[1]["devices"]["price_per_hour"] = 4.0, 0.25
    kinds = [kind_fields("a", flops=4.0, memory=64e9), kind_fields("b", flops=1.0, memory=64e9)]
    cluster = cluster_of({"name": "drawn", "kinds": kinds, "nodes": nodes})
    chain = Chain(name="drawn", layers=(layer,) * 8, sequence_length=1, dtype=Dtype.BF16)
    return Case(chain=chain, cluster=cluster, global_batch=8, schedules=(ScheduleSpec(),))


def front(case: Case, limits: MoneyLimits | None = None) -> list[Priced]:
    return find_front(
        case.chain,
        case.cluster,
        global_batch=case.global_batch,
        limits=limits,
        settings=exact(case),
        model=case.model,
    )


def test_limits_are_kept_and_the_rest_follows() -> None:
    case = unequal()
    everything = front(case)
    assert len(everything) > 1
    for point in everything:
        check_plan(point.plan, case.chain, case.cluster)
        used = {case.cluster.device(name).kind.name for name in point.plan.devices}
        left = {entry.device for entry in point.plan.left_out}
        assert used and left.isdisjoint(point.plan.devices)
    fastest = choose(everything, cheapest=False, limits=MoneyLimits())
    cheapest = choose(everything, cheapest=True, limits=MoneyLimits())
    free = find_plan(
        case.chain, case.cluster, global_batch=8, settings=exact(case), model=case.model
    )
    assert free.predicted is not None
    assert fastest.seconds == pytest.approx(free.predicted.iteration_seconds, rel=1e-6)
    assert cheapest.cost_per_step < fastest.cost_per_step
    between = (cheapest.cost_per_step + fastest.cost_per_step) / 2
    within = choose(everything, cheapest=False, limits=MoneyLimits(cost_per_step=between))
    assert within.cost_per_step <= between
    assert within.seconds == min(
        point.seconds for point in everything if point.cost_per_step <= between
    )
    limited = front(case, MoneyLimits(price_per_hour=1.0))
    assert all(point.price_per_hour <= 1.0 for point in limited)
    with pytest.raises(
        InfeasibleError, match="no plan costs at most 1e-09 a step: the cheapest costs"
    ):
        choose(everything, cheapest=True, limits=MoneyLimits(cost_per_step=1e-9))


def test_bytes_with_a_price_are_counted() -> None:
    case = unequal()
    content = json.loads(case.cluster.content)
    content["links"] = [
        {
            "name": "wan",
            "between": ["a*", "b*"],
            "medium": "wan",
            "bandwidth": "1 GB/s",
            "price_per_gb": 2.0,
        }
    ]
    case = replace(case, cluster=cluster_of(content))
    whole = find_plan(
        case.chain, case.cluster, global_batch=8, settings=exact(case), model=case.model
    )
    across = 0
    for stage, following in itertools.pairwise(whole.stages):
        across += stage.devices[0][0] != following.devices[0][0]
    moved = moved_cost(whole, case.chain, case.cluster, case.model)
    if all(len({name[0] for name in stage.devices}) == 1 for stage in whole.stages):
        assert moved == pytest.approx(
            across * 2 * 8 * 1e6 / 1e9 * 2.0
        )  # each sample there and its gradient back
    else:
        assert moved > 0


def test_without_prices_there_is_nothing_to_choose_by() -> None:
    case = random_case(1, SMALL)
    with pytest.raises(InputError, match="no device of drawn has a price_per_hour"):
        find_front(case.chain, case.cluster, global_batch=2)


def test_the_front_has_no_point_that_another_beats() -> None:
    case = unequal()
    points = front(case)
    assert pareto_front(points) == points
    for one, other in itertools.pairwise(points):
        assert one.seconds < other.seconds and one.cost_per_step > other.cost_per_step


def test_a_kind_that_was_measured_with_more_samples_only_is_left_out() -> None:
    case = unequal()
    row = ProfileRow(
        layer="block",
        micro_batch=64,
        tensor_width=1,
        dtype=Dtype.BF16,
        forward_seconds=1,
        backward_seconds=1,
    )
    rows = (row, replace(row, micro_batch=128))
    kind = case.cluster.devices[0].kind.name
    model = ComputeModel(profiles={kind: Profile(device=kind, model="drawn", rows=rows)})
    found = find_front(case.chain, case.cluster, global_batch=8, settings=exact(case), model=model)
    assert found and all(
        case.cluster.device(d).kind.name != kind for point in found for d in point.plan.devices
    )


def test_what_no_money_buys_is_told_apart_from_what_too_little_does() -> None:
    case = unequal()
    with pytest.raises(InfeasibleError, match=r"no plan fits on devices for at most 0.1 an hour"):
        front(case, MoneyLimits(price_per_hour=0.1))
    huge = replace(
        case, chain=replace(case.chain, layers=(replace(case.chain.layers[0], parameters=10**12),))
    )
    with pytest.raises(NothingFitsError, match="no plan of drawn fits on drawn: "):
        front(huge)


def test_an_interrupt_leaves_the_front_of_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case, calls = unequal(), itertools.count()

    def watched(*inputs: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return find_plan(*inputs, **options)

    monkeypatch.setattr(money, "find_plan", watched)
    points = front(case)
    assert next(calls) == 3 and 1 <= len(points) <= 2
    with pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(money, "find_plan", lambda *inputs, **options: watched(next(calls)))
        calls = itertools.count(1)
        front(case)
