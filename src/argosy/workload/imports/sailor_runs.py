"""Read real runs published with the Sailor planner: a plan, and the measurements of its run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from argosy.document import Document, read_json, validate
from argosy.errors import Mismatch, Problem, in_order, raise_any
from argosy.lines import Location
from argosy.workload.fields import Amount, Count, Natural
from argosy.workload.imports.sailor import ForeignSchema, SailorGroup, device_group


@dataclass(frozen=True, kw_only=True)
class SailorReplica:
    """A copy of a stage that consists of the GPUs of one or more nodes, which share its tensors."""

    groups: tuple[SailorGroup, ...]
    tensor_width: int


@dataclass(frozen=True, kw_only=True)
class SailorStage:
    """A range of consecutive layers that is held by one or more replicas."""

    layers: tuple[int, ...]
    """Sailor's numbers, which are indices into the chain's layers."""
    replicas: tuple[SailorReplica, ...]


@dataclass(frozen=True, kw_only=True)
class SailorRun:
    """A plan that was run, with its measurements."""

    stages: tuple[SailorStage, ...]
    micro_batch: int
    """Samples per replica; Argosy's plans count those of all replicas of a stage together."""
    global_batch: int
    """Samples."""
    iteration_seconds: float
    peak_bytes: float
    """Highest memory in use on any GPU, including that of the process itself (about 5 GB)."""

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro-batches that each replica of a stage handles in an
        iteration."""
        return self.global_batch // (self.micro_batch * len(self.stages[0].replicas))


def _replica(value: object) -> object:
    """Return the replica of a list ``[[[kind, count, zone], ...], tensor width]``."""
    form = "[[[GPU kind, count, zone], ...], tensor width]"
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not isinstance(value[0], list)
        or not value[0]
    ):
        raise Mismatch(value, form)
    groups, width = value
    for group in groups:
        if (
            not isinstance(group, list)
            or [type(part) for part in group] != [str, int, str]
            or group[1] < 1
        ):
            raise Mismatch(group, form)
    count = sum(group[1] for group in groups)
    if width != count:
        raise Mismatch(width, f"a tensor width of {count}, the GPUs of the replica")
    return SailorReplica(groups=tuple(device_group(*group) for group in groups), tensor_width=count)


class _Pipeline(ForeignSchema):
    layers_per_stage: list[list[Natural]]
    tmp_per_stage: list[list[Annotated[SailorReplica, BeforeValidator(_replica)]]]
    dp: list[Count]


class _Measured(ForeignSchema):
    pipeline_list: list[_Pipeline]
    mbs: Count
    gbs: Count
    real: Amount
    red_grads: Amount
    max_mem: Amount


def read_sailor_measured(path: Path | str) -> SailorRun:
    """Return the plan and the measurements of one real run."""
    document = read_json(path)
    content = validate(document, _Measured)
    problems = [*_run_problems(document, content)]
    raise_any(in_order(problems))
    (pipeline,) = content.pipeline_list
    stages = [
        SailorStage(layers=tuple(layers), replicas=tuple(replicas))
        for layers, replicas in zip(pipeline.layers_per_stage, pipeline.tmp_per_stage, strict=True)
    ]
    return SailorRun(
        stages=tuple(stages),
        micro_batch=content.mbs,
        global_batch=content.gbs,
        iteration_seconds=content.real,
        peak_bytes=content.max_mem,
    )


def _run_problems(document: Document, content: _Measured) -> Iterator[Problem]:
    if len(content.pipeline_list) != 1:
        yield document.problem(("pipeline_list",), "one pipeline", content.pipeline_list)
        return
    at: Location = ("pipeline_list", 0)
    pipeline = content.pipeline_list[0]
    flat = [layer for stage in pipeline.layers_per_stage for layer in stage]
    if not flat or flat != list(range(len(flat))) or not all(pipeline.layers_per_stage):
        yield document.problem(
            (*at, "layers_per_stage"), "every layer once, in order, from 0, at least one per stage"
        )
    if len(pipeline.tmp_per_stage) != len(pipeline.layers_per_stage):
        expected = f"replicas for each of {len(pipeline.layers_per_stage)} stages"
        yield document.problem((*at, "tmp_per_stage"), expected, pipeline.tmp_per_stage)
    counts = [len(replicas) for replicas in pipeline.tmp_per_stage]
    if pipeline.dp != counts:  # dp is at least 1, so this rejects a stage without replicas too
        problem = document.problem((*at, "dp"), f"{counts}, the replicas of each stage")
        yield replace(problem, found=f"{pipeline.dp}")
    for count in sorted(
        {count for count in counts if count and content.gbs % (content.mbs * count)}
    ):
        expected = (
            f"a multiple of {content.mbs * count}, one micro-batch of each of {count} replicas"
        )
        yield document.problem(("gbs",), expected, content.gbs)
