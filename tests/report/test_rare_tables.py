"""Tables of `argosy plan` and `argosy compare` that few inputs show: moves between plans, policies,
odd losses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from rich.console import Console

from argosy.choose.replan import Courses, Switch, TraceRun
from argosy.choose.robust import Figures, RobustChoice
from argosy.choose.scenario import Robust
from argosy.cluster.file import cluster_from_content
from argosy.explain.contest import Entry, Loss
from argosy.plan.file import load_plan
from argosy.plan.plan import PolicyRule
from argosy.report.contest import in_words, rows_of
from argosy.report.courses import courses_to_dict, switch_table
from argosy.report.marks import names_in_short
from argosy.report.plan import stage_table
from argosy.report.robust import robust_lines
from argosy.report.summary import summarise
from argosy.report.tables import summary_table
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.simulate import simulate
from argosy.workload.load import load_model

PLAN = load_plan("gpt2-xl-on-two-cards")
CLUSTER = cluster_from_content(PLAN.cluster.content)


def rendered(content: object) -> list[list[str]]:
    """The cells of every line, at 120 columns."""
    console = Console(width=120, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(content)
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in captured.get().splitlines()
    ]


def test_moves_are_told_with_when_they_pay() -> None:
    other = replace(PLAN, num_micro_batches=2 * PLAN.num_micro_batches)
    moves = (
        Switch(
            time=12.5, old=PLAN, new=other, migration=1.25, pays_after=30.0, pays_after_steps=9.2
        ),
        Switch(
            time=90.0,
            old=other,
            new=PLAN,
            migration=2.0,
            pays_after=math.inf,
            pays_after_steps=math.inf,
        ),
    )
    course = TraceRun(name="re-planned", iterations=40.0, migrating=3.25, switches=moves)
    head, first, second = rendered(switch_table(course))
    assert head == ["at", "moving takes", "pays after", "to"]
    assert first[:3] == ["12.5 s", "1.25 s", "30 s, 10 steps"]
    assert second[:3] == ["90 s", "2 s", "-"]
    assert "stages" in first[3] and "gpt2-xl" not in first[3]
    told = courses_to_dict(Courses(horizon=120.0, plans=2, courses=(course,)))["courses"][0][
        "switches"
    ]
    assert [one["pays_after_seconds"] for one in told] == [30.0, None]
    assert [one["pays_after_steps"] for one in told] == [9.2, None]
    assert (told[0]["old"], told[0]["new"]) == (repr(PLAN), repr(other))


def test_a_policy_is_told_a_rule_a_line() -> None:
    rule = PolicyRule(
        edge="box0.nic", below=1.25e8, schedule=ScheduleSpec(kind=ScheduleKind.KFKB, k=4)
    )
    plan = replace(PLAN, policy=(rule,))
    figures = Figures(plan=plan, mean=2.0, p95=2.0, worst=2.0, estimate=2.0)
    average = replace(figures, mean=3.0)
    choice = RobustChoice(
        plan=plan,
        robust=Robust.MEAN,
        horizon=60.0,
        chosen=figures,
        average=average,
        others=(figures,),
    )
    gain, policy = robust_lines(choice)
    assert gain == "mean: 50 % faster than the best plan for the average network"
    assert policy == "policy: kfkb (k=4) while box0.nic carries less than 125 MB/s"


def test_losses_in_words() -> None:
    assert in_words(Loss.RECOMPUTATION, 0.25, PLAN, CLUSTER) == "memory forces recomputation: 25 %"
    equal = replace(PLAN, stages=PLAN.stages[1:])
    assert (
        in_words(Loss.SHARES, 0.1, equal, CLUSTER)
        == "unequal shares in a stage with faster devices: 10 % waiting"
    )
    entries = [Entry(name="argosy", plan=PLAN, seconds=1.0, losses=())]
    entries += [Entry(name="gpipe", plan=PLAN, seconds=math.inf, losses=())]
    ours, lost = rows_of(entries, [], CLUSTER)
    assert (ours.reason, lost.reason) == (
        "the fastest",
        "never ends: a device or link it needs is lost",
    )
    assert ours.is_feasible and not lost.is_feasible


def test_split_sequences_and_experts_stand_beside_the_replicas() -> None:
    stages = (replace(PLAN.stages[0], context=2, expert=4), *PLAN.stages[1:])
    text = "\n".join(
        "".join(line) for line in rendered(stage_table(replace(PLAN, stages=stages), CLUSTER))
    )
    assert "context 2" in text and "experts / 4" in text


def test_iterations_that_repeat_others_are_counted() -> None:
    chain = load_model("gpt2-xl", dtype=PLAN.model.dtype)
    timeline = simulate(PLAN, chain, CLUSTER, iterations=400, record=1)
    assert timeline.repeated > 300
    lines = ["".join(line) for line in rendered(summary_table(summarise(PLAN, CLUSTER, timeline)))]
    played = 400 - timeline.repeated
    assert any(
        f"{played}; the other {timeline.repeated} repeat them exactly" in line for line in lines
    )


@pytest.mark.parametrize(
    ("names", "told"), [(["a1", "a3", "a"], "a1, a3, a"), (["x", "y"], "x, y")]
)
def test_names_that_do_not_follow_one_another_stand_alone(names: list[str], told: str) -> None:
    assert names_in_short(names) == told
