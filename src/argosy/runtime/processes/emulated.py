"""Adapt a process to emulated devices and links (``argosy.lab``); without a lab these functions do
nothing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

PACES = "ARGOSY_PACES"
"""The environment variable with the seconds per sample and layer of every rank, separated by
commas."""


def join_device() -> None:
    """Limit the calling thread, and the threads it starts, to its device's share of a core."""
    path = os.environ.get("ARGOSY_LAB_THREADS")
    if path:
        Path(path).write_text(str(threading.get_native_id()), encoding="ascii")


def say_ready() -> None:
    """Start the lab's clock at time 0, if it waits for this process."""
    path = os.environ.get("ARGOSY_LAB_READY")
    if path:
        Path(path).touch()


def seconds_per_sample() -> float | None:
    """Return the seconds that a layer takes for one sample on this rank's device, None if the lab
    sets no pace (``paced``)."""
    paces = os.environ.get(PACES)
    return float(paces.split(",")[int(os.environ.get("RANK", "0"))]) if paces else None
