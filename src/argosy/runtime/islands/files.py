"""Name the files that an island writes into its folder. Needs no torch."""

from __future__ import annotations

from pathlib import Path

EXCHANGES = "exchanges.jsonl"
"""The file with a line for every exchange, and for every loss and return of islands."""


def island_folder(out: Path, island: int) -> Path:
    """Return the folder that an island writes into."""
    return out / f"island-{island}"
