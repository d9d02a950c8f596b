"""Plans chosen over scenarios, judged by the exact engine."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from argosy.choose.replan import compare_courses
from argosy.choose.robust import Figures, RobustChoice, _why, find_robust_plan
from argosy.choose.scenario import (
    Horizon,
    Robust,
    exact_times,
    fluid_times,
    lasting,
    moments,
    objective,
    pace,
    plans_of_views,
)
from argosy.cluster.changes import link_steps
from argosy.cluster.file import load_cluster, with_changes
from argosy.cluster.lasting import at_time_zero
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError
from argosy.plan.check import check_plan
from argosy.plan.file import load_plan
from argosy.plan.plan import Plan
from argosy.planner import Settings
from argosy.report.robust import robust_lines, robust_to_dict
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import simulate
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

BATCH = 64
MODEL = ComputeModel()


@pytest.fixture(scope="module")
def chain() -> Chain:
    return load_model("llama-3-8b", sequence_length=1024, dtype="fp16")


def changing(generator: str, seed: int, **parameters: object) -> Cluster:
    change = {
        "link": "v*.nic",
        "generator": generator,
        "parameters": parameters,
        "seed": seed,
        "horizon": "90 s",
    }
    return with_changes(load_cluster("mixed-16"), [change])


@pytest.fixture(scope="module")
def scenarios() -> list[Cluster]:
    return [
        changing("on-off", 1, on="10 s", off="10 s", low=0.05),
        with_changes(load_cluster("mixed-16"), []),
    ]


@pytest.fixture(
    scope="module",
    params=[pytest.param(Robust.MEAN, marks=pytest.mark.exhaustive), Robust.P95],
)
def choice(request: pytest.FixtureRequest, chain: Chain, scenarios: list[Cluster]) -> RobustChoice:
    return find_robust_plan(
        chain, load_cluster("mixed-16"), scenarios, global_batch=BATCH, robust=request.param
    )


def test_the_choice_is_no_worse_than_the_plan_for_the_average(choice: RobustChoice) -> None:
    assert choice.value <= choice.average_value
    assert choice.value == min(
        getattr(one, choice.robust) for one in (choice.chosen, choice.average, *choice.others)
    )
    if choice.robust is Robust.P95:
        assert choice.gain > 0.05, "a plan that does not need the link that comes and goes"


def test_the_figures_are_those_of_the_simulator(
    choice: RobustChoice, chain: Chain, scenarios: list[Cluster]
) -> None:
    """Played whole, device by device, and not folded."""
    plan = choice.plan
    check_plan(plan, chain, load_cluster("mixed-16"))
    means = []
    for scenario in scenarios:
        ends = simulate(
            plan, chain, scenario, iterations=40, record=0, until=choice.horizon
        ).iteration_ends
        means.append(ends[-1] / len(ends))
    assert choice.chosen.mean == pytest.approx(np.mean(means), rel=0.03)


def test_estimates_rank_as_the_exact_engine_does(choice: RobustChoice) -> None:
    """The fluid estimate is close enough to choose the finalists by."""
    for figures in (choice.chosen, *choice.others):
        assert figures.estimate == pytest.approx(getattr(figures, choice.robust), rel=0.1)


def test_a_lasting_network_takes_as_long_as_the_simulator_says(
    choice: RobustChoice, chain: Chain
) -> None:
    calm = at_time_zero(load_cluster("mixed-16"))
    rate = pace(choice.plan, chain, calm, MODEL, 60.0)
    exact = exact_times(choice.plan, chain, calm, MODEL, Horizon(seconds=60.0, iterations=3))
    assert rate.is_constant
    assert 1 / rate.at(0) == pytest.approx(exact[0], rel=0.02)
    assert fluid_times(rate, 60.0) == pytest.approx(1 / rate.at(0))


def test_fluid_iterations_go_on_at_the_new_pace() -> None:
    """Half an iteration at 1 per second, the rest at a tenth of that; then nothing for a while."""
    rate = Trace((0.0, 0.5, 10.5, 20.5), (1.0, 0.1, 0.0, 1.0))
    assert fluid_times(rate, 20.0).tolist() == pytest.approx([5.5, 15.5])
    assert fluid_times(rate, 22.0).tolist() == pytest.approx([5.5, 15.5, 1.0])
    assert fluid_times(Trace.constant(0.0), 10.0).tolist() == [math.inf]


def test_objectives() -> None:
    times = [np.array([1.0] * 19 + [11.0]), np.array([2.0] * 20)]
    assert objective(times, Robust.MEAN) == pytest.approx((1.5 + 2.0) / 2)
    assert objective(times, Robust.P95) == pytest.approx(2.0)
    assert objective(times, Robust.WORST) == 11.0
    assert objective([np.array([math.inf]), times[0]], Robust.P95) == math.inf


def test_the_average_and_the_low_network() -> None:
    cluster = load_cluster("mixed-16")
    full = cluster.links[
        next(i for i, link in enumerate(cluster.links) if link.edge == "v0.nic")
    ].bandwidth.at(0)
    half = with_changes(cluster, [link_steps("v0.nic", Trace((0.0, 30.0), (full, 0.0)))])
    index = next(i for i, link in enumerate(half.links) if link.edge == "v0.nic")
    assert lasting(cluster, [half], 60.0).links[index].bandwidth == Trace.constant(full / 2)
    assert lasting(cluster, [half], 60.0, 0.1).links[index].bandwidth == Trace.constant(0.0)
    assert moments(half, 60.0) == [0.0, 30.0]


def small(*changes: dict[str, object]) -> Cluster:
    return with_changes(load_cluster("mixed-8"), changes)


def test_a_link_that_is_down_at_first_may_come_later() -> None:
    """Its host is planned without at time 0, and a policy has nothing to count from."""
    chain = load_model("gpt2-xl", dtype="fp16")
    steps = [["0 s", "0 bit/s"], ["30 s", "10 Gbit/s"], ["60 s", "1 Gbit/s"]]
    changing = small({"link": "old0.nic", "steps": steps})
    found = find_robust_plan(chain, changing, [changing], global_batch=16)
    check_plan(found.plan, chain, changing)
    assert math.isfinite(found.value)
    courses = compare_courses(chain, changing, global_batch=16, horizon=90.0)
    assert all(course.iterations > 0 for course in courses.courses)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(even_shares=True),
        pytest.param(
            Settings(
                schedules=(ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2),), max_width=1
            ),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["even shares", "interleaved"],
)
def test_what_the_settings_ask_for_holds_over_scenarios_too(settings: Settings) -> None:
    chain = load_model("gpt2-xl", dtype="fp16")
    changing = small({"link": "old0.nic", "steps": [["30 s", "1 Gbit/s"]]})
    plan = find_robust_plan(chain, changing, [changing], global_batch=16, settings=settings).plan
    check_plan(plan, chain, changing)
    if settings.even_shares:
        assert len({replica.samples for stage in plan.stages for replica in stage.replicas}) == 1
    else:
        assert plan.schedule.kind is ScheduleKind.INTERLEAVED


def test_where_transfers_block_only_1f1b_is_looked_at() -> None:
    chain = load_model("gpt2-xl", dtype="fp16")
    changing = small({"link": "old0.nic", "steps": [["30 s", "1 Gbit/s"]]})
    plan = find_robust_plan(
        chain, changing, [changing], global_batch=16, model=ComputeModel(blocking=True)
    ).plan
    assert plan.schedule == ScheduleSpec()


def test_a_plan_that_gets_stuck_comes_after_those_that_go_on() -> None:
    """However fast it was until then."""
    chain = load_model("gpt2-xl", dtype="fp16")
    found = find_robust_plan(
        chain, small(), [small({"device": "old0.*", "steps": [["20 s", 0]]})], global_batch=64
    )
    assert found.average.never_ends and found.average.mean < found.chosen.mean
    assert not found.chosen.never_ends
    assert {name.partition(".")[0] for name in found.plan.devices} == {"new0"}
    assert (
        _why(found.average, found.chosen, Robust.MEAN)
        == "an iteration never ends in one of the scenarios"
    )
    assert not robust_lines(found)


def test_where_every_plan_gets_stuck_the_iterations_before_count() -> None:
    chain = load_model("gpt2-xl", dtype="fp16")
    found = find_robust_plan(
        chain, small(), [small({"device": "*", "steps": [["20 s", 0]]})], global_batch=16
    )
    assert found.chosen.never_ends and math.isfinite(found.chosen.worst)
    assert robust_lines(found)[0].startswith("every plan that was judged gets stuck")
    with pytest.raises(InfeasibleError, match="ends an iteration in every scenario"):
        find_robust_plan(
            chain, small(), [small({"device": "*", "steps": [["1 ms", 0]]})], global_batch=16
        )


def test_times_that_do_not_exist_are_null_in_json(choice: RobustChoice) -> None:
    never = replace(choice.average, mean=math.inf, p95=math.inf, worst=math.inf, never_ends=True)
    content = json.loads(
        json.dumps(robust_to_dict(replace(choice, average=never)), allow_nan=False)
    )
    assert content["gain_over_average_plan"] is None
    assert content["average_plan"]["mean_seconds"] is None and content["average_plan"]["never_ends"]
    assert content["chosen"]["mean_seconds"] == choice.chosen.mean


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.125, "p95 125 ms against 120 ms over the scenarios"),
        (0.120004, "p95 120.004 ms against 120 ms over the scenarios"),
        (0.12 + 1e-12, "as fast: the same p95 over the scenarios"),
        (math.inf, "p95 never against 120 ms over the scenarios"),
    ],
)
def test_a_runner_up_is_told_from_the_best_in_as_many_digits_as_it_takes(
    seconds: float, told: str
) -> None:
    plan = load_plan("gpt2-xl-on-two-cards")
    best, other = (
        Figures(plan=plan, mean=1.0, p95=p95, worst=1.0, estimate=1.0) for p95 in (0.12, seconds)
    )
    assert _why(other, best, Robust.P95) == told


def test_a_view_on_which_nothing_fits_adds_no_plans() -> None:
    plan, views = (
        load_plan("gpt2-xl-on-two-cards"),
        [load_cluster("two-cards"), load_cluster("mixed-8")],
    )

    def search(view: Cluster) -> list[Plan]:
        if view is views[0]:
            return [plan, plan]
        raise InfeasibleError("nothing fits on what is left")

    assert plans_of_views(search, views, 1) == [[plan], []]
    with pytest.raises(InfeasibleError):
        plans_of_views(search, views[::-1], 1)
