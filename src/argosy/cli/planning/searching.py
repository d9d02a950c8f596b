"""Search for a plan, and show the progress on stderr."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from argosy.cli.terminal import has_spinner, spinner
from argosy.plan.plan import Plan
from argosy.units import TIME
from argosy.workload.chain import Chain

if TYPE_CHECKING:
    from argosy.cli.inputs import PlanningTask
    from argosy.planner import CapturedProgram, SearchProgress


def search(workload: Chain | CapturedProgram, task: PlanningTask, *, quiet: bool) -> Plan:
    """Find a plan, with progress on stderr; an interrupt ends the search with the best plan so
    far.

    ``workload`` is the task's chain, or the program that it belongs to.
    """
    from argosy.planner import find_plan

    with _watch(f"planning {workload.name} for {task.cluster!r}", quiet=quiet) as tell:
        return find_plan(
            workload,
            task.cluster,
            global_batch=task.global_batch,
            settings=replace(task.settings, progress=tell),
            model=task.model,
        )


@contextlib.contextmanager
def _watch(message: str, *, quiet: bool) -> Iterator[Callable[[SearchProgress], None] | None]:
    """Yield a function that shows the progress of a search on stderr.

    On a terminal it changes one line, else it prints a line per percent of the gap.
    """
    if quiet:
        yield None
    elif has_spinner():
        with spinner(message) as say:
            yield lambda state: say(f"{_state(state)}; {message}")
    else:
        sys.stderr.write(f"{message}\n")
        printed: set[tuple[float, float]] = set()

        def tell(state: SearchProgress) -> None:
            """Print a line if the state has changed noticeably."""
            rounded = (state.seconds, round(state.gap, 2))
            if rounded not in printed:
                printed.add(rounded)
                sys.stderr.write(f"{_state(state)}\n")

        yield tell


def _state(state: SearchProgress) -> str:
    """Describe the state of a search."""
    if math.isinf(state.bound):
        return "no plan fits in memory"
    if not math.isfinite(state.seconds):
        return f"no plan yet, bound {TIME.format(state.bound)}, {state.candidates:,} plans judged"
    times = f"best {TIME.format(state.seconds)}, bound {TIME.format(state.bound)}"
    return f"{times}, gap {100 * state.gap:.1f} %, {state.candidates:,} plans judged"
