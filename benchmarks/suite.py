"""Every benchmark there is: those measured here, and those that are commands of their own; where
each is written up.

``python -m benchmarks --list`` prints this table; a test holds it against the notes and the
modules.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import (
    captured,
    compare,
    dapple,
    earlier_programs,
    fine_tuning,
    fit_compute,
    gravity,
    gravity_errors,
    growth,
    imports,
    judging,
    kept,
    measured,
    planning,
    programs,
    ratios,
    reality,
    replanning,
    runtime_overhead,
    scale,
    scenarios,
    selection,
    simulator,
    spmd,
    two_sites,
)
from benchmarks.registry import Benchmark

NOTES = "benchmarks/results"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A benchmark of the suite."""

    name: str
    shows: str
    note: str
    """Its dated page in ``NOTES``."""
    command: str
    needs: str = ""
    """Beyond this repository and its extra ``bench``."""
    benchmark: Benchmark | None = None
    """None: only the command runs it."""


def _here(benchmark: Benchmark, note: str) -> Entry:
    command = f"python -m benchmarks {benchmark.name}"
    return Entry(
        name=benchmark.name, shows=benchmark.shows, note=note, command=command, benchmark=benchmark
    )


SUITE = (
    _here(ratios.BENCHMARK, "2026-11-15-ratios.md"),
    _here(simulator.BENCHMARK, "2026-11-15-simulator.md"),
    _here(growth.BENCHMARK, "2026-11-15-ratios.md"),
    _here(planning.BENCHMARK, "2026-11-18-planning.md"),
    _here(two_sites.BENCHMARK, "2026-11-18-planning.md"),
    _here(judging.BENCHMARK, "2026-11-16-judging.md"),
    _here(scale.BENCHMARK, "2026-11-15-scale.md"),
    _here(imports.BENCHMARK, "2026-11-15-simulator.md"),
    _here(compare.BENCHMARK, "2026-11-18-compare.md"),
    _here(dapple.BENCHMARK, "2026-11-18-compare.md"),
    _here(fit_compute.BENCHMARK, "2026-11-15-h200-layers.md"),
    _here(measured.BENCHMARK, "2026-11-16-measured.md"),
    _here(reality.BENCHMARK, "2026-11-15-reality.md"),
    _here(selection.BENCHMARK, "2026-11-16-selection.md"),
    _here(kept.BENCHMARK, "2026-11-15-scenarios.md"),
    _here(scenarios.BENCHMARK, "2026-11-15-scenarios.md"),
    _here(replanning.BENCHMARK, "2026-11-15-scenarios.md"),
    _here(spmd.BENCHMARK, "2026-11-15-spmd.md"),
    _here(captured.BENCHMARK, "2026-11-18-captured.md"),
    _here(programs.BENCHMARK, "2026-11-18-captured.md"),
    _here(earlier_programs.BENCHMARK, "2026-11-18-captured.md"),
    _here(runtime_overhead.BENCHMARK, "2026-11-15-runtime.md"),
    _here(fine_tuning.BENCHMARK, "2026-11-18-fine-tuning.md"),
    _here(gravity.BENCHMARK, "2026-11-15-gravity.md"),
    _here(gravity_errors.BENCHMARK, "2026-11-16-gravity.md"),
    Entry(
        name="adaptation",
        shows="policies against traces, in the simulator",
        note="2026-11-16-adaptation.md",
        command="python -m benchmarks.adaptation",
    ),
    Entry(
        name="h200",
        shows="the cost model against layers that were measured on an H200",
        note="2026-11-15-h200-profile.md",
        command="python -m benchmarks.h200",
    ),
    Entry(
        name="readability",
        shows="how dense the source reads, beside other packages",
        note="2026-11-18-readability.md",
        command="python -m benchmarks.readability src/argosy",
    ),
    Entry(
        name="lab",
        shows="plans on real processes over shaped links, predicted and measured",
        note="2026-11-15-lab.md",
        command="python -m benchmarks.lab",
        needs="root",
    ),
    Entry(
        name="adaptive",
        shows="a job in the lab whose link is preempted and whose host is slowed, by policy",
        note="2026-11-15-adaptive.md",
        command="python -m benchmarks.lab.adaptive",
        needs="root",
    ),
    Entry(
        name="lab-programs",
        shows="captured programs in the lab, by the plan that is found and by the planner before",
        note="2026-11-18-captured.md",
        command="python -m benchmarks.lab.programs",
        needs="root",
    ),
    Entry(
        name="context",
        shows="one sequence on two unequal devices in the lab, whole and in parts by speed",
        note="2026-11-16-context.md",
        command="python -m benchmarks.lab.context",
        needs="root",
    ),
    Entry(
        name="islands",
        shows="synchronous and island plans on two and three sites, in the simulator",
        note="2026-11-16-islands.md",
        command="python -m benchmarks.islands_table",
    ),
    Entry(
        name="islands-loss",
        shows="what steps between exchanges do to the loss of a small GPT",
        note="2026-11-16-islands.md",
        command="python -m benchmarks.islands_loss",
    ),
    Entry(
        name="islands-lab",
        shows="two islands in the lab over a slow link that is preempted, against the best synchronous plan",
        note="2026-11-18-islands.md",
        command="python -m benchmarks.lab.islands",
        needs="root",
    ),
    Entry(
        name="islands-adapting",
        shows="two islands in the lab whose link changes, and the steps between exchanges that they choose",
        note="2026-11-16-islands.md",
        command="python -m benchmarks.lab.islands_adapting",
        needs="root",
    ),
    Entry(
        name="islands-text",
        shows="a small GPT trained on text by two islands in the lab",
        note="2026-11-16-islands.md",
        command="python -m benchmarks.lab.islands_text",
        needs="root",
    ),
    Entry(
        name="fuzz",
        shows="every reader and command against changed inputs",
        note="2026-11-15-fuzz.md",
        command="make fuzz",
    ),
    Entry(
        name="chaos",
        shows="elastic runs under seeded misfortunes",
        note="2026-11-15-chaos.md",
        command="pytest -m exhaustive tests/runtime/test_chaos.py",
    ),
    Entry(
        name="faults",
        shows="62 schedules of faults that elastic runs survive, and their memory and open files",
        note="2026-11-16-faults.md",
        command="python -m benchmarks.faults",
        needs="root for cut links",
    ),
    Entry(
        name="soak",
        shows="one long elastic run under faults: its memory, its open files, its losses",
        note="2026-11-16-soak.md",
        command="python -m benchmarks.faults --soak 15",
        needs="root for cut links",
    ),
    Entry(
        name="faults-of-groups",
        shows="faults with tensor-parallel groups, and two hours of soaks",
        note="2026-11-18-faults.md",
        command="python -m benchmarks.faults --first 62 --last 73",
        needs="root for cut links",
    ),
    Entry(
        name="gpu-lab",
        shows="found plans and plain ones on a GPU that is shared unequally",
        note="2026-11-18-h200.md",
        command="python benchmarks/gpu_lab.py",
        needs="a GPU with MPS",
    ),
    Entry(
        name="gpu-runtime",
        shows="the runtime on a GPU against one process",
        note="2026-11-15-h200-plans.md",
        command="python -m benchmarks.gpu_runtime",
        needs="a GPU",
    ),
    Entry(
        name="gpu-compile",
        shows="eager and compiled stages against plain loops on a GPU",
        note="2026-11-18-h200.md",
        command="python -m benchmarks.gpu_compile --micro-batch 16",
        needs="a GPU",
    ),
    Entry(
        name="gpu-offload",
        shows="peaks and steps of fine-tuning and of offload on a GPU, predicted and measured",
        note="2026-11-18-h200.md",
        command="python -m benchmarks.gpu_offload --layers 8",
        needs="a GPU",
    ),
    Entry(
        name="gpu-gravity",
        shows="gravity on a GPU",
        note="2026-11-16-gravity.md",
        command="python benchmarks/gpu_gravity.py",
        needs="a GPU",
    ),
    Entry(
        name="gravity-processes",
        shows="CPU time of a force on several processes",
        note="2026-11-18-gravity.md",
        command="python -m benchmarks.gravity_processes --processes 2 4",
    ),
    Entry(
        name="gpu-profile",
        shows="layers of real models: seconds and bytes",
        note="2026-11-15-h200-profile.md",
        command="python benchmarks/gpu_profile.py --output profile.json",
        needs="a GPU",
    ),
    Entry(
        name="gpu-layers",
        shows="transformer blocks by width, sequence and micro-batch",
        note="2026-11-15-h200-layers.md",
        command="python benchmarks/gpu_layers.py",
        needs="a GPU",
    ),
)
ENTRIES = {entry.name: entry for entry in SUITE}
