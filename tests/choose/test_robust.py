"""Plans chosen over scenarios, judged by the exact engine."""

from __future__ import annotations

import math

import numpy as np
import pytest

from argosy.choose.robust import RobustChoice, find_robust_plan
from argosy.choose.scenario import Horizon, Robust, exact_times, fluid_times, lasting, moments, objective, pace
from argosy.cluster.changes import link_steps
from argosy.cluster.file import load_cluster, with_changes
from argosy.cluster.lasting import at_time_zero
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.cost.compute import ComputeModel
from argosy.plan.check import check_plan
from argosy.sim.simulate import simulate
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

BATCH = 64
MODEL = ComputeModel()


@pytest.fixture(scope="module")
def chain() -> Chain:
    return load_model("llama-3-8b", sequence_length=1024, dtype="fp16")


def changing(generator: str, seed: int, **parameters: object) -> Cluster:
    change = {"link": "v*.nic", "generator": generator, "parameters": parameters, "seed": seed, "horizon": "90 s"}
    return with_changes(load_cluster("mixed-16"), [change])


@pytest.fixture(scope="module")
def scenarios() -> list[Cluster]:
    return [changing("on-off", 1, on="10 s", off="10 s", low=0.05), with_changes(load_cluster("mixed-16"), [])]


@pytest.fixture(scope="module", params=[Robust.MEAN, Robust.P95])
def choice(request: pytest.FixtureRequest, chain: Chain, scenarios: list[Cluster]) -> RobustChoice:
    return find_robust_plan(chain, load_cluster("mixed-16"), scenarios, global_batch=BATCH, robust=request.param)


def test_the_choice_is_no_worse_than_the_plan_for_the_average(choice: RobustChoice) -> None:
    assert choice.value <= choice.average_value
    assert choice.value == min(getattr(one, choice.robust) for one in (choice.chosen, choice.average, *choice.others))
    if choice.robust is Robust.P95:
        assert choice.gain > 0.05, "a plan that does not need the link that comes and goes"


def test_the_figures_are_those_of_the_simulator(choice: RobustChoice, chain: Chain, scenarios: list[Cluster]) -> None:
    """Played whole, device by device, and not folded."""
    plan = choice.plan
    check_plan(plan, chain, load_cluster("mixed-16"))
    means = []
    for scenario in scenarios:
        ends = simulate(plan, chain, scenario, iterations=40, record=0, until=choice.horizon).iteration_ends
        means.append(ends[-1] / len(ends))
    assert choice.chosen.mean == pytest.approx(np.mean(means), rel=0.03)


def test_estimates_rank_as_the_exact_engine_does(choice: RobustChoice) -> None:
    """The fluid estimate is close enough to choose the finalists by."""
    for figures in (choice.chosen, *choice.others):
        assert figures.estimate == pytest.approx(getattr(figures, choice.robust), rel=0.1)


def test_a_lasting_network_takes_as_long_as_the_simulator_says(choice: RobustChoice, chain: Chain) -> None:
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
    full = cluster.links[next(i for i, link in enumerate(cluster.links) if link.edge == "v0.nic")].bandwidth.at(0)
    half = with_changes(cluster, [link_steps("v0.nic", Trace((0.0, 30.0), (full, 0.0)))])
    index = next(i for i, link in enumerate(half.links) if link.edge == "v0.nic")
    assert lasting(cluster, [half], 60.0).links[index].bandwidth == Trace.constant(full / 2)
    assert lasting(cluster, [half], 60.0, 0.1).links[index].bandwidth == Trace.constant(0.0)
    assert moments(half, 60.0) == [0.0, 30.0]
