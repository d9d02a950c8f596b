"""Show island plans: the samples of each island, the cost of an exchange, and the effect on
training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.table import Table

from argosy.cluster.topology import Cluster
from argosy.document import JsonObject
from argosy.plan.islands import Compression, IslandPlan
from argosy.report.marks import percent
from argosy.report.plan import certificate_in_a_sentence, devices_in_short, throughput
from argosy.report.tables import named_lines, plain_table
from argosy.sim.islands import IslandCourse
from argosy.units import SIZE, TIME, counted


def island_title(plan: IslandPlan) -> str:
    """Return a title, as ``gpt2-xl on two-sites: DiLoCo with 2 islands, an exchange every 100
    steps``."""
    return f"{plan.model.name} on {plan.cluster.name}: {plan.algorithm}"


def island_table(plan: IslandPlan, cluster: Cluster) -> Table:
    """Return a table with a line per island."""
    table = plain_table(">island", "devices", ">samples", ">stages", "micro-batches", ">step")
    table.columns[1].no_wrap, table.columns[1].overflow = False, "fold"
    for at, island in enumerate(plan.islands):
        seconds = None if island.predicted is None else island.predicted.iteration_seconds
        table.add_row(
            str(at),
            devices_in_short(island.devices, cluster),
            str(island.global_batch),
            str(len(island.stages)),
            f"{island.num_micro_batches} of {island.micro_batch_size}",
            "-" if seconds is None else TIME.format(seconds),
        )
    return table


@named_lines
def island_figures(plan: IslandPlan, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Return the predicted figures of an island plan, one per line."""
    used = {name for island in plan.islands for name in island.devices}
    omitted = cluster.names_without(used)
    if omitted:
        names = devices_in_short(omitted, cluster)
        yield "left out", f"{names}: no plan with more devices was faster and fitted"
    predicted = plan.predicted
    if predicted is not None:
        yield "step", f"{TIME.format(predicted.step_seconds)} predicted, exchanges included"
        yield "throughput", throughput(predicted.samples_per_second, plan.model.sequence_length)
        yield "exchange", _exchange(plan)
        yield ("outer state", f"{SIZE.short(predicted.outer_bytes)} of host memory on each island")
        if predicted.synchronous_seconds is not None:
            yield (
                "synchronous",
                against_synchronous(predicted.synchronous_seconds, predicted.step_seconds),
            )
    yield "what changes", what_changes(plan)
    if plan.certificate is not None:
        yield "certificate", certificate_in_a_sentence(plan.certificate)


def exchange_in_words(plan: IslandPlan) -> str:
    """Describe the exchanges, as ``an island sends 5.8 GiB every 100 steps``."""
    assert plan.predicted is not None
    sent = SIZE.short(plan.predicted.exchange_bytes)
    return f"an island sends {sent} every {counted(plan.sync_every, 'step')}"


def _exchange(plan: IslandPlan) -> str:
    """Describe the time and the bytes of an exchange."""
    assert plan.predicted is not None
    seconds = TIME.format(plan.predicted.exchange_seconds)
    parts = f" for each of {plan.fragments} fragments" if plan.fragments > 1 else ""
    return f"{seconds}{parts}; {exchange_in_words(plan)}"


def against_synchronous(synchronous: float, seconds: float) -> str:
    """Compare a step with that of the best synchronous plan.

    >>> against_synchronous(1.9, 0.95)
    'the best synchronous plan takes 1.9 s, 2.00 times as long'
    """
    return (
        f"the best synchronous plan takes {TIME.format(synchronous)}, {synchronous / seconds:.2f} "
        "times as long"
    )


def what_changes(plan: IslandPlan) -> str:
    """Describe how training by the plan differs from synchronous training."""
    late = f"; results are used {counted(plan.overlap, 'step')} late" if plan.overlap else ""
    lossy = (
        ""
        if plan.compression is Compression.NONE
        else f"; differences are rounded to {plan.compression}"
    )
    interval = "after every step" if plan.sync_every == 1 else f"for {plan.sync_every} steps"
    apart = "islands average" if plan.sync_every == 1 else "islands train apart"
    return (
        f"{apart} {interval}, so losses differ from synchronous training{late}{lossy}; "
        "docs/islands.md has figures"
    )


@named_lines
def course_lines(
    plan: IslandPlan, course: IslandCourse, between: tuple[float, float] | None
) -> Iterator[tuple[str, str]]:
    """Return the figures of a simulation, one per line.

    ``between`` is the range of the seconds of a step if computing takes longer.
    """
    if course.stalled is not None:
        yield "STALLED", f"{counted(course.steps, 'step')} done: {course.stalled}"
    if not course.steps:
        return
    seconds = course.step_seconds
    yield "step", f"{TIME.format(seconds)} on average over {course.steps}, exchanges included"
    if between is not None:
        low, high = (
            TIME.format(seconds) if math.isfinite(seconds) else "never" for seconds in between
        )
        yield (
            "",
            (
                f"{low} to {high} if computing takes up to 10 % longer: exchanges then begin at "
                "other moments"
            ),
        )
    yield "throughput", throughput(course.samples_per_second, plan.model.sequence_length)
    alone = sum(len(exchange.islands) < len(plan.islands) for exchange in course.exchanges)
    if alone:
        yield (
            "lost",
            (
                f"{counted(alone, 'exchange')} without every island; what those left out trained "
                "does not count"
            ),
        )
    if course.exchanges:
        took = [exchange.end - exchange.begin for exchange in course.exchanges]
        best, worst = TIME.format(min(took)), TIME.format(max(took))
        yield "exchanges", f"{len(took)}, {best} at best, {worst} at worst"
    shares = ", ".join(percent(waited / course.end) for waited in course.waited)
    yield "waiting", f"{shares} of the time, by island"


def course_to_dict(
    plan: IslandPlan, course: IslandCourse, between: tuple[float, float] | None = None
) -> JsonObject:
    """Return a simulated course as a dict for JSON, in seconds and samples."""
    seconds = course.step_seconds if course.steps else None
    return {
        "steps": course.steps,
        "seconds": course.end,
        "step_seconds": seconds,
        "step_seconds_range": None if between is None or math.isinf(between[1]) else list(between),
        "samples": course.samples,
        "samples_per_second": None if seconds is None else course.samples_per_second,
        "exchanges": [
            {
                "step": exchange.step,
                "islands": exchange.islands,
                "arrived": exchange.arrived,
                "begin": exchange.begin,
                "end": exchange.end,
            }
            for exchange in course.exchanges
        ],
        "waited": course.waited,
        "stalled": course.stalled,
    }


def side_by_side(plans: Sequence[IslandPlan], synchronous: float) -> Table:
    """Return a table of the synchronous plan and island plans, with the effect of each on
    training."""
    table = plain_table("algorithm", ">step", ">x synchronous", "what changes")
    for column in (table.columns[0], table.columns[3]):
        column.no_wrap, column.ratio = False, 1
    table.add_row("synchronous", TIME.short(synchronous), "1.00", "nothing")
    for plan in plans:
        assert plan.predicted is not None
        seconds = plan.predicted.step_seconds
        factor = f"{seconds / synchronous:.2f}"
        table.add_row(plan.algorithm, TIME.short(seconds), factor, what_changes(plan))
    return table


def compared_to_dict(plans: Sequence[IslandPlan]) -> list[JsonObject]:
    """Return island plans as dicts for JSON, in seconds."""
    return [
        {
            "algorithm": plan.algorithm,
            "sync_every": plan.sync_every,
            "fragments": plan.fragments,
            "overlap": plan.overlap,
            "shares": [island.global_batch for island in plan.islands],
            "step_seconds": None if plan.predicted is None else plan.predicted.step_seconds,
            "synchronous_seconds": None
            if plan.predicted is None
            else plan.predicted.synchronous_seconds,
            "what_changes": what_changes(plan),
        }
        for plan in plans
    ]
