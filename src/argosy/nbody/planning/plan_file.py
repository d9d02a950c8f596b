"""Read and write gravity plans, version 1, for ``argosy nbody plan -o`` and ``argosy simulate``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from argosy.cluster.device import Device
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import Document, JsonObject, Schema, validate
from argosy.errors import Problem, raise_any
from argosy.nbody.planning.plan import Domains, StepPlan
from argosy.nbody.planning.pricing import BoxWork, typical_box
from argosy.workload.fields import Count, Natural

# The ``kind`` of a gravity plan's file.
KIND = "gravity"


class _ClusterSchema(Schema):
    """The cluster that a plan file contains."""

    name: str
    hash: str
    content: JsonObject


class _DomainsSchema(Schema):
    """A choice of domains that a plan file contains."""

    makes = Domains

    name: str
    ends: list[Natural]
    planes: list[Natural]


class _Schema(Schema):
    """The content that a plan file must have."""

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
    """A choice of domains that contains its cluster and box."""

    cluster: Cluster
    box: BoxWork
    plan: Domains
    compared: tuple[Domains, ...]
    """The usual choices, which the plan was compared with."""

    @property
    def ranks(self) -> tuple[Device, ...]:
        """Return the devices that have work; each is a rank of a run."""
        devices, works = self.cluster.devices, self.plan.working
        return tuple(device for device, has_work in zip(devices, works, strict=True) if has_work)


def dumps_gravity_plan(planned: StepPlan, seed: int) -> str:
    """Return a gravity plan as JSON."""

    def row(domains: Domains) -> JsonObject:
        """Return a choice of domains as a dict."""
        return {"name": domains.name, "ends": list(domains.ends), "planes": list(domains.planes)}

    cluster = {
        "name": planned.cluster.name,
        "hash": planned.cluster.hash,
        "content": json.loads(planned.cluster.content),
    }
    content = {
        "version": 1,
        "kind": KIND,
        "cluster": cluster,
        "particles": planned.box.particles,
        "mesh_cells": planned.box.mesh_cells,
        "seed": seed,
        "plan": row(planned.best.domains),
        "compared": [row(choice.domains) for choice in planned.others],
    }
    return json.dumps(content, indent=1) + "\n"


def gravity_plan_from_document(document: Document) -> GravityPlan:
    """Read a gravity plan; raise one ``InputError`` with all problems of the file."""
    schema = validate(document, _Schema)
    cluster = build_cluster(document.inside("cluster", "content"), folder=Path())
    box = typical_box(schema.particles, mesh_cells=schema.mesh_cells, seed=schema.seed)
    problems: list[Problem] = []
    for place, rows in (("plan", [schema.plan]), ("compared", schema.compared)):
        for row in rows:
            problems += _problems(document, place, row, cluster, box)
    raise_any(problems)
    return GravityPlan(
        cluster=cluster,
        box=box,
        plan=schema.plan.value(),
        compared=tuple(row.value() for row in schema.compared),
    )


def _problems(
    document: Document, place: str, row: _DomainsSchema, cluster: Cluster, box: BoxWork
) -> list[Problem]:
    """Return the problems of a choice of domains.

    Every device must have its run and its planes, and together they must be the whole box.
    """
    devices, items = len(cluster.devices), len(box.interactions)
    problems: list[Problem] = []
    for name, values in (("ends", row.ends), ("planes", row.planes)):
        if len(values) != devices:
            expected = f"{devices} numbers, one for each device of {cluster.name}"
            problems.append(document.problem((place, name), expected, f"{len(values)} numbers"))
    if row.ends != sorted(row.ends) or row.ends[-1:] != [items]:
        problems.append(
            document.problem((place, "ends"), f"numbers that never fall, up to {items}", row.ends)
        )
    if sum(row.planes) != box.mesh_cells:
        problems.append(
            document.problem(
                (place, "planes"), f"{box.mesh_cells} in all", f"{sum(row.planes)} in all"
            )
        )
    return problems
