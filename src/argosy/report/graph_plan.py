"""A captured program's plan for people: one program for all devices, or a pipeline of programs, and what was tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from argosy.cluster.topology import Cluster
from argosy.graph_planner import GraphPlan
from argosy.report.marks import names_in_short
from argosy.report.program import program_title, program_to_dict
from argosy.report.tables import plain_table
from argosy.solve.staging import Pipeline, StageProgram
from argosy.units import SIZE, TIME


def graph_plan_title(plan: GraphPlan, cluster: Cluster) -> str:
    """The winner, and in a sentence what it won against."""
    if not plan.is_pipeline:
        assert plan.program is not None
        beside = f"\nthe best pipeline would take {TIME.format(plan.pipeline.seconds)}" if plan.pipeline else ""
        title = program_title(plan.program, cluster)
        if plan.changed_seconds is not None:
            title += f"\nwhile the cluster changes it takes {TIME.format(plan.changed_seconds)}"
        return title + beside
    assert plan.pipeline is not None
    return pipeline_title(plan.pipeline, cluster, plan)


def pipeline_title(pipeline: Pipeline, cluster: Cluster, plan: GraphPlan) -> str:
    graph = pipeline.graph
    count = len({name for stage in pipeline.stages for name in stage.devices})
    one = "never ends" if math.isinf(plan.program_seconds) else f"would take {TIME.format(plan.program_seconds)}"
    one = "does not fit" if plan.program is None else one
    lines = [
        f"{graph.name} ({graph.num_parameters():,} parameters, {len(graph.nodes):,} operations) in "
        f"{len(pipeline.stages)} stages on {count} devices of {cluster.name}",
        f"step {TIME.format(pipeline.seconds)}: {pipeline.micro_batches} micro-batches, {pipeline.schedule!r}; "
        f"one program for all devices {one}",
    ]
    skips = [graph.values[value].name for value in pipeline.parts.forwarded]
    if skips:
        lines.append(f"passed on by stages that do not read them: {', '.join(skips)}")
    shared = [graph.values[value].name for value, _ in pipeline.parts.shared]
    if shared:
        lines.append(f"held by several stages, gradients summed: {', '.join(shared)}")
    return "\n".join(lines)


def pipeline_table(pipeline: Pipeline, cluster: Cluster) -> Table:
    """A stage per line; bytes are of one micro-batch, to the next stage and back."""
    right = ("forward", "backward", "sums", "on / back", "memory")
    table = plain_table("stage", "devices", "shares", *right, right=right)
    for number, stage in enumerate(pipeline.stages):
        kinds = sorted({cluster.device(name).kind.name for name in stage.devices})
        sent = [pipeline.parts.up_bytes[number]] if number < len(pipeline.stages) - 1 else [0.0]
        sent.append(pipeline.parts.down_bytes[number - 1] if number else 0.0)
        table.add_row(
            str(number),
            f"{names_in_short(stage.devices)}, {', '.join(kinds)}",
            _in_short(stage.program.ratios),
            *(TIME.format(s, digits=3) for s in (stage.forward_seconds, stage.backward_seconds, stage.sync_seconds)),
            " / ".join(SIZE.format(size, digits=2) if size else "-" for size in sent),
            SIZE.format(max(stage.program.device_bytes), digits=3),
        )
    return table


def _in_short(ratios: Sequence[float]) -> str:
    """Equal neighbours together: ``2 x 35 %, 2 x 15 %``."""
    shown = [(share, len(list(alike))) for share, alike in groupby(f"{100 * ratio:.3g} %" for ratio in ratios)]
    return ", ".join(share if count == 1 else f"{count} x {share}" for share, count in shown)


def attempt_table(plan: GraphPlan, *, most: int = 6) -> Table:
    """What else was looked at."""
    table = plain_table("devices per stage", "micro-batches", "step", right=("micro-batches", "step"))
    for attempt in sorted(plan.attempts, key=lambda one: one.seconds)[:most]:
        seconds = TIME.format(attempt.seconds) if math.isfinite(attempt.seconds) else "does not fit"
        table.add_row(" | ".join(map(str, attempt.runs)), str(attempt.micro_batches), seconds)
    return table


def graph_plan_to_dict(plan: GraphPlan) -> dict[str, Any]:
    """What ``--json`` prints."""
    warnings = [without_rule(op) for op in plan.unknown]
    found: dict[str, Any] = {"step_seconds": plan.seconds, "warnings": warnings}
    found["program"] = _program_to_dict(plan) if plan.program is not None else None
    found["pipeline"] = _pipeline_to_dict(plan.pipeline) if plan.pipeline is not None else None
    found["chosen"] = "pipeline" if plan.is_pipeline else "program"
    found["tried"] = [
        {
            "devices": list(attempt.runs),
            "micro_batches": attempt.micro_batches,
            "step_seconds": attempt.seconds if math.isfinite(attempt.seconds) else None,
        }
        for attempt in plan.attempts
    ]
    return found


def _program_to_dict(plan: GraphPlan) -> dict[str, Any]:
    """A step takes what it takes while the cluster changes."""
    assert plan.program is not None
    seconds = plan.program_seconds
    return {**program_to_dict(plan.program), "step_seconds": seconds if math.isfinite(seconds) else None}


def without_rule(op: str) -> str:
    """The warning for an operation that the rules do not know."""
    return f"no rule knows {op}: every device does it in full"


def _pipeline_to_dict(pipeline: Pipeline) -> dict[str, Any]:
    graph = pipeline.graph
    return {
        "step_seconds": pipeline.seconds,
        "micro_batches": pipeline.micro_batches,
        "schedule": str(pipeline.schedule.kind),
        "stages": [_stage_to_dict(stage) for stage in pipeline.stages],
        "forward_bytes": list(pipeline.parts.up_bytes),
        "backward_bytes": list(pipeline.parts.down_bytes),
        "forwarded": [graph.values[value].name for value in pipeline.parts.forwarded],
        "shared_parameters": [graph.values[value].name for value, _ in pipeline.parts.shared],
    }


def _stage_to_dict(stage: StageProgram) -> dict[str, Any]:
    return {
        "forward_seconds": stage.forward_seconds,
        "backward_seconds": stage.backward_seconds,
        "sync_seconds": stage.sync_seconds,
        "program": program_to_dict(stage.program),
    }
