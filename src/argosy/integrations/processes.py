"""Hide the processes that torchrun started from a library that would divide the work among them
itself.

A plan divides the model and every batch. A library such as accelerate that finds torchrun's
variables in the environment would divide the data as well. So they are removed from the
environment, and restored only while Argosy joins the processes: the library behaves as if every
process were the only one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
)
"""Variables by which libraries find that torchrun started them."""


def hidden_variables() -> dict[str, str]:
    """Remove torchrun's variables from the environment, and return them."""
    return {name: os.environ.pop(name) for name in _NAMES if name in os.environ}


@contextlib.contextmanager
def visible(variables: dict[str, str]) -> Iterator[None]:
    """Restore these variables in the environment for the context."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
