"""Export a run as a JobSet of Kubernetes (``jobset.x-k8s.io/v1alpha2``), or as a TrainJob of
Kubeflow Trainer (``trainer.kubeflow.org/v1alpha1``); Kueue admits either as a whole.

Nodes with equal requests are one replicated job with an indexed pod each. Pods find the first node
by the name that the JobSet's headless service gives it. If the cluster file names hosts, every node
is pinned to its own; without them, Kubernetes cannot distinguish nodes with unequal cards, and such
a plan is rejected.

A ``TrainJob`` alone has one number of equal nodes, but its ``TrainingRuntime`` is a template of a
JobSet. The export writes both. Without an ML policy and without the label of a trainer, Kubeflow
Trainer creates the JobSet as the template states it, under the name of the TrainJob.

The container's image has Argosy, torch, the plan and the program; the run's folder is on the
volume.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from argosy.document import JsonObject
from argosy.exporters.form import Export, Limit, limit, settle
from argosy.exporters.node_groups import (
    RESOURCES,
    NodeGroup,
    node_groups,
    nodes_have_one_kind,
    start,
)
from argosy.runtime.job.launch import Launch

# The name of the target in messages.
NAME = "Kubernetes"
# The persistent volume claim that holds the run's folder, and where it is mounted.
CLAIM = "argosy"
_FOLDER = "/workspace"


def export_jobset(launch: Launch, *, image: str) -> Export:
    """Return ``jobset.json`` for ``kubectl apply -f``."""
    content = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job_name(launch)},
        "spec": _spec(launch, image),
    }
    return _export("jobset.json", content)


def export_kubeflow(launch: Launch, *, image: str) -> Export:
    """Return ``trainjob.json`` for ``kubectl apply -f``: a TrainingRuntime and its TrainJob."""
    version, name = "trainer.kubeflow.org/v1alpha1", job_name(launch)
    runtime = {
        "apiVersion": version,
        "kind": "TrainingRuntime",
        "metadata": {"name": name},
        "spec": {"template": {"spec": _spec(launch, image)}},
    }
    job = {
        "apiVersion": version,
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": name}},
    }
    return _export("trainjob.json", {"apiVersion": "v1", "kind": "List", "items": [runtime, job]})


def _export(file: str, content: JsonObject) -> Export:
    return Export(files=((file, json.dumps(content, indent=2) + "\n"),))


def _spec(launch: Launch, image: str) -> JsonObject:
    """Return the specification of the JobSet; raise ``InputError`` with all limits."""
    settle(limits(launch), lossy=False)
    groups, name = node_groups(launch), job_name(launch)
    first = next(group for group in groups if 0 in group.ranks)
    address = launch.address or f"{name}-{first.name}-0-{first.ranks.index(0)}.{name}"
    return {
        "network": {"enableDNSHostnames": True, "subdomain": name},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [_job(launch, group, image, address) for group in groups],
    }


def limits(launch: Launch) -> Iterator[Limit]:
    """Yield everything in a run that Kubernetes cannot express."""
    yield from nodes_have_one_kind(launch, NAME)
    kinds = sorted({group.kind for group in node_groups(launch)})
    if len(kinds) > 1 and not launch.names_hosts:
        expected = (
            f"the names of all hosts in the cluster file: {NAME} does not tell these kinds apart"
        )
        yield limit("nodes.hosts", " and ".join(kinds), expected, final=True)


def job_name(launch: Launch) -> str:
    """Return a name that is valid as part of a host name."""
    text = re.sub(r"[^a-z0-9]+", "-", launch.plan.model.name.lower()).strip("-")
    return f"argosy-{text}"[:30].rstrip("-")


def _job(launch: Launch, group: NodeGroup, image: str, address: str) -> JsonObject:
    """Return the replicated job of a group of nodes."""
    resource = RESOURCES.get(group.vendor)
    wanted: dict[str, str] = {"cpu": str(group.cpus or group.processes)}
    if resource is not None:
        wanted[resource] = str(group.cards)
    pod: JsonObject = {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "argosy",
                "image": image,
                "workingDir": _FOLDER,
                "command": [
                    "bash",
                    "-c",
                    start(launch, group, index="$JOB_COMPLETION_INDEX", address=address),
                ],
                "resources": {"limits": wanted, "requests": wanted},
                "volumeMounts": [
                    {"name": "run", "mountPath": _FOLDER},
                    {"name": "shm", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": CLAIM}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if group.host is not None:
        pod["nodeSelector"] = {"kubernetes.io/hostname": group.host}
    count = len(group.ranks)
    job = {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        "backoffLimit": 0,
    }
    return {
        "name": group.name,
        "replicas": 1,
        "template": {"spec": {**job, "template": {"spec": pod}}},
    }
