"""Explain why a plan takes as long as it does, and which changes would help."""

from argosy.explain.explanation import Explanation, explain_plan, with_prediction
from argosy.explain.load import EdgeLoad, StageLoad
from argosy.explain.memory import DeviceMemory, planned_stack
from argosy.explain.whatif import WhatIf

__all__ = [
    "DeviceMemory",
    "EdgeLoad",
    "Explanation",
    "StageLoad",
    "WhatIf",
    "explain_plan",
    "planned_stack",
    "with_prediction",
]
