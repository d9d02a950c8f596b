"""``python -m benchmarks.lab [NOTE.md]``: every case in the lab; writes a dated note with its tables and plots."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from argosy.baselines import BASELINES, NoPlan
from argosy.baselines import Job as Question
from argosy.cost.compute import ComputeModel
from argosy.lab.system import why_not
from argosy.plan.plan import Plan
from argosy.planner import Settings, find_plan
from argosy.schedule import build_schedule, in_flight
from benchmarks.lab.cases import Case, Contest, contests, predicted_cases, rate_cases
from benchmarks.lab.run import Outcome, payload_share, play

RIVALS = ("megatron", "dp-ev", "dp-cp")
_APART = 1.1
"""Plans whose measured times differ by more than this must be ranked right."""


def main(arguments: Sequence[str]) -> int:
    reason = why_not()
    if reason is not None:
        print(f"no lab here: {reason}", file=sys.stderr)
        return 4
    note = Path(arguments[0]) if arguments else Path(f"benchmarks/results/{time.strftime('%Y-%m-%d')}-lab.md")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        share = payload_share(folder)
        print(f"payload is {100 * share:.1f} % of a shaped link's rate")
        played = [_shown(play(case, share, folder)) for case in predicted_cases()]
        by_rate = [_shown(play(case, share, folder)) for case in rate_cases()]
        fought = [(contest, list(_fight(contest, share, folder))) for contest in contests()]
    plot = note.with_suffix(".svg")
    _plot([*played, *by_rate], plot)
    text = [*_head(share), *_predicted_table(played, plot), *_rate_table(by_rate)]
    text += [line for contest, outcomes in fought for line in _contest_table(contest, outcomes)]
    note.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(f"wrote {note}")
    return 0


def _shown(outcome: Outcome) -> Outcome:
    print(outcome, flush=True)
    return outcome


def _fight(contest: Contest, share: float, folder: Path) -> Iterator[tuple[str, Outcome | str]]:
    """Ours and the rivals' plans, each run."""
    chain = contest.job.chain
    model = ComputeModel(profiles=contest.job.profiles(contest.cluster, contest.global_batch))
    question = Question(chain=chain, cluster=contest.cluster, global_batch=contest.global_batch, model=model)
    settings = Settings(level=2, time_budget=20.0, runnable=True)
    plans: dict[str, Plan | NoPlan] = {
        "argosy": find_plan(chain, contest.cluster, global_batch=contest.global_batch, settings=settings, model=model)
    }
    plans |= {name: BASELINES[name](question) for name in RIVALS}
    for name, plan in plans.items():
        if isinstance(plan, NoPlan):
            yield name, plan.reason
            continue
        stages = tuple(replace(stage, zero=0) for stage in plan.stages)  # with SGD there is no state to share
        case = Case(name=name, cluster=contest.cluster, job=contest.job, plan=replace(plan, stages=stages), steps=3)
        yield name, _shown(play(case, share, folder))


def _head(share: float) -> list[str]:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores"
    return [
        "# Plans in the lab: predicted and measured",
        "",
        f"{time.strftime('%Y-%m-%d')}, {versions}. Real processes and real gloo traffic over shaped links between",
        "network namespaces; compute is emulated (layers sleep), so that figures do not depend on the cores. Probed:",
        f"{100 * share:.1f} % of a link's rate arrives as payload. Times are seconds per iteration.",
        "",
        "Repeat with `python -m benchmarks.lab` as root.",
        "",
    ]


def _predicted_table(outcomes: Sequence[Outcome], plot: Path) -> list[str]:
    errors = [abs(one.error) for one in outcomes]
    wrong = [
        (one, other)
        for one, other in itertools.permutations(outcomes, 2)
        if one.measured > _APART * other.measured and one.predicted < other.predicted
    ]
    rows = [
        f"| {one.case.name} | {one.case.plan.schedule!r} | {one.predicted:.3f} | {one.measured:.3f} "
        f"| {100 * one.error:+.1f} % |"
        for one in outcomes
    ]
    return [
        "## Predicted against measured",
        "",
        "| case | schedule | predicted | measured | error |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
        f"Median error {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %. "
        f"Of the pairs that differ by more than 10 % when measured, {len(wrong)} are predicted in the wrong order.",
        "",
        f"![predicted against measured]({plot.name})",
        "",
    ]


def _rate_table(outcomes: Sequence[Outcome]) -> list[str]:
    rows = []
    for name, group in itertools.groupby(outcomes, key=lambda one: one.case.name):
        members = list(group)
        best = min(members, key=lambda one: one.measured).case.plan.schedule
        foreseen = min(members, key=lambda one: one.predicted).case.plan.schedule
        cells = " | ".join(f"{one.measured:.3f} ({one.predicted:.3f})" for one in members)
        rows.append(f"| {name} | {cells} | {best!r} | {foreseen!r} |")
    schedules = [one.case.plan for one in outcomes[:4]]
    heads = " | ".join(f"{plan.schedule!r}, {_most_in_flight(plan)} in flight" for plan in schedules)
    return [
        "## k hides the network",
        "",
        "Two stages, 12 micro-batches; measured seconds, predicted in brackets. In flight: micro-batches that",
        "the first stage holds.",
        "",
        f"| link | {heads} | fastest | predicted fastest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _most_in_flight(plan: Plan) -> int:
    schedule = build_schedule(plan.schedule, len(plan.stages), plan.num_micro_batches)
    return max(in_flight(schedule))


def _contest_table(contest: Contest, outcomes: Sequence[tuple[str, Outcome | str]]) -> list[str]:
    ours = next(one.measured for name, one in outcomes if name == "argosy" and isinstance(one, Outcome))
    rows = []
    for name, one in outcomes:
        if isinstance(one, str):
            rows.append(f"| {name} | - | - | - | no plan: {one} |")
        else:
            times = f"{one.predicted:.3f} | {one.measured:.3f} | {one.measured / ours:.2f}"
            rows.append(f"| {name} | {times} | {_short(one.case.plan)} |")
    return [
        f"## It pays: {contest.name}",
        "",
        "| planner | predicted | measured | time over ours | plan |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _short(plan: Plan) -> str:
    stages = "; ".join(
        f"{stage.end - stage.first} on " + ", ".join(f"{r.devices[0]} x{r.samples}" for r in stage.replicas)
        for stage in plan.stages
    )
    return f"{plan.num_micro_batches} micro-batches of {plan.micro_batch_size}, {plan.schedule!r}: {stages}"


def _plot(outcomes: Sequence[Outcome], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 5))
    axes.plot([one.measured for one in outcomes], [one.predicted for one in outcomes], "o", alpha=0.7)
    top = 1.1 * max(max(one.measured, one.predicted) for one in outcomes)
    axes.plot([0, top], [0, top], "-", color="grey", linewidth=0.8)
    axes.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color="grey", alpha=0.15, label="within 10 %")
    axes.set(xlabel="measured, seconds per iteration", ylabel="predicted", xlim=(0, top), ylim=(0, top))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
