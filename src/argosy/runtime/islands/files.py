"""Names of what an island writes into its folder. Needs no torch."""

from __future__ import annotations

from pathlib import Path

EXCHANGES = "exchanges.jsonl"
"""A line for every exchange, and for every loss and return of islands."""


def island_folder(out: Path, island: int) -> Path:
    """Where an island writes."""
    return out / f"island-{island}"
