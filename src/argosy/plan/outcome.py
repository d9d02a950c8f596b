"""What is known about a plan: its prediction, its certificate, what finding it took, and what was
left out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the simulator says the plan will do."""

    iteration_seconds: float
    samples_per_second: float
    peak_memory_bytes: tuple[tuple[str, float], ...]
    """Per device, in the order of their names."""
    bottleneck: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_memory_bytes", tuple(sorted(self.peak_memory_bytes)))


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """How much better any other plan could be at most."""

    lower_bound_seconds: float
    gap: float
    """Predicted time over lower bound, minus 1."""
    granularity: int
    scope: str
    """For which plans the bound holds."""
    free_bound_seconds: float | None = None
    """No plan of any granularity takes less per iteration, by throughput alone."""
    cost_model: str | None = None
    """The cost model under which the bounds hold, in words; None in files that do not record it."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What finding the plan took."""

    cpu_seconds: float
    candidates: int
    pruned: tuple[tuple[str, int], ...]
    """Candidates removed per rule, in the order of the rules' names."""
    history: tuple[tuple[float, float, float], ...] = ()
    """(CPU seconds since the start, best iteration so far, lower bound), whenever one of the two
    had moved."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pruned", tuple(sorted(self.pruned)))


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """A plan that lost, and why."""

    description: str
    iteration_seconds: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A device that the plan does not use, and why."""

    device: str
    reason: str
