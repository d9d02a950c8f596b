"""Devices of known speed: seconds made up from the work, so that balance can be judged on any machine."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.nbody.shared import Effort, Phase

UNITS_PER_SECOND = {Phase.PAIRS: 1e8, Phase.TREE: 1e7, Phase.MESH: 2e7}


@dataclass
class EmulatedClock:
    speeds: list[float]

    def __call__(self, phase: Phase, rank: int, effort: Effort) -> float:
        return effort.work / (UNITS_PER_SECOND[phase] * self.speeds[rank])
