"""Hold the results of a search for a plan: prediction, certificate, search effort, and devices left
out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A prediction that the simulator makes for the plan."""

    iteration_seconds: float
    samples_per_second: float
    peak_memory_bytes: tuple[tuple[str, float], ...]
    """Peak bytes per device, in the order of their names."""
    bottleneck: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_memory_bytes", tuple(sorted(self.peak_memory_bytes)))


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A certificate that bounds how much better any other plan could be."""

    lower_bound_seconds: float
    gap: float
    """Predicted time over lower bound, minus 1."""
    granularity: int
    scope: str
    """Plans for which the bound holds, in words."""
    free_bound_seconds: float | None = None
    """Lower bound on an iteration of any plan of any granularity, by throughput alone."""
    cost_model: str | None = None
    """Cost model under which the bounds hold, in words; None in files that do not record it."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A record of the effort that it took to find the plan."""

    cpu_seconds: float
    candidates: int
    pruned: tuple[tuple[str, int], ...]
    """Candidates removed per rule, in the order of the rules' names."""
    history: tuple[tuple[float, float, float], ...] = ()
    """CPU seconds since the start, best iteration so far and lower bound, whenever one of the
    latter two changed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pruned", tuple(sorted(self.pruned)))


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """A plan that was not chosen, and the reason."""

    description: str
    iteration_seconds: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A device that the plan does not use, and the reason."""

    device: str
    reason: str
