"""Devices of known speed: seconds made up from the work, so that balance can be judged on any
machine."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.nbody.processes.shared import Effort, ForcePhase

UNITS_PER_SECOND = {ForcePhase.PAIRS: 1e8, ForcePhase.TREE: 1e7, ForcePhase.MESH: 2e7}


@dataclass
class EmulatedClock:
    speeds: list[float]

    def __call__(self, phase: ForcePhase, rank: int, effort: Effort) -> float:
        return effort.work / (UNITS_PER_SECOND[phase] * self.speeds[rank])
