"""Write the page of an island plan: its islands, their exchanges, and the effect on training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from argosy.cluster.lasting import at_time_zero, from_moment
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.explain.islands import island_what_ifs
from argosy.explain.memory import planned_stack
from argosy.plan.islands import IslandPlan
from argosy.plan.plan import LeftOut, Plan
from argosy.report.explain import gain_in_percent
from argosy.report.islands import exchange_in_words, island_title, what_changes
from argosy.report.marks import percent
from argosy.report.page.page import IslandParts, PageContent, Picture, report_page
from argosy.report.plan import OPTIMAL, devices_in_short, gap_in_words, throughput
from argosy.sim.island_window import IslandWindow
from argosy.sim.islands import IslandCourse, play_islands
from argosy.sim.simulate import MOST_WHOLE
from argosy.units import SIZE, TIME, counted
from argosy.workload.chain import Chain

_MOST_DRAWN = 16 * MOST_WHOLE
"""The largest number of devices x micro-batches x steps that is simulated for a picture."""
# The largest number of rows in the table of exchanges.
_MOST_EXCHANGES = 40


@dataclass(frozen=True, kw_only=True)
class IslandReport:
    """A report that shows an island plan."""

    plan: IslandPlan
    chain: Chain
    cluster: Cluster
    model: ComputeModel = field(default_factory=ComputeModel)

    @cached_property
    def html(self) -> str:
        """Return the text of the page."""
        plan = self.plan
        window = IslandWindow.around_exchange(plan)
        work = (
            sum(len(island.devices) * island.num_micro_batches for island in plan.islands)
            * window.end
        )
        is_drawn = work <= _MOST_DRAWN
        course = play_islands(
            plan,
            self.chain,
            self.cluster,
            self.model,
            steps=4 * plan.sync_every,
            window=window if is_drawn else None,
        )
        label = (
            f"predicted, steps {window.first} to {window.end - 1}, with the exchange after step "
            f"{plan.period}"
        )
        timeline = window.timeline(plan, self.cluster)
        pictures = [Picture(label=label, timeline=timeline)] if timeline.spans else []
        memory = [
            row
            for island in plan.islands
            for row in planned_stack(island, self.chain, self.cluster)
        ]
        parts = IslandParts(
            title=island_title(plan),
            facts=_facts(plan, course, self.cluster),
            changes=what_changes(plan),
            rows=_rows(plan, course, self.cluster),
            exchanges=_exchanges(course),
            what_ifs=self._what_ifs(),
        )
        shown = from_moment(self.cluster, window.start)  # links as they are during the picture
        return report_page(
            _together(plan, self.cluster),
            shown,
            pictures,
            PageContent(memory=memory, islands=parts),
        )

    def _what_ifs(self) -> list[tuple[str, str, str, str]]:
        """Return changes with the time of a step and the gain, on the cluster as it is at time
        0."""
        rows = island_what_ifs(self.plan, self.chain, at_time_zero(self.cluster), self.model)
        now = rows[0][1]
        return [
            (name, TIME.format(seconds), gain_in_percent(1 - seconds / now), "")
            for name, seconds in rows[1:]
            if math.isfinite(seconds)
        ]


def _together(plan: IslandPlan, cluster: Cluster) -> Plan:
    """Return all islands as one list of stages, from which the page shows stages and devices."""
    stages = tuple(stage for island in plan.islands for stage in island.stages)
    used = {name for island in plan.islands for name in island.devices}
    idle = cluster.names_without(used)
    left_out = tuple(LeftOut(device=name, reason="it is in no island") for name in idle)
    whole = replace(
        plan.islands[0].bare, stages=stages, global_batch=plan.global_batch, left_out=left_out
    )
    return replace(whole, certificate=plan.certificate)


def _facts(plan: IslandPlan, course: IslandCourse, cluster: Cluster) -> list[tuple[str, str, str]]:
    """Return (figure, unit or context, name) of the main figures."""
    facts: list[tuple[str, str, str]] = []
    if course.stalled is not None:
        facts.append(("stalled", course.stalled, f"after {counted(course.steps, 'step')}"))
    if course.steps:
        facts.append((TIME.format(course.step_seconds), "predicted, exchanges included", "step"))
        rate = throughput(course.samples_per_second, 1)
        facts.append((rate, f"batch {plan.global_batch} over all islands", "throughput"))
    predicted = plan.predicted
    if predicted is not None:
        facts.append((TIME.format(predicted.exchange_seconds), exchange_in_words(plan), "exchange"))
        if predicted.synchronous_seconds is not None:
            factor = f"{predicted.synchronous_seconds / predicted.step_seconds:.2f} times as long"
            facts.append(
                (TIME.format(predicted.synchronous_seconds), factor, "best synchronous plan")
            )
        facts.append(
            (SIZE.short(predicted.outer_bytes), "of host memory on each island", "outer state")
        )
    if plan.certificate is not None:
        bound = f"bound {TIME.format(plan.certificate.lower_bound_seconds)}, for this algorithm"
        name = "proven" if plan.certificate.gap < OPTIMAL else "proven gap at most"
        facts.append((gap_in_words(plan.certificate.gap), bound, name))
    used = sum(len(island.devices) for island in plan.islands)
    facts.append((f"{used} of {len(cluster.devices)}", cluster.name, "devices in use"))
    return facts


def _rows(plan: IslandPlan, course: IslandCourse, cluster: Cluster) -> list[tuple[str, ...]]:
    """Return the cells of a row for each island."""
    rows: list[tuple[str, ...]] = []
    first = 0
    for at, island in enumerate(plan.islands):
        last = first + len(island.stages) - 1
        seconds = (
            "-" if island.predicted is None else TIME.format(island.predicted.iteration_seconds)
        )
        waited = percent(course.waited[at] / course.end) if course.end else "-"
        stages = str(first) if first == last else f"{first}..{last}"
        devices = devices_in_short(island.devices, cluster)
        rows.append((str(at), devices, stages, str(island.global_batch), seconds, waited))
        first = last + 1
    return rows


def _exchanges(course: IslandCourse) -> list[tuple[str, str, str, str]]:
    """Return (step, islands, begin, duration) of every exchange."""
    rows = []
    for exchange in course.exchanges[:_MOST_EXCHANGES]:
        islands = ", ".join(map(str, exchange.islands))
        lost = (
            f", after {TIME.format(exchange.lost_seconds)} for those lost"
            if exchange.lost_seconds
            else ""
        )
        rows.append(
            (
                str(exchange.step),
                islands,
                TIME.format(exchange.begin),
                f"{TIME.format(exchange.end - exchange.begin)}{lost}",
            )
        )
    return rows
