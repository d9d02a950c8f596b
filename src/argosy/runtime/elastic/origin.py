"""Find what a generation continues from: the newest copies that are whole, or a newer checkpoint,
or the beginning. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from argosy.runtime.elastic.copies import BlockSource, CopyTime, newest_whole
from argosy.runtime.processes.manifest import tear_in
from argosy.runtime.processes.run_folder import (
    CHECKPOINTS,
    PROGRESS,
    checkpoints,
    read_lines,
    step_of,
)


@dataclass(frozen=True, kw_only=True)
class Base:
    """The state from which training continues."""

    kind: Literal["start", "checkpoint", "copies"]
    step: int = 0
    """Steps done."""
    path: Path | None = None
    moment: CopyTime | None = None
    sources: tuple[BlockSource, ...] = ()
    skipped: tuple[tuple[Path, str], ...] = ()
    """Newer checkpoints that are torn, each with the reason."""

    @property
    def is_lost(self) -> bool:
        """Return whether there were checkpoints, and none of them is whole."""
        return self.kind == "start" and bool(self.skipped)

    @property
    def what_is_torn(self) -> str:
        return "; ".join(f"{path}: {tear}" for path, tear in self.skipped)

    def to_dict(self) -> dict[str, Any]:
        sources = [
            (source.address, source.port, source.header.to_dict()) for source in self.sources
        ]
        path = None if self.path is None else str(self.path)
        return {"kind": self.kind, "path": path, "moment": self.moment, "sources": sources}


def newest_base(run: Path, sources: Iterable[BlockSource]) -> Base:
    """Return the newest whole state; copies if they are as far as a checkpoint, because they need
    no reading.

    This reads every byte of a checkpoint before it returns it.
    """
    sources = tuple(sources)
    moment = newest_whole(source.header for source in sources)
    base = Base(kind="start")
    if moment is not None:
        chosen = tuple(source for source in sources if source.header.moment == moment)
        base = Base(kind="copies", step=moment[1], moment=moment, sources=chosen)
    skipped = []
    for path in reversed(checkpoints(run / CHECKPOINTS)):
        if base.kind == "copies" and step_of(path) <= base.step:
            break
        tear = tear_in(path)
        if not tear:
            base = Base(kind="checkpoint", step=step_of(path), path=path)
            break
        skipped.append((path, tear))
    return replace(base, skipped=tuple(skipped))


def steps_told(run: Path) -> int:
    """Return the number of steps done according to the run's progress."""
    lines = read_lines(run / PROGRESS)
    return int(lines[-1]["step"]) + 1 if lines else 0
