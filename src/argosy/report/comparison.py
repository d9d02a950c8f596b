"""Compare one plan under several schedules, on a constant and on a changing network.

This is the table of ``argosy demo``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from argosy.report.marks import percent
from argosy.report.summary import Summary
from argosy.report.tables import held_in_words, plain_table
from argosy.units import SIZE, TIME


@dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule that was simulated on a constant and on a changing network."""

    name: str
    calm: Summary
    changing: Summary

    @property
    def calm_seconds(self) -> float:
        """Return the mean seconds of an iteration on the constant network."""
        return self.calm.mean_seconds or 0.0

    @property
    def mean_seconds(self) -> float:
        """Return the mean seconds of an iteration on the changing network."""
        return self.changing.mean_seconds or 0.0

    @property
    def worst_seconds(self) -> float:
        """Return the seconds of the longest iteration on the changing network."""
        return max(self.changing.iteration_seconds)

    @property
    def first_stage_memory(self) -> tuple[float, float]:
        """Return peak and capacity in bytes of the device of stage 0 that is closest to its
        limit."""
        first = [device for device in self.changing.devices if 0 in device.stages]
        fullest = max(first, key=lambda device: device.peak_memory / device.memory)
        return fullest.peak_memory, fullest.memory


def case_table(cases: Sequence[Case]) -> Table:
    """Return a table with a line per schedule."""
    table = plain_table("schedule", ">calm", ">preempted", ">worst", ">bubble", "memory of stage 0")
    for case in cases:
        peak, capacity = case.first_stage_memory
        mark = "  OVER" if peak > capacity else ""
        table.add_row(
            case.name,
            TIME.short(case.calm_seconds),
            TIME.short(case.mean_seconds),
            TIME.short(case.worst_seconds),
            percent(case.changing.bubble_fraction),
            f"{held_in_words(peak)} of {SIZE.short(capacity)}{mark}",
        )
    return table


def in_a_sentence(base: Case, compared: Case) -> str:
    """State what the changing network costs under two schedules, and the memory that the second
    needs."""
    costs = [percent(case.mean_seconds / case.calm_seconds - 1) for case in (base, compared)]
    held = [SIZE.short(case.first_stage_memory[0]) for case in (base, compared)]
    return (
        f"The preempted network makes iterations {costs[0]} longer with {base.name} but {costs[1]} "
        f"with {compared.name}, which computes while tensors travel; the price is {held[1]} "
        f"instead of {held[0]} of memory on the first stage."
    )


def cases_to_dict(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the cases as dicts for JSON, in seconds and bytes."""
    return [
        {
            "schedule": case.name,
            "calm_seconds": case.calm_seconds,
            "preempted_mean_seconds": case.mean_seconds,
            "preempted_worst_seconds": case.worst_seconds,
            "bubble_fraction": case.changing.bubble_fraction,
            "first_stage_peak_memory_bytes": case.first_stage_memory[0],
            "first_stage_memory_bytes": case.first_stage_memory[1],
        }
        for case in cases
    ]
