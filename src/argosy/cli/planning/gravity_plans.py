"""Handle gravity plans in ``argosy simulate``, ``explain``, ``report`` and ``compare -m
gravity:N``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from argosy.cli.inputs import MOST_ITERATIONS, check_iterations, parse_time, too_long, with_traces
from argosy.cli.terminal import print_json, progress, stdout_console, write_file
from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.document import Document, JsonObject
from argosy.errors import bad_input
from argosy.units import TIME

if TYPE_CHECKING:
    from rich.table import Table

    from argosy.cli.planning.compare import CompareOptions
    from argosy.cli.planning.explain import ExplainOptions
    from argosy.cli.planning.report import ReportOptions
    from argosy.cli.planning.simulate import SimulateOptions
    from argosy.nbody.planning.plan import PricedDomains, StepPlan
    from argosy.nbody.planning.plan_file import GravityPlan
    from argosy.nbody.planning.play import PlayedRun
    from argosy.timeline import Timeline

PREFIX = "gravity:"
"""The prefix of a box that is given instead of a model: gravity:512^3."""
# The number of steps that are simulated to compare plans.
_STEPS = 20


def simulate_gravity(document: Document, options: SimulateOptions) -> None:
    """Simulate a gravity plan step by step, with ``--adapt`` also re-balanced."""
    from argosy.cli.planning.adapting import check_reach
    from argosy.cli.planning.simulate import MOST_RECORDED
    from argosy.nbody.planning.play import step_timeline
    from argosy.timeline.file import dumps_timeline

    check_reach(options.adapt or "off")
    plan, where = _plan_on(document, options)
    runs = _played(plan, where, options)
    if options.output is not None:
        done = max(len(runs[0][1].ends), 1)
        timeline = step_timeline(where, plan.box, plan.plan, min(done, MOST_RECORDED))
        write_file(options.output, dumps_timeline(timeline).encode())
    if options.json:
        played = [_run(name, run) for name, run in runs]
        print_json("simulate", {**_names(plan, where), "runs": played})
        return
    console = stdout_console(options.width, beside=options.output)
    console.print(f"{plan.box.particles:.3g} particles on {where!r}\n", soft_wrap=True)
    console.print(_run_table(runs))


def _played(
    plan: GravityPlan, where: Cluster, options: SimulateOptions
) -> list[tuple[str, PlayedRun]]:
    """Simulate the planned domains and those that they are compared with; return runs by name."""
    from argosy.nbody.planning.play import play_run

    iterations, until = options.iterations, options.until
    steps = (
        (1 if until is None else MOST_ITERATIONS)
        if iterations is None
        else check_iterations(iterations)
    )
    end = parse_time("--until", until)
    variants = [(domains.name, domains, False) for domains in (plan.plan, *plan.compared)]
    if options.adapt not in (None, "off"):
        variants.insert(1, (f"{plan.plan.name}, re-balanced", plan.plan, True))
    title = f"simulating {plan.box.particles:.3g} particles on {where!r}"
    with progress(title, quiet=options.quiet):
        first = play_run(where, plan.box, plan.plan, 1, rebalance=False).ends
        # This is known without simulating them.
        if iterations is None and first and first[0] * MOST_ITERATIONS <= end < math.inf:
            raise too_long(until)
        runs = [
            (name, play_run(where, plan.box, domains, steps, rebalance=moves, until=end))
            for name, domains, moves in variants
        ]
    if iterations is None and any(len(run.ends) == MOST_ITERATIONS for _, run in runs):
        raise too_long(until)
    return runs


def _run_table(runs: Sequence[tuple[str, PlayedRun]]) -> Table:
    """Return a table with a row per simulated run."""
    from argosy.report.tables import plain_table

    table = plain_table("cut", ">steps", ">mean step", ">first", ">slowest", ">moves")
    for name, run in runs:
        step_seconds = _seconds(run)
        times = (
            (run.ends[-1] / len(step_seconds), step_seconds[0], max(step_seconds))
            if step_seconds
            else ()
        )
        shown = [TIME.format(value, digits=4) for value in times] or ["-"] * 3
        steps_done = f"stalled after {len(step_seconds)}" if run.stalled else str(len(step_seconds))
        table.add_row(name, steps_done, *shown, str(run.moves))
    return table


def explain_gravity(document: Document, options: ExplainOptions) -> None:
    """Explain why a step of a gravity plan takes so long, and what would help."""
    from argosy.nbody.planning.reasons import explain_step
    from argosy.report.gravity import domain_table, improvement_rows, reason_lines, reasons_to_dict
    from argosy.report.tables import plain_table

    plan, where = _plan_on(document, options)
    title = f"simulating {plan.box.particles:.3g} particles on {where!r}"
    with progress(title, quiet=options.quiet):
        reasons = explain_step(where, plan.box, plan.plan)
    if options.json:
        print_json("explain", {**_names(plan, where), **reasons_to_dict(reasons)})
        return
    console = stdout_console(options.width)
    step = TIME.format(reasons.priced.step_seconds)
    console.print(
        f"{plan.box.particles:.3g} particles on {where!r}: {step} a step\n", soft_wrap=True
    )
    console.print(domain_table(where, plan.box, reasons.priced))
    console.print()
    for line in reason_lines(reasons):
        console.print(line, soft_wrap=True)
    console.print()
    table = plain_table("change, cut again", ">step", ">saves")
    for row in improvement_rows(reasons):
        table.add_row(*row)
    console.print(table)


def report_gravity(
    document: Document, measured: Mapping[str, Timeline], options: ReportOptions
) -> int:
    """Write a gravity plan as one page; return its size in bytes."""
    from argosy.nbody.planning.plan import StepPrices
    from argosy.nbody.planning.reasons import explain_step
    from argosy.report.gravity import gravity_page

    plan, where = _plan_on(document, options)
    title = f"simulating {plan.box.particles:.3g} particles on {where!r}"
    with progress(title, quiet=options.quiet):
        reasons = explain_step(where, plan.box, plan.plan)
        compared = [
            (domains.name, StepPrices.of(where, plan.box, domains).priced(domains).step_seconds)
            for domains in (plan.plan, *plan.compared)
        ]
    page = gravity_page(where, plan.box, reasons, compared, list(measured.items())).encode()
    write_file(options.output, page)
    return len(page)


def _plan_on(
    document: Document, options: SimulateOptions | ExplainOptions | ReportOptions
) -> tuple[GravityPlan, Cluster]:
    """Return a gravity plan, and the cluster on which it is simulated."""
    from argosy.nbody.planning.plan_file import gravity_plan_from_document

    plan = gravity_plan_from_document(document)
    where = plan.cluster if options.cluster is None else load_cluster(options.cluster)
    if len(where.devices) != len(plan.cluster.devices):
        expected = f"a cluster of {len(plan.cluster.devices)} devices, as the plan was made for"
        raise bad_input(expected, f"{len(where.devices)} in {where.name}", "--cluster")
    return plan, with_traces(where, options.trace) if options.trace else where


def _names(plan: GravityPlan, where: Cluster) -> JsonObject:
    """Return the cluster and the particles, for a JSON document."""
    return {"cluster": where.identity, "particles": plan.box.particles, "workload": "gravity"}


def _seconds(run: PlayedRun) -> list[float]:
    """Return the seconds of every step."""
    return [end - start for start, end in zip((0.0, *run.ends), run.ends, strict=False)]


def _run(name: str, run: PlayedRun) -> JsonObject:
    """Return a simulated run as a dict for JSON."""
    return {"name": name, "step_seconds": _seconds(run), "moves": run.moves, "stalled": run.stalled}


def compare_gravity(box_name: str, cluster: Cluster, options: CompareOptions) -> None:
    """Compare the planned domains with equal counts and counts by speed, over several steps."""
    from argosy.cli.gravity.plan import parse_count
    from argosy.nbody.planning.plan import plan_step
    from argosy.nbody.planning.play import play_run
    from argosy.nbody.planning.pricing import typical_box
    from argosy.report.tables import plain_table

    box = typical_box(parse_count(box_name.removeprefix(PREFIX), "--model"))
    with progress(f"planning {box.particles:.3g} particles on {cluster!r}", quiet=options.quiet):
        planned = plan_step(cluster, box)
        ours = play_run(cluster, box, planned.best.domains, _STEPS, rebalance=True)
        others = [
            play_run(cluster, box, choice.domains, _STEPS, rebalance=False)
            for choice in planned.others
        ]
    rows = [_row("argosy", planned, planned.best, ours)]
    rows += [
        _row(choice.domains.name, planned, choice, run)
        for choice, run in zip(planned.others, others, strict=True)
    ]
    if options.json:
        names = {"model": box_name, "cluster": cluster.identity}
        print_json("compare", {**names, "workload": "gravity", "rows": rows})
        return
    console = stdout_console(options.width)
    console.print(f"{box.particles:.3g} particles on {cluster!r}\n", soft_wrap=True)
    table = plain_table("cut", ">step", ">of ours", ">particles/s", "why")
    for row in rows:
        if not row["feasible"]:
            table.add_row(row["name"], "-", "-", "-", row["reason"])
            continue
        factor = row["iteration_seconds"] / rows[0]["iteration_seconds"]
        seconds = TIME.format(row["iteration_seconds"], digits=4)
        table.add_row(
            row["name"], seconds, f"{factor:.2f}", f"{row['samples_per_second']:.3g}", row["reason"]
        )
    console.print(table)


def _row(name: str, planned: StepPlan, choice: PricedDomains, run: PlayedRun) -> JsonObject:
    """Return a row of ``argosy compare``; a sample is a particle."""
    seconds = run.ends[-1] / len(run.ends) if run.ends else math.inf
    feasible = all(choice.fits) and not run.stalled
    return {
        "name": name,
        "feasible": feasible,
        "iteration_seconds": seconds if feasible else None,
        "samples_per_second": planned.box.particles / seconds if feasible else None,
        "reason": _reason(planned, choice, run),
    }


def _reason(planned: StepPlan, choice: PricedDomains, run: PlayedRun) -> str:
    """Return in a few words what limits the speed of a choice of domains."""
    devices = planned.cluster.devices
    if not all(choice.fits):
        full = [device.name for device, fits in zip(devices, choice.fits, strict=True) if not fits]
        return f"does not fit into the memory of {full[0]}" + (
            f" and {len(full) - 1} more" if len(full) > 1 else ""
        )
    if run.stalled:
        return "never ends: a device or link it needs is lost"
    busy = choice.busy_seconds
    slowest = devices[busy.index(max(busy))]
    waits = 1 - max(busy) / choice.step_seconds
    text = f"{slowest.name} computes {choice.balance:.2f} times as long as if all shared by speed"
    return text + (
        f"; {100 * waits:.0f} % of the step it waits for the network" if waits > 0.05 else ""
    )
