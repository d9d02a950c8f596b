"""``python -m benchmarks.lab [NOTE.md [PART ...]]``: the cases in the lab, in a dated note."""

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
from argosy.baselines import PlanningJob as Question
from argosy.lab.system import why_not
from argosy.plan.plan import Plan
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleKind, build_schedule, in_flight
from benchmarks.lab.cases import Case, Contest, contests, predicted_cases, rate_cases, real_contest
from benchmarks.lab.run import Outcome, known_of, payload_share, play

RIVALS = ("megatron", "dp-ev", "dp-cp")
_EQUAL = 0.03
_APART = 1.1
"""Plans whose measured times differ by more than this must be ranked right."""


def main(arguments: Sequence[str]) -> int:
    reason = why_not()
    if reason is not None:
        print(f"no lab here: {reason}", file=sys.stderr)
        return 4
    note = (
        Path(arguments[0])
        if arguments
        else Path(f"benchmarks/results/{time.strftime('%Y-%m-%d')}-lab.md")
    )
    chosen = arguments[1:] or list(PARTS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        share = payload_share(folder)
        print(f"payload is {100 * share:.1f} % of a shaped link's rate")
        sections = _read(note)
        for part in chosen:
            sections[part] = list(PARTS[part](share, folder, note))
            text = [*_head(share)]
            for known in PARTS:
                text += [_MARK.format(known), *sections.get(known, ())]
            note.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {note}")
    return 0


def _read(note: Path) -> dict[str, list[str]]:
    """The parts that a note has already, by name."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in note.read_text(encoding="utf-8").splitlines() if note.exists() else ():
        part = next((name for name in PARTS if line == _MARK.format(name)), None)
        if part is not None:
            lines = sections[part] = []
        else:
            lines.append(line)
    return sections


def _cases(share: float, folder: Path, note: Path) -> list[str]:
    played = [_shown(play(case, share, folder)) for case in predicted_cases()]
    plot = note.with_suffix(".svg")
    _plot(played, plot)
    return [*_predicted_table(played, plot), *_memory_table(played)]


def _rates(share: float, folder: Path, note: Path) -> list[str]:
    by_rate = [_shown(play(case, share, folder)) for case in rate_cases()]
    return _rate_table("k hides the network", by_rate)


def _contests(share: float, folder: Path, note: Path) -> list[str]:
    return [
        line
        for contest in contests()
        for line in _contest_table(contest, list(_fight(contest, share, folder, RIVALS)))
    ]


def _real_rates(share: float, folder: Path, note: Path) -> list[str]:
    cases = rate_cases((200.0, 25.0), real=True)
    known = known_of(cases[0].job, cases[0].cluster, cases[0].plan.micro_batch_size, folder)
    outcomes = [_shown(play(case, share, folder, known)) for case in cases]
    return [*_rate_table("k with layers that compute", outcomes), *_REAL]


def _real_contest(share: float, folder: Path, note: Path) -> list[str]:
    contest = real_contest()
    return _contest_table(contest, list(_fight(contest, share, folder, ("megatron", "dp-cp"))))


PARTS = {
    "cases": _cases,
    "rates": _rates,
    "contests": _contests,
    "real": _real_rates,
    "real-contest": _real_contest,
}
"""Each a few minutes, written into the note as soon as it is done."""
_MARK = "<!-- part: {} -->"
_REAL = (
    "Here and in the next table layers compute on a share of a core (control groups), and their times were measured",
    "while all devices worked. Reported, not asserted: what a share of a core does depends on what else the cores do.",
    "",
)


def _shown(outcome: Outcome) -> Outcome:
    print(outcome, flush=True)
    return outcome


def _fight(
    contest: Contest, share: float, folder: Path, rivals: Sequence[str]
) -> Iterator[tuple[str, Outcome | str]]:
    """Ours and the rivals' plans, each run."""
    known = known_of(contest.job, contest.cluster, contest.global_batch, folder)
    chain, model = known.chain, known.model
    question = Question(
        chain=chain, cluster=contest.cluster, global_batch=contest.global_batch, model=model
    )
    settings = Settings(level=2, time_budget=20.0, runnable=True, max_width=1)
    plans: dict[str, Plan | NoPlan] = {
        "argosy": find_plan(
            chain,
            contest.cluster,
            global_batch=contest.global_batch,
            settings=settings,
            model=model,
        )
    }
    plans |= {name: BASELINES[name](question) for name in rivals}
    for name, plan in plans.items():
        if isinstance(plan, NoPlan):
            yield name, plan.reason
            continue
        stages = tuple(
            replace(stage, zero=0) for stage in plan.stages
        )  # with SGD there is no state to share
        case = Case(
            name=name,
            cluster=contest.cluster,
            job=contest.job,
            plan=replace(plan, stages=stages),
            steps=3,
        )
        yield name, _shown(play(case, share, folder, known))


def _head(share: float) -> list[str]:
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores"
    )
    return [
        "# Plans in the lab: predicted and measured",
        "",
        f"{time.strftime('%Y-%m-%d')}, {versions}. Real processes and real gloo traffic over shaped links between",
        "network namespaces; unless said otherwise compute is emulated (layers sleep), so figures do not depend on",
        f"the cores. Probed: {100 * share:.1f} % of a link's rate arrives as payload. Times are seconds per iteration.",
        "",
        "Repeat with `python -m benchmarks.lab` as root, or part by part with `python -m benchmarks.lab NOTE.md PART`:",
        f"{', '.join(PARTS)}.",
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


def _memory_table(outcomes: Sequence[Outcome]) -> list[str]:
    errors = [
        abs(predicted / measured - 1) for one in outcomes for _, predicted, measured in one.peaks
    ]
    rows = [
        f"| {one.case.name} | {one.case.plan.schedule!r} | "
        + ", ".join(f"{device.partition('0')[0]} {predicted / 1e6:.2f} ({measured / 1e6:.2f})"
                    for device, predicted, measured in one.peaks)
        + " |"
        for one in outcomes
    ]  # fmt: skip
    return [
        "## Peak memory",
        "",
        "The most that torch held on each device during a step, in MB: predicted by replaying the runtime's actions",
        "(`benchmarks/memory_ledger.py`), measured in brackets (every allocation of the rank, written down by torch's profiler).",
        "",
        "| case | schedule | host: predicted (measured) |",
        "| --- | --- | --- |",
        *rows,
        "",
        f"Largest error {100 * max(errors):.1f} %, median {100 * statistics.median(errors):.1f} %. The simulator's own",
        "peaks are lower on such small stages: it counts a message while it travels, not while its buffer waits",
        "(`docs/decisions/0023-memory-replayed.md`).",
        "",
    ]


def _rate_table(title: str, outcomes: Sequence[Outcome]) -> list[str]:
    rows = []
    for name, group in itertools.groupby(outcomes, key=lambda one: one.case.name):
        members = list(group)
        cells = " | ".join(f"{one.measured:.3f} ({one.predicted:.3f})" for one in members)
        found = [
            f"{_best(some, measured=True)} ({_best(some, measured=False)})"
            for some in (
                [one for one in members if one.case.plan.schedule.kind is not ScheduleKind.EAGER],
                members,
            )
        ]
        rows.append(f"| {name} | {cells} | {' | '.join(found)} |")
    heads = " | ".join(
        f"{one.case.plan.schedule!r}, {_most_in_flight(one.case.plan)} in flight, {one.peaks[0][2] / 1e6:.1f} MB"
        for one in outcomes[:4]
    )
    return [
        f"## {title}",
        "",
        "Two stages, 12 micro-batches; measured seconds, predicted in brackets. In flight: micro-batches that",
        "the first stage holds, and the most memory that was measured on it. Best: the one that holds fewest",
        f"micro-batches of those within {100 * _EQUAL:g} % of the fastest.",
        "",
        f"| link | {heads} | best of 1F1B and kFkB | best of all |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _best(outcomes: Sequence[Outcome], *, measured: bool) -> str:
    """Memory decides between schedules that are as good as equally fast."""
    times = [one.measured if measured else one.predicted for one in outcomes]
    near = [
        one for one, took in zip(outcomes, times, strict=True) if took <= (1 + _EQUAL) * min(times)
    ]
    return repr(min(near, key=lambda one: _most_in_flight(one.case.plan)).case.plan.schedule)


def _most_in_flight(plan: Plan) -> int:
    schedule = build_schedule(plan.schedule, len(plan.stages), plan.num_micro_batches)
    return max(in_flight(schedule))


def _contest_table(contest: Contest, outcomes: Sequence[tuple[str, Outcome | str]]) -> list[str]:
    ours = next(
        one.measured for name, one in outcomes if name == "argosy" and isinstance(one, Outcome)
    )
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
        f"{stage.end - stage.first} on "
        + ", ".join(f"{r.devices[0]} x{r.samples}" for r in stage.replicas)
        for stage in plan.stages
    )
    return f"{plan.num_micro_batches} micro-batches of {plan.micro_batch_size}, {plan.schedule!r}: {stages}"


def _plot(outcomes: Sequence[Outcome], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 5))
    axes.plot(
        [one.measured for one in outcomes], [one.predicted for one in outcomes], "o", alpha=0.7
    )
    top = 1.1 * max(max(one.measured, one.predicted) for one in outcomes)
    axes.plot([0, top], [0, top], "-", color="grey", linewidth=0.8)
    axes.fill_between(
        [0, top], [0, 0.9 * top], [0, 1.1 * top], color="grey", alpha=0.15, label="within 10 %"
    )
    axes.set(
        xlabel="measured, seconds per iteration", ylabel="predicted", xlim=(0, top), ylim=(0, top)
    )
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
