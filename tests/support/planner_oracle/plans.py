"""Describe a plan of single-device replicas, read one from a file, and enumerate all of a problem."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from support.planner_oracle.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Stage:
    first: int
    end: int
    devices: tuple[str, ...]
    samples: tuple[int, ...]
    recompute: bool = False
    zero: int = 0
    algorithm: str | None = None
    """How gradients go around; None: the algorithm that is fastest without other traffic."""

    @property
    def layers(self) -> range:
        return range(self.first, self.end)


@dataclass(frozen=True, kw_only=True)
class Plan:
    micro_batches: int
    schedule: tuple[str, int]
    stages: tuple[Stage, ...]

    @property
    def depths(self) -> list[int]:
        """Return the number of forwards that each stage runs before its first backward."""
        kind, k = self.schedule
        count = len(self.stages)
        behind = range(count, 0, -1)
        limits = {
            "gpipe": [self.micro_batches] * count,
            "1f1b": list(behind),
            "eager-1f1b": [2 * left - 1 for left in behind],
            "kfkb": [k * left for left in behind],
        }[kind]
        return [min(self.micro_batches, limit) for limit in limits]

    @property
    def group(self) -> int:
        kind, k = self.schedule
        return {"gpipe": self.micro_batches, "kfkb": k}.get(kind, 1)


def read_plan(text: str) -> Plan:
    """Read a plan file; it contains only what the oracle prices."""
    content = json.loads(text)
    algorithms = {item["stage"]: item["algorithm"] for item in content.get("collectives", [])}
    stages = []
    for index, stage in enumerate(content["stages"]):
        assert stage.get("context", 1) == stage.get("expert", 1) == 1
        assert stage.get("recompute", "none") in ("none", "full")
        assert not stage.get("offload")
        replicas = stage["replicas"]
        assert all(len(replica["devices"]) == 1 for replica in replicas)
        stages.append(
            Stage(
                first=stage["layers"][0],
                end=stage["layers"][1],
                devices=tuple(replica["devices"][0] for replica in replicas),
                samples=tuple(replica["samples"] for replica in replicas),
                recompute=stage.get("recompute", "none") == "full",
                zero=stage.get("zero", 0),
                algorithm=algorithms.get(index, "ring"),
            )
        )
    schedule = content["schedule"]
    plan = Plan(
        micro_batches=content["num_micro_batches"],
        schedule=(schedule["kind"], schedule.get("k", 1)),
        stages=tuple(stages),
    )
    assert schedule.get("depth") in (None, plan.depths)
    return plan


def all_plans(problem: Problem) -> Iterator[Plan]:
    """Yield every plan: each division of the batch, cut of the layers, assignment of devices,
    division of samples, recomputation, ZeRO level and schedule."""
    devices = list(problem.node_of)
    for micro_batches in range(1, problem.global_batch + 1):
        size, rest = divmod(problem.global_batch, micro_batches)
        if rest:
            continue
        schedules = [pair for pair in problem.schedules if pair[1] <= micro_batches]
        for count in range(1, min(len(problem.layers), len(devices)) + 1):
            for stages in _pipelines(problem, devices, count, size):
                for schedule in schedules:
                    yield Plan(micro_batches=micro_batches, schedule=schedule, stages=stages)


def _pipelines(
    problem: Problem, devices: Sequence[str], count: int, size: int
) -> Iterator[tuple[Stage, ...]]:
    num_layers = len(problem.layers)
    cuts = list(itertools.combinations(range(1, num_layers), count - 1))
    for homes in itertools.product(range(count + 1), repeat=len(devices)):
        members = [
            tuple(name for name, home in zip(devices, homes, strict=True) if home == index)
            for index in range(count)
        ]
        if not all(0 < len(names) <= size for names in members) or not _is_first(problem, homes):
            continue
        for cut in cuts:
            ends = (*cut, num_layers)
            choices = [
                list(_ways(first, end, names, size))
                for first, end, names in zip((0, *cut), ends, members, strict=True)
            ]
            yield from itertools.product(*choices)


def _is_first(problem: Problem, homes: Sequence[int]) -> bool:
    """Return whether an assignment is the first of those that exchange equal devices of a node."""
    at = 0
    for node in problem.nodes:
        own = list(homes[at : at + node.devices])
        if own != sorted(own):
            return False
        at += node.devices
    return True


def _ways(first: int, end: int, names: tuple[str, ...], size: int) -> Iterator[Stage]:
    for cut in itertools.combinations(range(1, size), len(names) - 1):
        samples = tuple(b - a for a, b in itertools.pairwise((0, *cut, size)))
        for recompute in (False, True):
            for zero in range(4 if len(names) > 1 else 1):
                yield Stage(
                    first=first,
                    end=end,
                    devices=names,
                    samples=samples,
                    recompute=recompute,
                    zero=zero,
                )
