"""Plans to launch, with and without names of hosts in their cluster files."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from argosy.cluster.topology import canonical
from argosy.plan.plan import Plan
from argosy.runtime.job.launch import Launch
from argosy.runtime.processes.run_spec import RunSpec

SPEC = RunSpec(plan="plan.json", program="train.py:build", out="run", steps=1)
HOSTS = {"a": ["gpu01", {"name": "gpu02.east", "interface": "ib0"}], "v": ["old1", "old2"]}


def launched(made: Plan, **changes: dict[str, Any]) -> Launch:
    """``changes``: fields of the cluster's groups of nodes, by the group's name."""
    content = json.loads(made.cluster.content)
    for node in content["nodes"]:
        node |= changes.get(node["name"], {})
    return Launch(
        plan=replace(made, cluster=replace(made.cluster, content=canonical(content))), spec=SPEC
    )


def named(made: Plan) -> Launch:
    return launched(made, **{group: {"hosts": hosts} for group, hosts in HOSTS.items()})
