"""Read and write ``plan.json`` of kind ``islands``, version 1. Its fields are in
``docs/formats.md``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import Field

from argosy.document import Document, JsonObject, Schema, Word, validate
from argosy.errors import Problem, raise_any
from argosy.plan.file import CertificateSchema, Real, plan_from_document, plan_to_dict
from argosy.plan.islands import Compression, IslandPlan, IslandPrediction, OuterOptimizer
from argosy.workload.fields import Amount, Count, Natural

KIND = "islands"
"""Value of ``kind`` in the file of an island plan; the file of a plan without islands has no
kind."""

_Share = Annotated[float, Field(ge=0, le=1)]


class OuterSchema(Schema):
    makes = OuterOptimizer

    learning_rate: Annotated[Real, Field(gt=0)]
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: bool = False


class IslandPredictionSchema(Schema):
    makes = IslandPrediction

    step_seconds: Amount
    samples_per_second: Amount
    island_seconds: list[Amount]
    exchange_seconds: Amount
    exchange_bytes: Amount
    outer_bytes: Amount
    synchronous_seconds: Amount | None = None


class IslandPlanSchema(Schema):
    makes = IslandPlan

    version: Literal[1]
    kind: Literal["islands"]
    islands: list[JsonObject] = Field(min_length=2)
    sync_every: Count
    fragments: Count = 1
    overlap: Natural = 0
    mixing: _Share = 0.5
    outer: OuterSchema
    compression: Word[Compression] = Compression.NONE
    predicted: IslandPredictionSchema | None = None
    certificate: CertificateSchema | None = None


def island_plan_from_document(document: Document) -> IslandPlan:
    """Return the island plan of a document; raise one ``InputError`` with everything that is wrong
    with the file or with a plan in it."""
    schema = validate(document, IslandPlanSchema)
    plans = tuple(
        plan_from_document(document.inside("islands", at)) for at in range(len(schema.islands))
    )
    plan: IslandPlan = schema.value(islands=plans)
    problems = [
        document.problem(location, expected, actual)
        for location, expected, actual in _mistakes(plan)
    ]
    raise_any(problems)
    return plan


def check_island_plan(plan: IslandPlan) -> None:
    """Raise one ``InputError`` with everything that keeps the islands from training one model
    together."""
    problems = [
        Problem(str(where[0]), str(actual), text) for where, text, actual in _mistakes(plan)
    ]
    raise_any(problems)


def _mistakes(plan: IslandPlan) -> list[tuple[tuple[str | int, ...], str, object]]:
    """Return the location, the expected value and the found value of each mistake."""
    mistakes: list[tuple[tuple[str | int, ...], str, object]] = []
    first = plan.islands[0]
    owner: dict[str, int] = {}
    for at, island in enumerate(plan.islands):
        if island.model != first.model:
            mistakes.append((("islands", at, "model"), "the model of island 0", island.model.name))
        if island.cluster.hash != first.cluster.hash:
            mistakes.append(
                (("islands", at, "cluster"), "the cluster of island 0", island.cluster.name)
            )
        for device in island.devices:
            if owner.setdefault(device, at) != at:
                expected = f"a device that island {owner[device]} does not use"
                mistakes.append((("islands", at, "stages"), expected, device))
    if plan.sync_every % plan.fragments:
        mistakes.append(
            (("fragments",), f"a divisor of sync_every, {plan.sync_every}", plan.fragments)
        )
    elif plan.overlap >= plan.period:
        expected = (
            f"fewer than {plan.period} steps, so that one exchange ends before the next begins"
        )
        mistakes.append((("overlap",), expected, plan.overlap))
    return mistakes


def dumps_island_plan(plan: IslandPlan) -> str:
    """Return an island plan as JSON text; equal plans give equal bytes."""
    return json.dumps(island_plan_to_dict(plan), indent=1, sort_keys=True, allow_nan=False) + "\n"


def island_plan_to_dict(plan: IslandPlan) -> JsonObject:
    result: JsonObject = {
        "version": 1,
        "kind": KIND,
        "islands": [plan_to_dict(island) for island in plan.islands],
        "sync_every": plan.sync_every,
        "fragments": plan.fragments,
        "overlap": plan.overlap,
        "mixing": plan.mixing,
        "outer": asdict(plan.outer),
        "compression": str(plan.compression),
    }
    if plan.predicted is not None:
        result["predicted"] = {
            **asdict(plan.predicted),
            "island_seconds": list(plan.predicted.island_seconds),
        }
    if plan.certificate is not None:
        result["certificate"] = asdict(plan.certificate)
    return result
