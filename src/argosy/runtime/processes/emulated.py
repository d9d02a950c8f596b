"""What a process does where its device and links are emulated (``argosy.lab``); anywhere else these
do nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

PACES = "ARGOSY_PACES"
"""Seconds per sample and layer of every rank, separated by commas."""


def join_device(environment: Mapping[str, str] = os.environ) -> None:
    """Hold the calling thread, and those it starts, to its device's share of a core."""
    path = environment.get("ARGOSY_LAB_THREADS")
    if path:
        Path(path).write_text(str(threading.get_native_id()), encoding="ascii")


def say_ready(environment: Mapping[str, str] = os.environ) -> None:
    """Begin the lab's time 0, where its clock waits for it."""
    path = environment.get("ARGOSY_LAB_READY")
    if path:
        Path(path).touch()


def seconds_per_sample(environment: Mapping[str, str] = os.environ) -> float | None:
    """What a layer takes for one sample on this rank's device, where devices are told
    (``paced``)."""
    paces = environment.get(PACES)
    return float(paces.split(",")[int(environment.get("RANK", "0"))]) if paces else None
