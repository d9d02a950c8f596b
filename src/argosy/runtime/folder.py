"""A run's folder: its files by name, the lines of JSON that are added to them, its checkpoints. Needs no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PROGRESS, DECISIONS, EVENTS = "progress.jsonl", "decisions.jsonl", "events.jsonl"
TIMELINE, CHECKPOINTS = "timeline.json", "checkpoints"
_CHECKPOINT = re.compile(r"step-(\d+)")

Line = dict[str, Any]


def append(path: Path, line: Line) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[Line]:
    """Those that are whole: the last one may be on its way, or cut off with whoever wrote it."""
    return Tail(path, skip=False).read()


class Tail:
    """The lines of a file, as they are added; of one that there is already only what comes, unless told otherwise."""

    def __init__(self, path: Path, *, skip: bool = True) -> None:
        self.path = path
        self.lines: list[Line] = []
        """All that were read."""
        self._at = self._size() if skip else 0

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def read(self) -> list[Line]:
        """What has been added since the last call, in whole lines."""
        if self._size() < self._at:  # begun anew
            self._at, self.lines = 0, []
        if not self._size():
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        found = [json.loads(line) for line in whole.splitlines()]
        self.lines += found
        return found


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _CHECKPOINT.fullmatch(path.name))]
    return [path for _, path in sorted(found)]
