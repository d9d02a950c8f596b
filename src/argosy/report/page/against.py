"""Predicted against measured: what each device computes in an iteration and holds at most, where
both are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from argosy.cluster.topology import Cluster
from argosy.plan.plan import Plan
from argosy.report.plan import devices_in_short
from argosy.timeline import Timeline
from argosy.units import SIZE, TIME, Quantity

Cells = tuple[str, str, str]
"""Predicted, measured, error."""
_NOTHING: Cells = ("-", "-", "-")


def predicted_and_measured(
    plan: Plan, cluster: Cluster, timelines: Sequence[Timeline]
) -> list[tuple[str, Cells, Cells]]:
    """(what, cells of time, cells of peak memory), the whole iteration first; devices that show the
    same share a row."""
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
    alike: dict[tuple[Cells, Cells], list[str]] = {}
    for name in plan.devices:
        if name in times or name in peaks:
            alike.setdefault((times.get(name, _NOTHING), peaks.get(name, _NOTHING)), []).append(
                name
            )
    return rows + [(devices_in_short(names, cluster), *cells) for cells, names in alike.items()]


def _by_device(
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    devices: Iterable[str],
    unit: Quantity,
) -> dict[str, Cells]:
    both = [name for name in devices if name in predicted and name in measured]
    return {name: _cells(unit, predicted[name], measured[name]) for name in both}


def _cells(unit: Quantity, predicted: float | None, measured: float | None) -> Cells:
    if not predicted or not measured:
        return _NOTHING
    shown = unit.format(predicted, digits=4), unit.format(measured, digits=4)
    return (*shown, f"{100 * (predicted / measured - 1):+.1f} %")


def _busy(timeline: Timeline) -> dict[str, float]:
    count = max(1, len(timeline.iteration_ends))
    return {
        name: seconds / count for name, seconds in zip(timeline.devices, timeline.busy, strict=True)
    }
