"""Give plans methods that call the package's functions for plans. Each is a line of
``argosy.api``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argosy.api import Shown
    from argosy.plan.plan import Plan
    from argosy.report.page import Report
    from argosy.timeline import Timeline


class PlanMethods:
    """A base class that gives plans methods of ``argosy.api``; model and cluster are the plan's own
    unless given."""

    @property
    def offloads(self: Any) -> bool:
        """Return whether any stage keeps something outside its devices."""
        return any(stage.offload for stage in self.stages)

    def explain(self: Plan, chain: Any = None, cluster: Any = None) -> Shown:  # type: ignore[misc]
        """Find out why the plan takes as long as it does, and what would help."""
        from argosy.api import explain

        return explain(self, chain, cluster)

    def simulate(  # type: ignore[misc]
        self: Plan, chain: Any = None, cluster: Any = None, **options: Any
    ) -> Timeline:
        """Simulate the plan in the exact engine: ``simulate(iterations=3)``."""
        from argosy.api import simulate

        return simulate(self, chain, cluster, **options)

    def report(self: Plan, chain: Any = None, cluster: Any = None) -> Report:  # type: ignore[misc]
        """Make the plan's page: a notebook shows it, ``save`` writes it."""
        from argosy.api import report

        return report(self, chain, cluster)

    def save(self: Plan, path: str | Path) -> Path:  # type: ignore[misc]
        """Write the plan to a file."""
        from argosy.api import save

        return save(self, path)

    def _repr_html_(self: Plan) -> str:  # type: ignore[misc]
        from argosy.api import plan_html

        return plan_html(self)
