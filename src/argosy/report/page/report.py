"""Everything that a page shows, from a plan: played, explained, set against what was measured. Also for notebooks."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from argosy.choose.scenario import Horizon, exact_times
from argosy.cluster.lasting import last_change
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.explain import explain_plan, planned_stack, with_prediction
from argosy.plan.plan import Plan
from argosy.report.decisions import Told
from argosy.report.page.page import Picture, ScenarioTimes, report_page
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.compile import compile_plan
from argosy.sim.exact import simulate_exact
from argosy.sim.fold import fold_plan
from argosy.timeline import Timeline
from argosy.workload.chain import Chain

_MOST_TASKS = 8_192
"""Devices times micro-batches that are simulated device by device; larger plans are folded along their symmetries."""
_MOST_ROWS = 256
"""Devices that are drawn one by one."""
_ITERATIONS = 200
"""Of a scenario, at most."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A plan to look at: ``save`` writes the page, a notebook shows it as it is."""

    plan: Plan
    chain: Chain
    cluster: Cluster
    model: ComputeModel = field(default_factory=ComputeModel)
    measured: Mapping[str, Timeline] = field(default_factory=dict)
    """By the name under which they are shown."""
    rivals: Sequence[tuple[str, float | None, str]] = ()
    """Other planners, the seconds of an iteration of theirs, and why it takes longer; ours among them."""
    decided: Sequence[Told] = ()
    """What a run changed."""
    scenarios: Mapping[str, Cluster] = field(default_factory=dict)
    """The same cluster under other traces, by name."""

    def save(self, path: Path | str) -> Path:
        Path(path).write_text(self.html, encoding="utf-8")
        return Path(path)

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that it and the notebook leave each other's styles alone."""
        frame = 'style="width:100%;height:80vh;border:1px solid #8888" title="Argosy report"'
        return f'<iframe {frame} srcdoc="{html.escape(self.html, quote=True)}"></iframe>'

    @cached_property
    def html(self) -> str:
        """The page."""
        plan, chain, cluster, model = self.plan, self.chain, self.cluster, self.model
        small = len(plan.devices) * plan.num_micro_batches <= _MOST_TASKS // 2
        explanation = explain_plan(plan, chain, cluster, model=model) if small else None
        pictures = [*self._predicted(), *self._measured()]
        predicted = with_prediction(plan, chain, cluster, model=model)
        times = [self._under(name, where) for name, where in self.scenarios.items()]
        return report_page(
            predicted,
            cluster,
            pictures,
            explanation=explanation,
            memory=() if small else planned_stack(plan, chain, cluster),
            rivals=self.rivals,
            decided=self.decided,
            scenarios=times,
        )

    def _measured(self) -> list[Picture]:
        return [Picture(label=f"{one.clock}, {name}", timeline=one) for name, one in self.measured.items()]

    def _predicted(self) -> list[Picture]:
        """The plan under its own schedule first, then under others that it could switch to."""
        plan = self.plan
        tasks = len(plan.devices) * plan.num_micro_batches
        others = [ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B), ScheduleSpec(kind=ScheduleKind.EAGER)]
        others += [ScheduleSpec(kind=ScheduleKind.KFKB, k=k) for k in (2, 4) if k <= plan.num_micro_batches]
        simple = plan.schedule.kind not in (ScheduleKind.INTERLEAVED, ScheduleKind.ZERO_BUBBLE)
        switch = len(plan.stages) > 1 and simple and tasks <= _MOST_TASKS // 4 and not self.model.blocking
        pictures = []
        for schedule in (plan.schedule, *(other for other in others if switch and other != plan.schedule)):
            variant = replace(plan, schedule=schedule)
            if tasks <= _MOST_TASKS and len(plan.devices) <= _MOST_ROWS:
                graph, where = compile_plan(variant, self.chain, self.cluster, self.model), self.cluster
            else:
                graph, where = fold_plan(variant, self.chain, self.cluster, self.model)
            timeline = simulate_exact(graph, where, record=1)
            pictures.append(Picture(label=f"predicted, {schedule!r}", timeline=timeline))
        return pictures

    def _under(self, name: str, cluster: Cluster) -> ScenarioTimes:
        horizon = Horizon(seconds=max(last_change([cluster]), 1e-9), iterations=_ITERATIONS)
        times = exact_times(self.plan, self.chain, cluster, self.model, horizon)
        return ScenarioTimes(name=name, seconds=tuple(times.tolist()))
