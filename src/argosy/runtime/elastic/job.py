"""What an elastic job is told, and what it tells: its settings, its events. Needs no torch."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from argosy.runtime.folder import EVENTS, append


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to be, as every agent knows it."""

    plan: str
    """File."""
    program: str
    out: str
    """The run's folder, which all hosts see."""
    steps: int
    node: str
    """Of the plan's cluster: the host that this agent is."""
    address: str = "127.0.0.1"
    """Where other hosts reach this one."""
    model: str | None = None
    """Where the model's costs are found: a preset, a config or a profile; the plan's own name unless given."""
    copy_every: int = 1
    """Steps between two copies in memory; 0 for none."""
    save_every: int = 0
    lost_after: float = 10.0
    """Seconds of silence after which a host is taken to be lost."""
    gather: float = 60.0
    """Seconds that the first generation waits for hosts of the plan."""
    wait: float = 600.0
    """Seconds to wait for hosts while nothing fits on those that are there."""
    grace: float = 30.0
    """Seconds that a host has between being told to go and being gone."""
    patience: float = 600.0
    """Seconds that a worker waits for another that says nothing, and that a step may take."""
    resume: bool = False
    init: str | None = None
    clip: float | None = None
    seed: int = 0
    any_device: bool = False
    adapt: str = "off"
    """How far every generation may adapt (``Reach``)."""
    horizon: int = 1000
    min_gain: float = 0.02
    profile: tuple[str, ...] = ()
    """Files of measured layers, for the predictions."""

    @property
    def folder(self) -> Path:
        return Path(self.out)

    @property
    def interval(self) -> float:
        """Seconds between two signs of life."""
        return self.lost_after / 5

    def dumps(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def loads(text: str) -> Job:
        return Job(**json.loads(text))


class Events:
    """What the leaders of a run decided and saw, one line of JSON each, beside the run."""

    def __init__(self, folder: Path, host: str) -> None:
        self.path, self.host = folder / EVENTS, host

    def write(self, event: str, **facts: Any) -> None:
        append(self.path, {"event": event, "at": round(time.time(), 3), "by": self.host, **facts})
