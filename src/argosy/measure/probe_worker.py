"""Run one rank of ``argosy probe``: join the other ranks, if there are any, and measure; rank 0
writes the cluster file."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from argosy.cluster.probe_notes import ProbeNotes
from argosy.cluster.probed import cluster_toml
from argosy.measure.probe import Report, probe_all
from argosy.runtime.processes.emulated import join_device
from argosy.runtime.processes.meeting import meet


def measure(
    name: str, notes: ProbeNotes, *, seconds: float, report: Report = lambda text: None
) -> str | None:
    """Return the cluster file's text on rank 0, None on the others; measurements are added to the
    notes, which rank 0 keeps."""
    if not is_first():
        notes, report = ProbeNotes(), lambda text: None
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if not alone:
        share = (
            torch.cuda.is_available()
            and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
        )
        meet("nccl" if share else "gloo", patience=timedelta(minutes=5))
    try:
        probe_all(notes, seconds=seconds, report=report)
    finally:
        if not alone:
            dist.destroy_process_group()
    if not is_first():
        return None
    when = (
        f"Measured on {time.strftime('%Y-%m-%d')} with torch {torch.__version__}, "
        f"{len(notes.devices)} processes."
    )
    return cluster_toml(name, notes.devices, notes.links, notes.hosts, measured=when)


def is_first() -> bool:
    """Return whether this is the rank that keeps and writes the measurements."""
    return int(os.environ.get("RANK", "0")) == 0


def main(name: str, seconds: str, output: str) -> None:
    join_device()
    text = measure(name, ProbeNotes(), seconds=float(seconds))
    if text is not None:
        Path(output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
