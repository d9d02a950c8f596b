"""Run ``argosy nbody plan``: assign parts of a box to devices, and predict the time of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.command import takes_options
from argosy.cli.inputs import with_traces
from argosy.cli.options import Json, MeshCells, Quiet, TargetCluster, Traces, Width
from argosy.cli.terminal import check_output, print_json, progress, stdout_console, write_file
from argosy.cluster.file import load_cluster
from argosy.document import JsonObject
from argosy.errors import bad_input
from argosy.units import TIME

if TYPE_CHECKING:
    from rich.console import Console

    from argosy.nbody.planning.plan import PricedDomains, StepPlan
    from argosy.nbody.planning.play import PlayedRun


@dataclass(frozen=True, kw_only=True)
class GravityPlanOptions:
    """The options that ``argosy nbody plan`` takes."""

    cluster: TargetCluster
    particles: Annotated[
        str, typer.Option("--particles", "-n", help="How many: 512^3, or a number.")
    ] = "512^3"
    mesh: MeshCells = None
    trace: Traces = None
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="How many to play under the cluster's changes.")
    ] = 20
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of the clustering that is assumed.")
    ] = 1
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the plan here, for argosy simulate; - is stdout."
        ),
    ] = None
    json: Json = False
    width: Width = None
    quiet: Quiet = False


@takes_options
def plan(options: GravityPlanOptions) -> None:
    """Price, choose and simulate a step of gravity on a cluster.

    Shows which device gets which share of the particles and of the mesh, and compares the step with
    equal counts and with counts by speed; then simulates steps under the cluster's changes, with
    and without re-balancing.

    \b
    Example:
        argosy nbody plan --cluster mixed-16 --particles 512^3 -o gravity.json
    """
    from argosy.nbody.planning.plan import plan_step
    from argosy.nbody.planning.plan_file import dumps_gravity_plan
    from argosy.nbody.planning.play import play_run
    from argosy.nbody.planning.pricing import typical_box

    if options.output is not None:
        check_output(options.output, options.cluster, json=options.json)
    where = load_cluster(options.cluster)
    where = with_traces(where, options.trace) if options.trace else where
    box = typical_box(parse_count(options.particles), mesh_cells=options.mesh, seed=options.seed)
    with progress(f"planning {box.particles} particles on {where!r}", quiet=options.quiet):
        planned = plan_step(where, box)
        choices = (*planned.others, planned.best)
        played = [
            (choice, play_run(where, box, choice.domains, options.steps, rebalance=False))
            for choice in choices
        ]
        balanced = play_run(where, box, planned.best.domains, options.steps, rebalance=True)
        played.append((planned.best, balanced))
    if options.output is not None:
        write_file(options.output, dumps_gravity_plan(planned, options.seed).encode())
    if options.json:
        print_json("nbody plan", _content(planned, played))
        return
    _show(stdout_console(options.width, beside=options.output), planned, played, options.steps)


def parse_count(text: str, where: str = "--particles") -> int:
    """Parse a number of particles, such as ``512^3``, ``1000000`` or ``1e9``."""
    base, caret, power = text.partition("^")
    try:
        # The power of a float overflows; that of a large whole number would fill the memory.
        value = round(float(int(base)) ** int(power)) if caret else int(float(text))
    except (ValueError, ArithmeticError):
        raise bad_input("a number such as 512^3 or 1e9", text, where) from None
    if not 1000 <= value <= 10**14:
        raise bad_input("1e3 to 1e14 particles", text, where)
    return value


# Priced domains with their simulated runs.
Played = list[tuple["PricedDomains", "PlayedRun"]]


def _names(played: Played) -> list[str]:
    """Return the names of the runs; the last one is re-balanced."""
    return [choice.domains.name for choice, _ in played[:-1]] + [
        f"{played[-1][0].domains.name}, re-balanced"
    ]


def _content(planned: StepPlan, played: Played) -> JsonObject:
    """Return the plan and the simulated runs as a dict for JSON."""
    box = planned.box

    def row(choice: PricedDomains) -> JsonObject:
        """Return one choice of domains as a dict for JSON."""
        starts = (0, *choice.domains.ends[:-1])
        counts = [
            (end - start) * box.per_item
            for start, end in zip(starts, choice.domains.ends, strict=True)
        ]
        return {
            "name": choice.domains.name,
            "step_seconds": choice.step_seconds if math.isfinite(choice.step_seconds) else None,
            "slowest_over_ideal": choice.balance,
            "devices": [
                {
                    "device": device.name,
                    "particles": counts[i],
                    "planes": choice.domains.planes[i],
                    "tree_seconds": choice.tree_seconds[i],
                    "pair_seconds": choice.pair_seconds[i],
                    "mesh_seconds": choice.mesh_seconds[i],
                    "memory_bytes": choice.memory[i],
                    "fits": choice.fits[i],
                }
                for i, device in enumerate(planned.cluster.devices)
            ],
        }

    runs = [
        {"name": name, "step_ends": run.ends, "moves": run.moves, "stalled": run.stalled}
        for name, (_, run) in zip(_names(played), played, strict=True)
    ]
    return {
        "cluster": planned.cluster.identity,
        "particles": box.particles,
        "mesh_cells": box.mesh_cells,
        "plan": row(planned.best),
        "compared": [row(choice_made) for choice_made in planned.others],
        "played": runs,
    }


def _show(console: Console, planned: StepPlan, played: Played, steps: int) -> None:
    """Print the plan and the simulated runs."""
    from argosy.report.gravity import domain_table
    from argosy.report.tables import plain_table

    box, best = planned.box, planned.best
    holders = sum(planes > 0 for planes in best.domains.planes)
    devices = len(planned.cluster.devices)
    mesh = (
        f"a mesh of {box.mesh_cells}^3 cells on {holders} of {devices} devices of "
        f"{planned.cluster.name}"
    )
    console.print(
        f"{box.particles:.3g} particles, {mesh}: {TIME.format(best.step_seconds)} a step\n"
    )
    console.print(domain_table(planned.cluster, box, best))
    console.print()
    table = plain_table("cut", ">step", ">slowest / ideal", f">{steps} steps played", ">moves")
    for name, (choice, run) in zip(_names(played), played, strict=True):
        total = f"stalled after {len(run.ends)}" if run.stalled else TIME.format(run.ends[-1])
        note = "" if all(choice.fits) else "  (does not fit)"
        step = TIME.format(choice.step_seconds)
        table.add_row(name + note, step, f"{choice.balance:.3f}", total, str(run.moves))
    console.print(table)
