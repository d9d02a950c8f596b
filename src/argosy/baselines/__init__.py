"""Make the plans of other planners: one file per planner, each a function from a ``PlanningJob`` to
a ``Plan`` or to the reason why there is none.

They are written from the published descriptions of these planners, decide by their own rules and
cost formulas, and are then judged by the same exact simulator as Argosy's plans
(``explain.contest``).
"""

from argosy.baselines.dapple import dapple_plan
from argosy.baselines.data_parallel import even_batches, proportional_batches, sharded
from argosy.baselines.even import even_on_one_kind, even_plan
from argosy.baselines.gpipe import gpipe_plan
from argosy.baselines.job import Baseline, NoPlan, PlanningJob
from argosy.baselines.metis import metis_plan
from argosy.baselines.pipedream import pipedream_plan

BASELINES: dict[str, Baseline] = {
    "megatron": even_plan,
    "megatron-1-kind": even_on_one_kind,
    "metis-like": metis_plan,
    "dapple": dapple_plan,
    "pipedream": pipedream_plan,
    "gpipe": gpipe_plan,
    "dp-ev": even_batches,
    "dp-cp": proportional_batches,
    "fsdp": sharded,
}
"""Each planner by the name that ``argosy compare`` shows."""

__all__ = ["BASELINES", "Baseline", "NoPlan", "PlanningJob"]
