"""Report the results of a run: its losses, its times beside the predicted ones, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argosy.document import JsonObject
from argosy.plan.plan import Plan
from argosy.units import TIME


def figures_of(plan: Plan, lines: list[JsonObject], out: Path) -> JsonObject:
    """Return the figures of a run.

    The first step also prepares everything, so its time counts only if it is the only one.
    """
    from argosy.runtime.processes.run_folder import CHECKPOINTS, TIMELINE

    seconds = sorted(line["seconds"] for line in lines[1:] or lines)
    middle = seconds[len(seconds) // 2] if seconds else None
    timeline = out / TIMELINE
    return {
        "steps": len(lines),
        "losses": [line["loss"] for line in lines],
        "iteration_seconds": middle,
        "samples_per_second": None if middle is None else plan.global_batch / middle,
        "predicted_seconds": None if plan.predicted is None else plan.predicted.iteration_seconds,
        "waiting": _waiting(timeline),
        "timeline": str(timeline),
        "checkpoints": str(out / CHECKPOINTS),
    }


def _waiting(path: Path) -> dict[str, float] | None:
    """Return, per device, the share of the recorded time in which it waited for messages.

    Returns None if nothing is recorded.
    """
    from argosy.timeline.file import load_timeline

    if not path.exists():
        return None
    timeline = load_timeline(path)
    end = timeline.end
    return (
        {device: seconds / end for device, seconds in timeline.waiting().items()} if end else None
    )


def show_figures(console: Any, plan: Plan, figures: JsonObject) -> None:
    """Print the figures of a run."""
    if not figures["losses"]:
        console.print("this node's part of the run is done; node 0 shows the figures")
        return
    console.print(
        f"{plan.model.name}: {figures['steps']} steps, loss {figures['losses'][0]:.6g} -> "
        f"{figures['losses'][-1]:.6g}"
    )
    measured = TIME.format(figures["iteration_seconds"])
    text = f"a step takes {measured} ({figures['samples_per_second']:.4g} samples/s)"
    if figures["predicted_seconds"]:
        change = 100 * (figures["iteration_seconds"] / figures["predicted_seconds"] - 1)
        text += f"; predicted {TIME.format(figures['predicted_seconds'])} ({change:+.0f} %)"
    console.print(text)
    if figures["waiting"]:
        shares = ", ".join(
            f"{device} {100 * share:.0f} %" for device, share in figures["waiting"].items()
        )
        console.print(f"of that time, waiting for messages: {shares}")
    console.print(f"wrote {figures['timeline']} and {figures['checkpoints']}/", soft_wrap=True)
