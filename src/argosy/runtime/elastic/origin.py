"""What a generation goes on from: the newest copies that are whole, or a newer checkpoint, or the beginning.
Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from argosy.runtime.elastic.copies import Moment, Source, newest_whole
from argosy.runtime.folder import CHECKPOINTS, PROGRESS, checkpoints, read_lines


@dataclass(frozen=True, kw_only=True)
class Base:
    """Where training is taken up."""

    kind: Literal["start", "checkpoint", "copies"]
    step: int = 0
    """Steps done."""
    path: Path | None = None
    moment: Moment | None = None
    sources: tuple[Source, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        sources = [(source.address, source.port, source.header.to_dict()) for source in self.sources]
        path = None if self.path is None else str(self.path)
        return {"kind": self.kind, "path": path, "moment": self.moment, "sources": sources}


def newest_base(run: Path, sources: Iterable[Source]) -> Base:
    """Copies where they are at least as far as the newest checkpoint: they need no reading."""
    sources = tuple(sources)
    moment = newest_whole(source.header for source in sources)
    saved = checkpoints(run / CHECKPOINTS)
    step = int(saved[-1].name.removeprefix("step-")) if saved else -1
    if moment is not None and moment[1] >= step:
        chosen = tuple(source for source in sources if source.header.moment == moment)
        return Base(kind="copies", step=moment[1], moment=moment, sources=chosen)
    return Base(kind="checkpoint", step=step, path=saved[-1]) if saved else Base(kind="start")


def steps_told(run: Path) -> int:
    """Steps done, as far as the run's progress says."""
    lines = read_lines(run / PROGRESS)
    return int(lines[-1]["step"]) + 1 if lines else 0
