"""Describe how the tensor-parallel groups of a plan share the operations of their stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from argosy.cluster.file import cluster_from_content
from argosy.cost.group import device_group
from argosy.errors import invalid
from argosy.plan.group_program import GroupProgram
from argosy.plan.plan import Plan, Replica, Stage
from argosy.runtime.graphs.cut import GraphCut
from argosy.runtime.processes.ranks import parts_of
from argosy.runtime.stages.context_stage import sequence_sharing
from argosy.runtime.stages.grid_stage import GridSharing
from argosy.runtime.stages.tensor_stage import Sharing


def sharings(plan: Plan, cut: GraphCut, roster: Sequence[str]) -> dict[tuple[int, int], Sharing]:
    """Return how tensor-parallel groups share each stage and replica.

    Groups of a stage with equal ratios run one program. Each group cuts a weight of several stages
    as it likes, and gradients are summed region by region.
    """
    whole = _held_whole(plan, cut)
    by_replica: dict[tuple[int, int], Sharing] = {}
    for index, stage in enumerate(plan.stages):
        known: dict[tuple[tuple[float, ...], ...], Sharing] = {}
        for at, replica in enumerate(stage.replicas):
            if replica.width == stage.context:
                continue
            parts = parts_of(plan, stage, replica, roster)
            _check_grid(index, parts)
            shares = tuple(tuple(share for _, share in part) for part in parts)
            if shares not in known:
                known[shares] = _sharing(plan, cut, index, replica, roster, whole)
            by_replica[index, at] = known[shares]
    return by_replica


def _held_whole(plan: Plan, cut: GraphCut) -> frozenset[int]:
    """Return the weights that every member holds whole: those of several stages on one device,
    which has one copy for all of them, and those that the program itself changes."""
    values = cut.graph.values
    readers: dict[str, list[int]] = {}
    for index, part in enumerate(cut.parts):
        for name in {values[weight].name for weight in part.weights}:
            readers.setdefault(name, []).append(index)
    repeated = {name for name, stages in readers.items() if _on_one_device(plan, stages)}
    changed = {value for value, _ in cut.graph.updates}
    return frozenset(
        value for part in cut.parts for value in part.weights if values[value].name in repeated
    ).union(changed)


def _sharing(
    plan: Plan,
    cut: GraphCut,
    index: int,
    replica: Replica,
    roster: Sequence[str],
    whole: frozenset[int],
) -> Sharing:
    """Return how the groups of a replica share a stage."""
    stage = plan.stages[index]
    members, *others = parts_of(plan, stage, replica, roster)
    names = [roster[rank] for rank, _ in members]
    ratios = _ratios_of_row(members)
    common: dict[str, Any] = {
        "cut": cut,
        "index": index,
        "group": device_group(cluster_from_content(plan.cluster.content), names, plan.model.dtype),
        "ratios": ratios,
        "samples": max(replica.samples for replica in stage.replicas),
        "total": plan.global_batch,
        "layers": range(stage.first, stage.end),
        "whole": whole,
    }
    if others:
        sequence = sequence_sharing(cut, plan, index, replica, roster)
        return GridSharing(**common, sequence=sequence)
    return Sharing(**common, records=_records(plan, stage, ratios))


def _ratios_of_row(members: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """Return the shares of one tensor-parallel group's devices in its own work."""
    shares = [share for _, share in members]
    total = math.fsum(shares)
    return tuple(shares) if math.isclose(total, 1.0) else tuple(share / total for share in shares)


def _check_grid(index: int, parts: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Raise an ``InputError`` unless the groups of all parts have the same ratios in the order of
    ranks, and every place in them the same order of parts."""
    path, first = f"stages[{index}].replicas", _ratios_of_row(parts[0])
    for part in parts:
        own = _ratios_of_row(part)
        if any(not math.isclose(a, b, abs_tol=1e-6) for a, b in zip(own, first, strict=True)):
            expected = "groups of equal ratios in the order of their ranks"
            raise invalid(path, "parts of a sequence shared in different ratios", expected)
    for column in zip(*parts, strict=True):
        if list(column) != sorted(column, key=lambda member: member[0]):
            expected = "the devices of one part before those of the next"
            raise invalid(path, "parts of a sequence on devices in another order", expected)


def _on_one_device(plan: Plan, stages: Sequence[int]) -> bool:
    """Return whether a device has more than one of some stages."""
    devices = [
        name
        for stage in stages
        for replica in plan.stages[stage].replicas
        for name in replica.devices
    ]
    return len(set(devices)) < len(devices)


def _records(plan: Plan, stage: Stage, ratios: tuple[float, ...]) -> dict[int, GroupProgram]:
    """Return the programs that the plan records for groups with these ratios in a stage, by number
    of samples."""
    wanted = (stage.first, stage.end, ratios)
    return {
        program.samples: program
        for program in plan.programs
        if (program.first, program.end, program.ratios) == wanted
    }
