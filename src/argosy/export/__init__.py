"""Plans for other systems: one module per target, each of which says what its target cannot express.

``argosy.export(plan, "megatron")`` calls this package itself.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """The package as a function, because both have one name."""

    def __call__(self, plan: Any, to: str, **options: Any) -> Any:
        """Write a plan for another system, as ``argosy.api.export`` does."""
        from argosy.api import export

        return export(plan, to, **options)


sys.modules[__name__].__class__ = _Callable
