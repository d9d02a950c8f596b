"""How inner loops become machine code.

Every kernel releases the interpreter's lock, so that plain threads run side by side, and divides as
numpy does: with Python's own check for zero LLVM vectorises nothing (a factor of nine in the pair
kernel). Sums may be re-ordered, but values that are not numbers keep their meaning. A cached kernel
is rebuilt when its own file changes, not when another one does: a kernel only calls kernels of its
own file. What kernels call is ``inlined`` into them: a call may reach the copy that was translated
alone or the one translated with its caller, by whether the process translated them or found them on
disk, and the two round differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_REORDER = {"reassoc", "contract", "arcp", "nsz"}


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function as machine code, translated at its first call and kept on disk."""
    build = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=_REORDER)
    return cast("Callable[Arguments, Result]", build(function))


def inlined(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same for what other kernels call: always a part of their machine code, so that it rounds
    one way."""
    build = numba.njit(
        nogil=True, cache=True, error_model="numpy", fastmath=_REORDER, forceinline=True
    )
    return cast("Callable[Arguments, Result]", build(function))


def compiled_exactly(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same, with every sum in the order it is written in and every product rounded."""
    build = numba.njit(nogil=True, cache=True, error_model="numpy")
    return cast("Callable[Arguments, Result]", build(function))
