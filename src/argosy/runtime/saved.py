"""Which checkpoints there are. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"step-(\d+)")


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]
