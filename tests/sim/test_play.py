"""A plan is played in one way by all that show it: whole up to a limit, folded beyond it, once for
a page."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import argosy
from argosy.adapt.predictor import Predictor
from argosy.cluster.lasting import at_time_zero
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.explain import shown, whatif, with_prediction
from argosy.explain.contest import contest
from argosy.explain.shown import shown_plan
from argosy.plan.plan import Plan
from argosy.sim import simulate as playing
from argosy.sim.simulate import first_end, iteration_seconds, play, plays_whole
from argosy.timeline import Timeline
from argosy.workload.chain import Chain

SOURCE = Path(argosy.__file__).parent
Case = tuple[Plan, Chain, Cluster]


@pytest.fixture(scope="module")
def case() -> Case:
    cluster = at_time_zero(argosy.load_cluster("geo-8"))
    chain = argosy.load_model("gpt2-medium", sequence_length=512, dtype="fp16")
    return argosy.find_plan(chain, cluster, global_batch=32), chain, cluster


@pytest.mark.parametrize("limit", [0, 10**9], ids=["folded", "whole"])
def test_one_time_in_every_part(case: Case, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "MOST_WHOLE", limit)
    plan, chain, cluster = case
    model = ComputeModel()
    expected, other = (
        first_end(play(plan, chain, cluster, whole=whole)) for whole in (limit > 0, limit == 0)
    )
    assert expected != pytest.approx(other, rel=1e-6), (
        "both ways give one time, and the test shows nothing"
    )
    close = pytest.approx(expected, rel=1e-9)
    assert plays_whole(plan) is (limit > 0)
    assert first_end(play(plan, chain, cluster)) == close
    assert iteration_seconds(plan, chain, cluster) == close
    predicted = with_prediction(plan, chain, cluster).predicted
    assert predicted is not None
    assert predicted.iteration_seconds == close
    assert contest([("ours", plan)], chain, [cluster])[0].seconds == close
    assert Predictor(chain, cluster, model).on(plan, cluster) == close
    page = shown_plan(plan, chain, cluster, model)
    assert first_end(page.timelines[0][1]) == close
    assert page.plan.predicted == predicted


def test_iterations_count_towards_the_limit(case: Case) -> None:
    plan, chain, cluster = case
    steps = len(plan.devices) * plan.num_micro_batches
    assert plays_whole(plan, iterations=playing.MOST_WHOLE // steps)
    assert not plays_whole(plan, iterations=playing.MOST_WHOLE // steps + 1)
    names = set(plan.devices)
    many = playing.MOST_WHOLE // steps + 1
    assert set(play(plan, chain, cluster, iterations=many, record=0).devices).isdisjoint(names)
    assert set(play(plan, chain, cluster, iterations=2, record=0).devices) == names


def test_a_page_plays_its_plan_once_as_it_is(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, chain, cluster = case
    played: list[tuple[Plan, Cluster]] = []

    def counted(
        one: Plan, chain: Chain, where: Cluster, *rest: object, **options: object
    ) -> Timeline:
        played.append((one, where))
        return play(one, chain, where, *rest, **options)  # type: ignore[arg-type]

    for module in (shown, playing):
        monkeypatch.setattr(module, "play", counted)
    page = shown_plan(plan, chain, cluster, ComputeModel())
    assert page.explanation is not None
    assert page.explanation.timeline is page.timelines[0][1]
    assert sum(one == plan and where is cluster for one, where in played) == 1
    assert whatif.simulate is playing.simulate


def test_only_the_simulator_and_those_with_graphs_of_their_own_call_the_engine() -> None:
    """A plan becomes tasks in ``sim``; gravity and captured programs make tasks themselves."""
    own_graphs = {"nbody", "solve"}
    folds, engines = set(), set()
    for file in SOURCE.rglob("*.py"):
        part = file.relative_to(SOURCE).parts[0]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names}
                folds |= {part} if "fold_plan" in names else set()
                engines |= {part} if "simulate_exact" in names else set()
    assert folds == {"sim"}
    assert engines <= {"sim", "adapt"} | own_graphs
