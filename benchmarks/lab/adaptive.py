"""One job in the lab whose link is preempted and whose host is slowed: what each policy makes of
it.

`python -m benchmarks.lab.adaptive run POLICY FOLDER` measures one policy, `all FOLDER` in its place
all of them side by side, each in a lab of its own (about five minutes; layers sleep, so they hardly
disturb each other), and `note FOLDER NOTE.md` writes the note with its tables and plot from what
FOLDER holds.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from argosy.adapt.controller import AdaptationLevel, ControllerLimits
from argosy.adapt.play import Playback, play
from argosy.choose.policy import schedules_that_fit
from argosy.cluster.lasting import at_moment
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.moving import migration
from argosy.lab.lab import Lab, LabClock
from argosy.plan.file import dumps_plan
from argosy.plan.plan import Plan
from argosy.planner import Settings, find_plan
from benchmarks.lab.cases import cluster_of, plan_of
from benchmarks.lab.emulated import Job
from benchmarks.lab.run import ROOT, with_payload

SECONDS = 200.0
LINK, HOST = "c0.nic", "b0.0"
PREEMPTED = ((15.0, 35.0, 25.0), (50.0, 70.0, 20.0), (85.0, 100.0, 30.0))
"""Begin, end, Mbit/s."""
SLOWED = (115.0, 180.0, 0.5)
RATE = 100.0
PAYLOAD = 0.958
"""Of a shaped link's rate, what arrives (`benchmarks/results/2026-11-15-lab.md`)."""
HOSTS = ("a", "b", "c")
POLICIES = ("static 1F1B", "best static plan", "adaptive k", "full adaptation", "oracle replayed")
JOB = Job(num_layers=12, forward_seconds=8e-3, values=65_536, weights=200_000)
"""A message takes ten times as long as a token bucket lets through at once, so that rates are what
they seem."""
_RECOVERED = 0.9
_WITHIN = 0.15


def cluster() -> Cluster:
    link = ", ".join(
        f'["{begin:g} s", "{low:g} Mbit/s"], ["{end:g} s", "{RATE:g} Mbit/s"]'
        for begin, end, low in PREEMPTED
    )
    begin, end, speed = SLOWED
    changes = f'[[changes]]\nlink = "{LINK}"\nsteps = [{link}]\n'
    changes += (
        f'[[changes]]\ndevice = "{HOST}"\nsteps = [["{begin:g} s", {speed}], ["{end:g} s", 1]]\n'
    )
    return cluster_of("lab", [(1.0, RATE)] * len(HOSTS), changes)


def first_plan(where: Cluster) -> Plan:
    """A third of the layers on each host, 1F1B."""
    third = JOB.num_layers // len(HOSTS)
    return plan_of(where, JOB, [(third, [(name, 1)]) for name in HOSTS], micro_batches=8)


def moments() -> list[float]:
    changes = {moment for begin, end, _ in (*PREEMPTED, SLOWED) for moment in (begin, end)}
    return sorted({0.0, *changes})


class Foresight:
    """What the simulator says of plans on this cluster, future included."""

    def __init__(self) -> None:
        self.real = cluster()
        self.cluster = with_payload(self.real, PAYLOAD)
        self.first = first_plan(self.real)
        self.model = ComputeModel(profiles=JOB.profiles(self.real, self.first.global_batch))
        self.stage = Playback(JOB.chain, self.cluster, self.model)

    def candidates(self) -> list[Plan]:
        """Of every state of the world the best plan that is found, and the first one, under all
        schedules."""
        plans = [self.first]
        for moment in moments():
            then = at_moment(self.cluster, moment)
            settings = Settings(runnable=True, max_width=1)
            batch = self.first.global_batch
            found = find_plan(
                JOB.chain, then, global_batch=batch, settings=settings, model=self.model
            )
            plans.append(
                replace(found, stages=tuple(replace(stage, zero=0) for stage in found.stages))
            )
        unique = {(plan.stages, plan.micro_batch_size): plan for plan in plans}
        return [
            variant
            for plan in unique.values()
            for variant in schedules_that_fit(plan, JOB.chain, self.cluster)
        ]

    def best_static(self) -> Plan:
        still = ControllerLimits(reach=AdaptationLevel.OFF)
        return max(
            self.candidates(),
            key=lambda plan: play(self.stage, plan, until=SECONDS, limits=still).samples_per_second,
        )

    def oracle(self) -> list[tuple[float, Plan]]:
        """For every stretch between two changes the plan with which most is done in the end, moves
        counted: a programme over stretches and plans."""
        plans = self.candidates()
        most = [0.0] * len(plans)
        courses: list[list[Plan]] = [[] for _ in plans]
        for begin, end in pairwise([*moments(), SECONDS]):
            now = at_moment(self.cluster, begin + 0.1)
            paces = [1 / self.stage.lasting(plan, begin + 0.1) for plan in plans]
            found = [
                max(
                    (done + (end - begin - self._moving(old, new, now, begin)) * pace, at)
                    for at, (old, done) in enumerate(zip(plans, most, strict=True))
                )
                for new, pace in zip(plans, paces, strict=True)
            ]
            courses = [[*courses[at], plan] for (_, at), plan in zip(found, plans, strict=True)]
            most = [done for done, _ in found]
        best = max(range(len(plans)), key=most.__getitem__)
        return list(zip(moments(), courses[best], strict=True))

    def _moving(self, old: Plan, new: Plan, now: Cluster, time: float) -> float:
        """It begins with any plan for nothing."""
        return migration(old, new, JOB.chain, now).seconds(now) if time else 0.0


def measure(policy: str, folder: Path) -> Path:
    where = cluster()
    plans = [(0.0, first_plan(where))]
    if policy == "best static plan":
        plans = [(0.0, Foresight().best_static())]
    elif policy == "oracle replayed":
        plans = Foresight().oracle()
    reach = {"adaptive k": AdaptationLevel.K, "full adaptation": AdaptationLevel.FULL}.get(policy)
    folder.mkdir(parents=True, exist_ok=True)
    result, task = (
        folder / f"{policy.replace(' ', '-')}.json",
        folder / f"{policy.replace(' ', '-')}-task.json",
    )
    content = {
        "name": policy,
        "policy": "script" if reach is None else str(reach),
        "job": asdict(JOB),
        "cluster": where.content,
        "plans": [(begin, dumps_plan(plan)) for begin, plan in plans],
        "roster": [f"{name}0.0" for name in HOSTS],
        "payload": PAYLOAD,
        "seconds": SECONDS,
        "horizon": 1000,
        "result": str(result),
    }
    task.write_text(json.dumps(content), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.lab.adaptive_worker", str(task)]
    with Lab(where, shares=False) as lab:
        lab.run(
            command,
            devices=content["roster"],
            environment={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            timeout=SECONDS + 120,
            clock=LabClock.READY,
        )
    return result


def rate_between(run: dict[str, Any], begin: float, end: float) -> float:
    """Samples per second: steps that lie in a stretch partly count for that part."""
    starts = [step["start"] for step in run["steps"]]
    ends = [*starts[1:], starts[-1] + run["steps"][-1]["seconds"]]
    done = 0.0
    for start, stop in zip(starts, ends, strict=True):
        done += max(0.0, min(stop, end) - max(start, begin)) / (stop - start)
    return done * run["global_batch"] / (min(end, ends[-1]) - begin)


def steps_to_recover(
    run: dict[str, Any], oracle: dict[str, Any], begin: float, end: float
) -> int | None:
    """Steps that began after a change until one was as fast as 90 % of the oracle's usual rate
    there; None: never."""
    theirs = [step["seconds"] for step in oracle["steps"] if begin < step["start"] < end]
    usual = statistics.median(theirs)
    after = [step["seconds"] for step in run["steps"] if begin <= step["start"] < end]
    return next(
        (number for number, took in enumerate(after, 1) if usual / took >= _RECOVERED), None
    )


def steps_to_believe(
    run: dict[str, Any], what: str, begin: float, end: float, truth: float
) -> int | None:
    """Steps that began after a change until the belief is within 15 % of the truth."""
    after = [step["believed"] for step in run["steps"] if begin <= step["start"] < end]
    return next(
        (number for number, one in enumerate(after) if abs(one[what] / truth - 1) <= _WITHIN), None
    )


def write_note(folder: Path, note: Path) -> None:
    runs = {
        policy: json.loads((folder / f"{policy.replace(' ', '-')}.json").read_text())
        for policy in POLICIES
    }
    plot = note.with_suffix(".svg")
    _plot(runs, plot)
    lines = [
        *_head(),
        *_rates(runs),
        "",
        f"![samples per second over time]({plot.name})",
        "",
        *_recovery(runs),
    ]
    lines += [*_beliefs(runs), *_decisions(runs)]
    note.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _head() -> list[str]:
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores"
    )
    low = ", ".join(
        f"{rate:g} Mbit/s from {begin:g} to {end:g} s" for begin, end, rate in PREEMPTED
    )
    return [
        "# Adapting in the lab",
        "",
        f"{time.strftime('%Y-%m-%d')}, {versions}. One job of {SECONDS:g} s on three hosts with {RATE:g} Mbit/s each:",
        "real processes, real traffic over shaped links, emulated compute. Host c's link is preempted to",
        f"{low}; host b runs at half speed from {SLOWED[0]:g} to {SLOWED[1]:g} s.",
        "All but the best static plan and the oracle begin with a third of the layers on each host and 1F1B. The best",
        "static plan is the one with which the simulator does most over the whole trace, future known; the oracle",
        "changes at the beginning of a stretch to the plan with which, by the simulator, most is done in the end.",
        "",
        "The five ran side by side, each in a lab of its own. Repeat as root with",
        "`python -m benchmarks.lab.adaptive all FOLDER`, then `python -m benchmarks.lab.adaptive note FOLDER NOTE.md`.",
        "",
    ]


def _rates(runs: dict[str, Any]) -> list[str]:
    lows = [
        (name, *low[:2])
        for name, low in zip(("preempted", "again", "and again"), PREEMPTED, strict=True)
    ]
    stretches = [
        ("calm and preempted", 0.0, SLOWED[0]),
        *lows,
        ("host slowed", *SLOWED[:2]),
        ("all", 0.0, SECONDS),
    ]
    heads = " | ".join(f"{name}, {begin:g}-{end:g} s" for name, begin, end in stretches)
    rows = [
        "## Samples per second",
        "",
        f"| policy | {heads} |",
        "| --- |" + " --- |" * len(stretches),
    ]
    still = [rate_between(runs["static 1F1B"], begin, end) for _, begin, end in stretches]
    for policy, run in runs.items():
        rates = [rate_between(run, begin, end) for _, begin, end in stretches]
        cells = " | ".join(
            f"{rate:.1f} ({rate / base:.2f}x)" for rate, base in zip(rates, still, strict=True)
        )
        rows.append(f"| {policy} | {cells} |")
    return rows


def _recovery(runs: dict[str, Any]) -> list[str]:
    rows = ["## Steps after a change until a step runs at 90 % of the oracle's rate", ""]
    rows += ["| policy | " + " | ".join(f"{moment:g} s" for moment in moments()[1:]) + " |"]
    rows += ["| --- |" + " --- |" * (len(moments()) - 1)]
    for policy in POLICIES[:-1]:
        found = [
            steps_to_recover(runs[policy], runs["oracle replayed"], begin, end)
            for begin, end in pairwise([*moments()[1:], SECONDS])
        ]
        rows.append(
            f"| {policy} | "
            + " | ".join("never" if one is None else str(one) for one in found)
            + " |"
        )
    return [*rows, ""]


def _beliefs(runs: dict[str, Any]) -> list[str]:
    rows = [
        "## Steps after a change until the belief is within 15 % of the shaped rate or speed",
        "",
    ]
    rows += [
        "| policy | change | truth | steps | belief at the end of the stretch |",
        "| --- | --- | --- | --- | --- |",
    ]
    where = cluster()
    trace = next(link.bandwidth for link in where.links if link.edge == LINK)
    speed = where.device(HOST).speed
    for policy in ("adaptive k", "full adaptation"):
        for begin, end in pairwise([*moments()[1:], SECONDS]):
            is_link = trace.at(begin) != trace.at(begin - 1)
            truth = trace.at(begin) if is_link else speed.at(begin)
            what = f"{LINK}.in" if is_link else HOST
            found = steps_to_believe(runs[policy], what, begin, end, truth)
            last = [
                step["believed"][what]
                for step in runs[policy]["steps"]
                if begin <= step["start"] < end
            ][-1]
            unit, scale = (" Mbit/s", 8e-6) if is_link else ("", 1.0)
            steps = "never" if found is None else str(found)
            cells = f"{begin:g} s, {what} | {truth * scale:.3g}{unit} | {steps} | {last * scale:.3g}{unit}"
            rows.append(f"| {policy} | {cells} |")
    return [*rows, ""]


def _decisions(runs: dict[str, Any]) -> list[str]:
    rows = ["## Decisions", "", "| policy | at | what | predicted | measured | moved | why |"]
    rows += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for policy in ("adaptive k", "full adaptation"):
        outcomes = {
            event["step"]: event for event in runs[policy]["events"] if event["event"] == "outcome"
        }
        for event in runs[policy]["events"]:
            if event["event"] != "decision":
                continue
            outcome = outcomes.get(event["step"])
            measured = (
                f"{outcome['measured_before']:.2f} -> {outcome['measured_after']:.2f} s"
                if outcome
                else "-"
            )
            moved = "-"
            if "moved_bytes" in event:
                predicted, took = event["predicted_moving"], event["moved_seconds"]
                moved = f"{event['moved_bytes'] / 1e6:.1f} MB, predicted {predicted:.2f} s, took {took:.2f} s"
            layers = "/".join(
                str(stage["layers"][1] - stage["layers"][0]) for stage in event["stages"]
            )
            spec = event["schedule"]
            text = f"{event['what']}: {spec['kind']} k={spec.get('k', 1)}, layers {layers}"
            seconds = f"{event['predicted_before']:.2f} -> {event['predicted_after']:.2f} s"
            cells = (policy, f"{event['time']:.0f} s", text, seconds, measured, moved, event["why"])
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def _plot(runs: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.5))
    for begin, end, _ in PREEMPTED:
        axes.axvspan(begin, end, color="tab:blue", alpha=0.08)
    axes.axvspan(*SLOWED[:2], color="tab:red", alpha=0.08)
    for policy, run in runs.items():
        times = [step["start"] + step["seconds"] / 2 for step in run["steps"]]
        rates = [run["global_batch"] / step["seconds"] for step in run["steps"]]
        style = "--" if policy in ("oracle replayed", "best static plan") else "-"
        axes.plot(times, rates, style, label=policy, linewidth=1.3)
    axes.set(
        xlabel="seconds; blue: link preempted, red: host at half speed",
        ylabel="samples/s",
        xlim=(0, SECONDS),
    )
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=3, loc="lower center")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["run", policy, folder] if policy in POLICIES:
            print(measure(policy, Path(folder)))
        case ["all", folder]:
            command = [sys.executable, "-m", "benchmarks.lab.adaptive", "run"]
            runs = [subprocess.Popen([*command, policy, folder]) for policy in POLICIES]
            return max(run.wait() for run in runs)
        case ["note", folder, note]:
            write_note(Path(folder), Path(note))
        case _:
            print(f"{__doc__}\nPOLICY is one of: {', '.join(POLICIES)}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
