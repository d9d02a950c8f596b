"""What a command left behind, and how tests run one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PLAN = "llama-3-8b-on-mixed-16"


@dataclass(frozen=True)
class Result:
    """Exit code, stdout, stderr."""

    code: object
    out: str
    err: str


Run = Callable[..., Result]
"""Called with the arguments of a command."""
