"""Check that a rank's hardware is the kind that the plan was made for."""

from __future__ import annotations

import re
import socket

import torch

from argosy.cluster.file import cluster_from_content
from argosy.errors import invalid
from argosy.plan.plan import Plan
from argosy.runtime.processes.ranks import devices_by_rank

_MEMORY = re.compile(r"-\d+GB$")
"""Matches the memory size at the end of a kind's name, which drivers write in other ways."""
_CPUS = ("CPU", "Xeon", "EPYC")
"""The beginnings of the names of kinds that are CPUs."""


def check_hardware(plan: Plan, rank: int) -> None:
    """Raise an ``InputError`` if this rank runs on another kind of device than its plan expects."""
    name = devices_by_rank(plan)[rank]
    kind = cluster_from_content(plan.cluster.content).device(name).kind.name
    actual = found_device(name)
    if not is_kind(actual, kind):
        raise invalid(
            name,
            f"{actual} on {socket.gethostname()}",
            f"{kind}, which the plan was made for",
            suggestion="--any-device runs it anyway",
        )


def found_device(name: str) -> str:
    """Return the name of the device that this process uses for a device of the plan."""
    if not torch.cuda.is_available():
        return "CPU"
    number = int(name.rpartition(".")[2])
    count = torch.cuda.device_count()
    return (
        torch.cuda.get_device_name(number)
        if number < count
        else f"{count} GPU{'' if count == 1 else 's'}"
    )


def is_kind(device: str, kind: str) -> bool:
    """Return whether a device's own name belongs to a kind of the catalogue.

    >>> is_kind("NVIDIA A100-SXM4-80GB", "A100-80GB"), is_kind("CPU", "A100-80GB")
    (True, False)
    >>> is_kind("CPU", "CPU-core")
    True
    """
    if kind.startswith(_CPUS):
        return device == "CPU"
    return _plain(_MEMORY.sub("", kind)) in _plain(device)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
