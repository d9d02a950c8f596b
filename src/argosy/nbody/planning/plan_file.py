"""A gravity plan as a file, version 1: what ``argosy nbody plan -o`` writes and ``argosy simulate``
reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import Document, Schema, validate
from argosy.errors import InputError, Problem
from argosy.nbody.planning.plan import Domains, StepPlan
from argosy.nbody.planning.pricing import BoxWork, typical_box
from argosy.workload.fields import Count, Natural

KIND = "gravity"


class _ClusterSchema(Schema):
    name: str
    hash: str
    content: dict[str, Any]


class _DomainsSchema(Schema):
    name: str
    ends: list[Natural]
    planes: list[Natural]


class _Schema(Schema):
    version: Literal[1]
    kind: Literal["gravity"]
    cluster: _ClusterSchema
    particles: Natural
    mesh_cells: Count
    seed: Natural
    plan: _DomainsSchema
    compared: list[_DomainsSchema] = Field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class GravityPlan:
    """A choice of domains, whole on its own."""

    cluster: Cluster
    box: BoxWork
    plan: Domains
    compared: tuple[Domains, ...]
    """What others would choose."""


def dumps_gravity_plan(found: StepPlan, seed: int) -> str:
    def row(domains: Domains) -> dict[str, Any]:
        return {"name": domains.name, "ends": list(domains.ends), "planes": list(domains.planes)}

    cluster = {
        "name": found.cluster.name,
        "hash": found.cluster.hash,
        "content": json.loads(found.cluster.content),
    }
    content = {
        "version": 1,
        "kind": KIND,
        "cluster": cluster,
        "particles": found.box.particles,
        "mesh_cells": found.box.mesh_cells,
        "seed": seed,
        "plan": row(found.best.domains),
        "compared": [row(other.domains) for other in found.others],
    }
    return json.dumps(content, indent=1) + "\n"


def gravity_plan_from_document(document: Document) -> GravityPlan:
    """A gravity plan, or one ``InputError`` with everything that is wrong with the file."""
    schema = validate(document, _Schema)
    cluster = build_cluster(document.inside("cluster", "content"), folder=Path())
    box = typical_box(schema.particles, mesh_cells=schema.mesh_cells, seed=schema.seed)
    problems: list[Problem] = []
    for place, rows in (("plan", [schema.plan]), ("compared", schema.compared)):
        for row in rows:
            problems += _problems(document, place, row, cluster, box)
    if problems:
        raise InputError(problems)
    return GravityPlan(
        cluster=cluster,
        box=box,
        plan=_domains(schema.plan),
        compared=tuple(map(_domains, schema.compared)),
    )


def _domains(row: _DomainsSchema) -> Domains:
    return Domains(name=row.name, ends=tuple(row.ends), planes=tuple(row.planes))


def _problems(
    document: Document, place: str, row: _DomainsSchema, cluster: Cluster, box: BoxWork
) -> list[Problem]:
    """Every device has its run and its planes, and together they are the whole box."""
    devices, items = len(cluster.devices), len(box.interactions)
    found: list[Problem] = []
    for name, values in (("ends", row.ends), ("planes", row.planes)):
        if len(values) != devices:
            expected = f"{devices} numbers, one for each device of {cluster.name}"
            found.append(document.problem((place, name), expected, f"{len(values)} numbers"))
    if row.ends != sorted(row.ends) or row.ends[-1:] != [items]:
        found.append(
            document.problem((place, "ends"), f"numbers that never fall, up to {items}", row.ends)
        )
    if sum(row.planes) != box.mesh_cells:
        found.append(
            document.problem(
                (place, "planes"), f"{box.mesh_cells} in all", f"{sum(row.planes)} in all"
            )
        )
    return found
