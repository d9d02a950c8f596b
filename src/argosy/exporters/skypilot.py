"""Export a run as a task of SkyPilot, or for unequal nodes as a job group with a task per kind of
node.

Tasks of a group run at the same time and find each other as ``TASK-INDEX.GROUP``; the nodes of a
single task use the addresses that SkyPilot lists. SkyPilot chooses machines by the name and number
of their cards, so hosts that the cluster file names are rejected. The program and the plan come
with the working folder.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from argosy.exporters.form import Export, Limit, limit, settle
from argosy.exporters.jobset import job_name
from argosy.exporters.node_groups import NodeGroup, node_groups, nodes_have_one_kind, start
from argosy.runtime.job.launch import Launch

# The name of the target in messages.
NAME = "SkyPilot"
# The vendor of device kinds that are CPUs.
_CPU = "generic"
# Device kinds that have another name in SkyPilot.
_CALLED = {"A100-40GB": "A100", "V100-16GB": "V100", "H100-80GB": "H100", "P100-16GB": "P100"}
# The command that prepares a machine.
_SETUP = "pip install 'argosy[torch]'"


def export_skypilot(launch: Launch) -> Export:
    """Return ``sky.yaml``: for ``sky launch`` if all nodes are equal, else for ``sky jobs
    launch``."""
    settle(limits(launch), lossy=False)
    groups, name = node_groups(launch), job_name(launch)
    if len(groups) == 1:
        address = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
        text = _task(launch, groups[0], name, address)
    else:
        first = next(group for group in groups if 0 in group.ranks)
        address = f"{first.name}-{first.ranks.index(0)}.{name}"
        header = f"name: {json.dumps(name)}\nexecution: parallel\n"
        text = "---\n".join(
            [header, *(_task(launch, group, group.name, address) for group in groups)]
        )
    return Export(files=(("sky.yaml", text),))


def limits(launch: Launch) -> Iterator[Limit]:
    """Yield everything in a run that SkyPilot cannot express."""
    yield from nodes_have_one_kind(launch, NAME)
    if launch.names_hosts:
        yield limit(
            "nodes.hosts", "named hosts", f"none: {NAME} chooses the machines itself", final=True
        )


def _task(launch: Launch, group: NodeGroup, name: str, address: str) -> str:
    """Return the YAML of one task."""
    script = start(launch, group, index="$SKYPILOT_NODE_RANK", address=launch.address or address)
    card = _CALLED.get(group.kind, group.kind)
    wanted = (
        f"cpus: {group.cpus or group.processes}+"
        if group.vendor == _CPU
        else f"accelerators: {card}:{group.cards}"
    )
    return f"""name: {json.dumps(name)}
num_nodes: {len(group.ranks)}
workdir: .
resources:
  {wanted}
setup: |
  {_SETUP}
run: |
{textwrap.indent(script, "  ")}"""
