"""Build the text of the page from a plan, its explanation and its timelines.

Static parts (figures, stages, tables, the picture of the cluster) are written by the template and
need no script; the viewer of timelines draws what ``tracks`` encodes. Every text from a file is
escaped, by the template or by the script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
from jinja2 import Environment

from argosy.cluster.topology import Cluster
from argosy.cost.uncertainty import relative_error
from argosy.document import JsonObject
from argosy.explain import DeviceMemory, Explanation
from argosy.plan.plan import Plan, Recompute, Stage
from argosy.report.decisions import Told
from argosy.report.explain import (
    MEMORY_PARTS,
    gain_in_percent,
    help_in_a_sentence,
    memory_in_a_sentence,
)
from argosy.report.page.against import predicted_and_measured
from argosy.report.page.curve import search_curve, spark_line
from argosy.report.page.tracks import KINDS, TICKS, timeline_tracks
from argosy.report.plan import (
    OPTIMAL,
    certificate_in_a_sentence,
    devices_in_short,
    gap_in_words,
    kinds_in_short,
    left_out,
    plan_title,
    samples_in_short,
    throughput,
)
from argosy.timeline import Timeline
from argosy.units import SIZE, TIME, counted

# The largest number of rows in the chart of memory.
_MOST_MEMORY_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A timeline that the page shows under a label: ``predicted, 1f1b`` or ``measured``."""

    label: str
    timeline: Timeline


@dataclass(frozen=True, kw_only=True)
class ScenarioTimes:
    """The iteration times in seconds that the plan has in one scenario."""

    name: str
    seconds: tuple[float, ...]
    """The seconds of each iteration in order."""

    @property
    def figures(self) -> tuple[float, float, float]:
        """Return the mean, the 95th percentile and the worst time in seconds."""
        times = np.array(self.seconds)
        p95 = float(np.quantile(times, 0.95)) if np.isfinite(times).all() else float(times.max())
        return float(times.mean()), p95, float(times.max())


@dataclass(frozen=True, kw_only=True)
class IslandParts:
    """The parts of the page that differ if it shows an island plan."""

    title: str
    facts: list[tuple[str, str, str]]
    changes: str
    """How training differs from synchronous training."""
    rows: list[tuple[str, ...]]
    """Island, devices, stages, samples, seconds of a step, share of the time that it waits."""
    exchanges: list[tuple[str, str, str, str]]
    """Step, islands, begin, duration."""
    what_ifs: list[tuple[str, str, str, str]]


@dataclass(frozen=True, kw_only=True)
class PageContent:
    """The content that the page of a plan shows besides the plan, its cluster and its
    timelines."""

    explanation: Explanation | None = None
    memory: Sequence[DeviceMemory] = ()
    """The memory of devices, which is shown if there is no explanation."""
    rivals: Sequence[tuple[str, float | None, str]] = ()
    """(planner, seconds or None, reason), including ours."""
    decided: Sequence[Told] = ()
    """The changes that a run made."""
    scenarios: Sequence[ScenarioTimes] = ()
    islands: IslandParts | None = None
    """The parts of an island plan, whose page shows the stages of all islands."""


def report_page(
    plan: Plan, cluster: Cluster, pictures: Sequence[Picture], content: PageContent | None = None
) -> str:
    """Return the text of the page."""
    folder = resources.files("argosy.report.page")
    parts = {
        name: (folder / name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css", "page.js")
    }
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        parts["page.html"]
    )
    tracks = [
        timeline_tracks(picture.label, picture.timeline, plan, cluster) for picture in pictures
    ]
    data = {"ticks": TICKS, "kinds": [str(kind) for kind in KINDS], "timelines": tracks}
    return template.render(
        style=parts["page.css"],
        script=parts["page.js"],
        data=_json(data),
        pictures=[picture.label for picture in pictures],
        **_plan_parts(plan, cluster, pictures),
        **_content_parts(plan, cluster, pictures, content or PageContent()),
    )


def _plan_parts(plan: Plan, cluster: Cluster, pictures: Sequence[Picture]) -> JsonObject:
    """Return the variables of the template that follow from the plan and its timelines."""
    timelines = [picture.timeline for picture in pictures]
    runner_ups = [
        (runner_up.description, TIME.format(runner_up.iteration_seconds), runner_up.reason)
        for runner_up in plan.runner_ups
    ]
    return {
        "nodes": _nodes(plan, cluster),
        "stages": [_stage(index, stage, cluster) for index, stage in enumerate(plan.stages)],
        "left_out": left_out(plan, cluster),
        "against": predicted_and_measured(plan, cluster, timelines),
        "runner_ups": runner_ups,
        "certificate": certificate_in_a_sentence(plan.certificate) if plan.certificate else None,
        "pruned": _pruned(plan),
        "curve": search_curve(plan.search.history) if plan.search else None,
    }


def _content_parts(
    plan: Plan, cluster: Cluster, pictures: Sequence[Picture], content: PageContent
) -> JsonObject:
    """Return the variables of the template that the content determines."""
    explanation, islands = content.explanation, content.islands
    advice: tuple[str, ...] = ()
    if explanation is not None:
        advice = (help_in_a_sentence(explanation), memory_in_a_sentence(explanation))
    memory = content.memory if explanation is None else explanation.memory
    return {
        "title": plan_title(plan) if islands is None else islands.title,
        "islands": islands,
        "facts": _facts(plan, cluster, pictures) if islands is None else islands.facts,
        "memory": _memory(memory, cluster),
        "what_ifs": _what_ifs(explanation) if islands is None else islands.what_ifs,
        "advice": advice,
        "rivals": _bars(content.rivals),
        "decided": content.decided,
        "scenarios": _scenarios(content.scenarios),
    }


def _json(data: JsonObject) -> str:
    """Encode data for a script element, so that nothing in it can end the element."""
    return json.dumps(data, separators=(",", ":"), sort_keys=True).replace("<", "\\u003c")


def _facts(plan: Plan, cluster: Cluster, pictures: Sequence[Picture]) -> list[tuple[str, str, str]]:
    """Return (figure, unit or context, name) of the main figures."""
    facts = []
    seconds = (
        plan.predicted.iteration_seconds if plan.predicted else pictures[0].timeline.usual_seconds
    )
    if seconds:
        within = f"predicted, {100 * relative_error(plan, cluster):.0f} % either way"
        facts.append((TIME.format(seconds), within, "iteration"))
        facts.append(
            (throughput(plan.global_batch / seconds, 1), f"batch {plan.global_batch}", "throughput")
        )
    for picture in pictures:
        if picture.timeline.clock == "measured" and (real := picture.timeline.usual_seconds):
            difference = f"{100 * (seconds / real - 1):+.1f} % predicted" if seconds else ""
            facts.append((TIME.format(real), difference, picture.label))
    if plan.certificate:
        bound = f"bound {TIME.format(plan.certificate.lower_bound_seconds)}"
        name = "proven" if plan.certificate.gap < OPTIMAL else "proven gap at most"
        facts.append((gap_in_words(plan.certificate.gap), bound, name))
    facts.append((f"{len(plan.devices)} of {len(cluster.devices)}", cluster.name, "devices in use"))
    if plan.predicted and plan.predicted.peak_memory_bytes:
        fullest = max(
            plan.predicted.peak_memory_bytes,
            key=lambda peak: peak[1] / cluster.device(peak[0]).kind.memory,
        )
        limit = SIZE.short(cluster.device(fullest[0]).kind.memory)
        facts.append((SIZE.short(fullest[1]), f"of {limit}, {fullest[0]}", "fullest device"))
    return facts


def _nodes(plan: Plan, cluster: Cluster) -> list[JsonObject]:
    """Return the picture of the cluster: devices by node with their stage and share.

    Equal neighbouring nodes of a large cluster are drawn once.
    """
    stage_of = {
        name: (index, number, replica.samples)
        for index, stage in enumerate(plan.stages)
        for number, replica in enumerate(stage.replicas)
        for name in replica.devices
    }
    reasons = {left.device: left.reason for left in plan.left_out}
    nodes: list[JsonObject] = []
    for node in cluster.nodes:
        devices = []
        for name in node.devices:
            stage, replica, samples = stage_of.get(name, (None, 0, 0))
            kind = cluster.device(name).kind.name
            used = (
                f"stage {stage}, replica {replica}, {counted(samples, 'sample')} of every "
                "micro-batch"
            )
            hint = f"{name} ({kind}): {reasons.get(name, 'not used') if stage is None else used}"
            devices.append({"name": name, "stage": stage, "hue": (stage or 0) % 8, "hint": hint})
        look = (
            tuple(device["stage"] for device in devices),
            cluster.device(node.devices[0]).kind.name,
        )
        if nodes and nodes[-1]["look"] == look and len(cluster.nodes) > 32:
            nodes[-1]["names"].append(node.name)
            continue
        kinds = ", ".join(dict.fromkeys(cluster.device(name).kind.name for name in node.devices))
        nodes.append({"names": [node.name], "kinds": kinds, "devices": devices, "look": look})
    return nodes


def _stage(index: int, stage: Stage, cluster: Cluster) -> dict[str, str | int]:
    """Return what the page shows of a stage."""
    widths = sorted({replica.width for replica in stage.replicas})
    extras = [f"recompute {stage.recompute}"] if stage.recompute is not Recompute.NONE else []
    extras += [f"ZeRO {stage.zero}"] if stage.zero else []
    extras += [f"offload {stage.offload}"] if stage.offload else []
    extras += [
        f"{name} {count}"
        for name, count in (("context", stage.context), ("expert", stage.expert))
        if count > 1
    ]
    return {
        "index": index,
        "hue": index % 8,
        "layers": f"{stage.first}..{stage.end - 1}",
        "count": stage.end - stage.first,
        "on": ", ".join(kinds_in_short(stage, cluster)),
        "devices": devices_in_short(stage.devices, cluster),
        "replicas": f"{len(stage.replicas)} x {'/'.join(map(str, widths))}",
        "samples": samples_in_short(stage.replicas),
        "extras": ", ".join(extras) or "-",
    }


def _memory(held: Iterable[DeviceMemory], cluster: Cluster) -> list[JsonObject]:
    """Return stacked bars, in percent of the device's memory for each part.

    Devices with equal bars share one.
    """
    by_parts: dict[tuple[tuple[float, ...], float], list[str]] = {}
    for memory in held:
        parts = tuple(float(f"{getattr(memory, part):.4g}") for part in MEMORY_PARTS)
        by_parts.setdefault((parts, memory.capacity), []).append(memory.device)
    rows = []
    for (parts, capacity), devices in list(by_parts.items())[:_MOST_MEMORY_ROWS]:
        peak = sum(parts)
        rows.append(
            {
                "device": devices_in_short(devices, cluster),
                "parts": [
                    (name, 100 * part / capacity, SIZE.short(part))
                    for name, part in zip(MEMORY_PARTS, parts, strict=True)
                ],
                "text": f"{SIZE.short(peak)} of {SIZE.short(capacity)}",
                "over": peak > capacity,
            }
        )
    return rows


def _what_ifs(explanation: Explanation | None) -> list[tuple[str, str, str, str]]:
    """Return (change, time, gain, missing memory) of the best changes."""
    if explanation is None:
        return []
    rows = sorted(
        (*explanation.improvements, *explanation.settings, *explanation.additions),
        key=lambda what_if: -what_if.gain,
    )
    return [
        (
            what_if.change,
            TIME.format(what_if.seconds),
            gain_in_percent(what_if.gain),
            f"{SIZE.short(what_if.missing)} too little memory" if what_if.missing else "",
        )
        for what_if in rows[:12]
    ]


def _bars(rivals: Sequence[tuple[str, float | None, str]]) -> list[JsonObject]:
    """Return the throughput of every planner relative to the fastest."""
    times = [seconds for _, seconds, _ in rivals if seconds]
    best = min(times, default=1.0)
    return [
        {
            "name": name,
            "percent": 100 * best / seconds if seconds else 0.0,
            "text": TIME.format(seconds) if seconds else "no plan",
            "reason": reason,
        }
        for name, seconds, reason in rivals
    ]


def _pruned(plan: Plan) -> list[tuple[str, str]]:
    """Return the effort of the search and what each pruning rule removed."""
    if plan.search is None:
        return []
    judged = [
        ("judged", f"{plan.search.candidates:,}"),
        ("CPU time", TIME.short(plan.search.cpu_seconds)),
    ]
    return [
        *judged,
        *((f"removed by {rule}", f"{count:,}") for rule, count in _largest(plan.search.pruned)),
    ]


def _scenarios(scenarios: Sequence[ScenarioTimes]) -> list[JsonObject]:
    """Return the figures of every scenario, and its iterations on one scale for all scenarios."""
    times = [
        seconds for scenario in scenarios for seconds in scenario.seconds if math.isfinite(seconds)
    ]
    top = max(times, default=1.0)
    return [
        {
            "name": scenario.name,
            "figures": [TIME.format(seconds) for seconds in scenario.figures],
            "line": spark_line(scenario.seconds, top),
            "count": len(scenario.seconds),
        }
        for scenario in scenarios
    ]


def _largest(counts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return counts above 0, the largest first."""
    return sorted(
        ((rule, count) for rule, count in counts if count),
        key=lambda rule_count: (-rule_count[1], rule_count[0]),
    )
