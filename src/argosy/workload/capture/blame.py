"""The line of a user's program that an exception came through."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

import torch

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
"""Frames of torch and of this package say nothing to a user."""


def user_line(trace: TracebackType | None) -> traceback.FrameSummary | None:
    """The innermost frame that is neither torch's nor ours; a library's model (transformers) counts as the user's."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith((*LIBRARIES, "<"))]
    return frames[-1] if frames else None


def stack_line(stack: str | None) -> str:
    """``file:line`` of the innermost user frame of a recorded stack, or nothing."""
    found = ""
    for line in (stack or "").splitlines():
        text = line.strip()
        if text.startswith('File "') and not text[6:].startswith((*LIBRARIES, "<")):
            file, _, rest = text[6:].partition('"')
            number = rest.removeprefix(", line ").partition(",")[0]
            found = f"{file}:{number}"
    return found
