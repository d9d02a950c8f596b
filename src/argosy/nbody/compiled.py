"""Compile inner loops to machine code with numba.

Every kernel releases the interpreter's lock, so that plain threads run in parallel, and divides as
numpy does: with Python's own check for zero LLVM vectorises nothing (a factor of nine in the pair
kernel). Sums may be re-ordered, but NaN and infinity keep their meaning. A cached kernel is rebuilt
when its own file changes, not when another one does, so a kernel only calls kernels of its own
file. Functions that kernels call are ``inlined`` into them: otherwise a call could reach the copy
that was compiled alone or the one compiled with its caller, depending on whether the process
compiled them or found them on disk, and the two round differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba

# The arguments and the result of a kernel.
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# LLVM's fast-math flags that re-order sums and leave NaN and infinity alone.
_REORDER = {"reassoc", "contract", "arcp", "nsz"}


def _built(function: Callable[Arguments, Result], **options: Any) -> Callable[Arguments, Result]:
    build = numba.njit(nogil=True, cache=True, error_model="numpy", **options)
    return cast("Callable[Arguments, Result]", build(function))


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function as machine code, compiled at its first call and cached on disk."""
    return _built(function, fastmath=_REORDER)


def inlined(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a compiled function that is always inlined into its callers, so that it rounds one
    way."""
    return _built(function, fastmath=_REORDER, forceinline=True)


def compiled_exactly(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a compiled function with every sum in the written order and every product rounded."""
    return _built(function)
