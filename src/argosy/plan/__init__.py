"""How a model runs on a cluster: the plan, its file and its checker."""

from argosy.plan.check import check_plan
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Recompute, Replica, Stage

__all__ = ["ClusterRef", "ModelRef", "Plan", "Recompute", "Replica", "Stage", "check_plan"]
