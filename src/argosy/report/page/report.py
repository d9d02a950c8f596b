"""Write the page of a plan, as a file or in a notebook: predictions next to measurements."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from argosy.choose.scenario import Horizon, exact_times
from argosy.cluster.lasting import last_change
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.explain.shown import shown_plan
from argosy.plan.plan import Plan
from argosy.report.decisions import Told
from argosy.report.page.page import PageContent, Picture, ScenarioTimes, report_page
from argosy.timeline import Timeline
from argosy.workload.chain import Chain

# The largest number of iterations of a scenario that are simulated.
_ITERATIONS = 200


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report that shows a plan: ``save`` writes the page, and a notebook displays it."""

    plan: Plan
    chain: Chain
    cluster: Cluster
    model: ComputeModel = field(default_factory=ComputeModel)
    measured: Mapping[str, Timeline] = field(default_factory=dict)
    """Measured timelines by the name under which they are shown."""
    rivals: Sequence[tuple[str, float | None, str]] = ()
    """Other planners, the seconds of an iteration of theirs, and why it takes longer, including
    ours."""
    decided: Sequence[Told] = ()
    """The changes that a run made."""
    scenarios: Mapping[str, Cluster] = field(default_factory=dict)
    """The cluster under other traces, by name."""

    def __repr__(self) -> str:
        return f"Report: {self.plan!r}; save(path) writes the page"

    def save(self, path: Path | str) -> Path:
        """Write the page to a file and return its path."""
        Path(path).write_text(self.html, encoding="utf-8")
        return Path(path)

    def _repr_html_(self) -> str:
        """Return the page in a frame, so that its styles and those of the notebook do not
        interfere."""
        frame = 'style="width:100%;height:80vh;border:1px solid #8888" title="Argosy report"'
        return f'<iframe {frame} srcdoc="{html.escape(self.html, quote=True)}"></iframe>'

    @cached_property
    def html(self) -> str:
        """Return the text of the page."""
        shown = shown_plan(self.plan, self.chain, self.cluster, self.model)
        pictures = [
            Picture(label=f"predicted, {schedule!r}", timeline=timeline)
            for schedule, timeline in shown.timelines
        ]
        pictures += [
            Picture(label=f"{timeline.clock}, {name}", timeline=timeline)
            for name, timeline in self.measured.items()
        ]
        return report_page(
            shown.plan,
            self.cluster,
            pictures,
            PageContent(
                explanation=shown.explanation,
                memory=shown.memory,
                rivals=self.rivals,
                decided=self.decided,
                scenarios=[self._under(name, where) for name, where in self.scenarios.items()],
            ),
        )

    def _under(self, name: str, cluster: Cluster) -> ScenarioTimes:
        """Simulate the plan in one scenario."""
        horizon = Horizon(seconds=max(last_change([cluster]), 1e-9), iterations=_ITERATIONS)
        times = exact_times(self.plan, self.chain, cluster, self.model, horizon)
        return ScenarioTimes(name=name, seconds=tuple(times.tolist()))
