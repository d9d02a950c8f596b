"""Plan, simulate and run training on unequal devices over a changing network.

    plan = argosy.find_plan("llama-3-8b", "mixed-16", global_batch=128, dtype="fp16")
    plan.explain()
    plan.simulate(iterations=3).iteration_seconds
    plan.save("plan.json")

Names are imported when they are first used, so that ``import argosy`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.api import Shown as Shown
    from argosy.api import check_plan as check_plan
    from argosy.api import compare as compare
    from argosy.api import export as export
    from argosy.api import find_plan as find_plan
    from argosy.api import simulate as simulate
    from argosy.cluster.file import load_cluster as load_cluster
    from argosy.cluster.file import with_changes as with_changes
    from argosy.cluster.topology import Cluster as Cluster
    from argosy.cluster.trace import Trace as Trace
    from argosy.cost.compute import ComputeModel as ComputeModel
    from argosy.errors import ArgosyError as ArgosyError
    from argosy.errors import InfeasibleError as InfeasibleError
    from argosy.errors import InputError as InputError
    from argosy.errors import RunError as RunError
    from argosy.plan.file import dumps_plan as dumps_plan
    from argosy.plan.file import load_plan as load_plan
    from argosy.plan.plan import Plan as Plan
    from argosy.plan.plan import Replica as Replica
    from argosy.plan.plan import Stage as Stage
    from argosy.planner import Settings as Settings
    from argosy.report.page.report import Report as Report
    from argosy.runtime.sources.operations import capture_program as capture_program
    from argosy.runtime.step.trainer import Trainer as Trainer
    from argosy.runtime.step.trainer import parallelize as parallelize
    from argosy.schedule import ScheduleSpec as ScheduleSpec
    from argosy.timeline import Timeline as Timeline
    from argosy.timeline.file import dumps_timeline as dumps_timeline
    from argosy.timeline.file import load_timeline as load_timeline
    from argosy.workload.chain import Chain as Chain
    from argosy.workload.load import load_model as load_model

__version__ = "0.1.0"

# The public names of each module.
_NAMES = {
    "argosy.api": "Shown check_plan compare export find_plan simulate",
    "argosy.cluster.file": "load_cluster with_changes",
    "argosy.cluster.topology": "Cluster",
    "argosy.cluster.trace": "Trace",
    "argosy.cost.compute": "ComputeModel",
    "argosy.errors": "ArgosyError InfeasibleError InputError RunError",
    "argosy.plan.file": "dumps_plan load_plan",
    "argosy.plan.plan": "Plan Replica Stage",
    "argosy.planner": "Settings",
    "argosy.report.page.report": "Report",
    "argosy.runtime.sources.operations": "capture_program",
    "argosy.runtime.step.trainer": "Trainer parallelize",
    "argosy.schedule": "ScheduleSpec",
    "argosy.timeline": "Timeline",
    "argosy.timeline.file": "dumps_timeline load_timeline",
    "argosy.workload.chain": "Chain",
    "argosy.workload.load": "load_model",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
