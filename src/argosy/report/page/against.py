"""Compare predicted with measured figures: the compute time and the peak memory of each device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from argosy.cluster.topology import Cluster
from argosy.plan.plan import Plan
from argosy.report.plan import devices_in_short
from argosy.timeline import Timeline
from argosy.units import SIZE, TIME, Quantity

Cells = tuple[str, str, str]
"""The cells "predicted", "measured" and "error" of a table."""
# The cells of a figure that was not both predicted and measured.
_NOTHING: Cells = ("-", "-", "-")


def predicted_and_measured(
    plan: Plan, cluster: Cluster, timelines: Sequence[Timeline]
) -> list[tuple[str, Cells, Cells]]:
    """Return (name, cells of time, cells of peak memory) per row, the whole iteration first.

    Devices with equal cells share a row.
    """
    by_clock = {timeline.clock: timeline for timeline in reversed(timelines)}
    if not {"simulated", "measured"} <= by_clock.keys():
        return []
    predicted, measured = by_clock["simulated"], by_clock["measured"]
    rows = []
    whole = _cells(TIME, predicted.usual_seconds, measured.usual_seconds)
    if whole != _NOTHING:
        rows.append(("whole iteration", whole, _NOTHING))
    times = _by_device(_busy(predicted), _busy(measured), plan.devices, TIME)
    peaks = _by_device(predicted.peak_memory(), measured.peak_memory(), plan.devices, SIZE)
    by_cells: dict[tuple[Cells, Cells], list[str]] = {}
    for name in plan.devices:
        if name in times or name in peaks:
            by_cells.setdefault((times.get(name, _NOTHING), peaks.get(name, _NOTHING)), []).append(
                name
            )
    return rows + [(devices_in_short(names, cluster), *cells) for cells, names in by_cells.items()]


def _by_device(
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    devices: Iterable[str],
    unit: Quantity,
) -> dict[str, Cells]:
    """Return the cells of every device that was both predicted and measured."""
    both = [name for name in devices if name in predicted and name in measured]
    return {name: _cells(unit, predicted[name], measured[name]) for name in both}


def _cells(unit: Quantity, predicted: float | None, measured: float | None) -> Cells:
    """Return the cells of one figure."""
    if not predicted or not measured:
        return _NOTHING
    shown = unit.format(predicted, digits=4), unit.format(measured, digits=4)
    return (*shown, f"{100 * (predicted / measured - 1):+.1f} %")


def _busy(timeline: Timeline) -> dict[str, float]:
    """Return, by device, the mean seconds of computation in an iteration."""
    count = max(1, len(timeline.iteration_ends))
    return {
        name: seconds / count for name, seconds in zip(timeline.devices, timeline.busy, strict=True)
    }
